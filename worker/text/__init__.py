"""Text of tokens: detokenizing and stop strings."""

__all__ = ["detokenize", "encodable", "stops"]

"""Text of tokens: detokenizing and stop strings."""

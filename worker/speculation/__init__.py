"""Speculation: drafts of a row's next tokens, and whether it pays to verify them."""

__all__ = ["costs", "drafter", "eager", "lookup", "noisy", "speculator", "text"]

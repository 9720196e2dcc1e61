"""Speculation: drafts of a row's next tokens, and whether it pays to verify them."""

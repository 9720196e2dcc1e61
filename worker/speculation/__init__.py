"""Speculative decoding: drafts of a row's next tokens, and the choice whether to verify them."""

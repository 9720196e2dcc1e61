"""Speculative decoding: drafts from text and from models, and when they pay."""

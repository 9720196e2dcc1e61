"""Drafts from text: n-gram lookup in prompts and outputs."""

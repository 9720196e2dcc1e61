"""Drafts from models: prediction heads, EAGLE, block drafters and draft models."""

"""Verbs about models on this machine and on the Hugging Face hub."""

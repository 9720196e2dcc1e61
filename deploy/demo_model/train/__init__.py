"""Tokenizer and training of the demo model. The tokenizer does not need PyTorch."""

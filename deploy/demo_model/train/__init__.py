"""The tokenizer and the training of the demo model. The tokenizer needs no PyTorch."""

"""Sparse prefill: the model runs only those tokens of a long prompt that are important to a smaller model."""

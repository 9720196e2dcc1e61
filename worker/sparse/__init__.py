"""Sparse prefill: of a long prompt the model runs the tokens that matter to a smaller one."""

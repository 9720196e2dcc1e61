"""Sampling: the sampler of a batch, each row's logit processors, and log-probabilities."""

"""Sparse prefill: of a long prompt the model runs the tokens that matter to a smaller one."""

__all__ = ["chooser", "gap_check", "importance", "kept"]

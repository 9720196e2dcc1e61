"""`mlxctl adapter`: LoRA and DoRA adapters of the daemon's models."""

__all__ = ["verb"]

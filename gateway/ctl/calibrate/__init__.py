"""`mlxctl calibrate`: a model's speeds on this machine, measured on purpose."""

__all__ = ["verb"]

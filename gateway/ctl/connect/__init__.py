"""`mlxctl connect`."""

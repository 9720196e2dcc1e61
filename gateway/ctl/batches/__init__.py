"""`mlxctl batches`."""

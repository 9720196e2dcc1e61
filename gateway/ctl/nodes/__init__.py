"""`mlxctl node`: other machines whose mlxd may run ranks of this one's groups."""

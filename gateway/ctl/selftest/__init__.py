"""`mlxctl selftest`: the list of docs/macos.md as a program."""

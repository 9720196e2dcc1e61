"""`mlxctl doctor`: checks of an installation."""

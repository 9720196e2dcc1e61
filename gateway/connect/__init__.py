"""Configurations of clients for mlxd: made, merged into their files, written with a backup."""

__all__ = ["client_setups", "config_write"]

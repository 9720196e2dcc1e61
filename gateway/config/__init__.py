"""Configuration: its file, its settings and the names that clients use."""

__all__ = [
    "address",
    "certificate",
    "export",
    "group_check",
    "load",
    "names",
    "node_tables",
    "origins",
    "patterns",
    "peer_tables",
    "periods",
    "remote_settings",
    "settings",
    "syntax",
    "worker_spec",
]

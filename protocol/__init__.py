"""The wire between the gateway and its workers. Imports neither side."""

__all__ = [
    "__version__",
    "codec",
    "context",
    "failures",
    "kinds",
    "messages",
    "minors",
    "model_digest",
    "peering",
    "sockets",
    "spec",
    "stats",
    "towers",
    "verify",
    "wisdom",
]

__version__ = "0.1.0"

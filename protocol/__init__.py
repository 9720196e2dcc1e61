"""The wire between the gateway and its workers. Imports neither side."""

__all__ = [
    "__version__",
    "codec",
    "collectives",
    "context",
    "curve",
    "experts",
    "failures",
    "group",
    "key_guard",
    "kinds",
    "messages",
    "minors",
    "model_digest",
    "model_info",
    "node_agent",
    "peering",
    "prediction_heads",
    "quantized_kv",
    "sharding",
    "sockets",
    "spec",
    "stats",
    "towers",
    "transcript",
    "verify",
    "wisdom",
]

__version__ = "0.1.0"

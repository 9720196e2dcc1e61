"""HTTP under all endpoints: connections, bodies, answers, event streams, TLS and captures."""

__all__ = [
    "capture",
    "connection_limits",
    "direct_write",
    "encoder",
    "exchange",
    "handshake",
    "listen",
    "multipart",
    "shared_answers",
    "sse",
    "tls",
]

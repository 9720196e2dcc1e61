"""Cache of prefixes: KV in memory, as a radix tree, and on disk."""

__all__ = [
    "batched",
    "block_events",
    "counts",
    "fingerprint",
    "kv",
    "prefix",
    "quantized",
    "radix_tree",
    "ragged",
    "salts",
]

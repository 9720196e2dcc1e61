"""Cache of prefixes: KV in memory, as a radix tree, and on disk."""

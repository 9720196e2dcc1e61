"""KV caches of the running batch: ragged, batched and quantized."""

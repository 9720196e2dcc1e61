"""`mlxctl bench` and the parts that benchmarks share: a client, a closed loop, prompts and percentiles."""

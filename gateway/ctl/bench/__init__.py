"""`mlxctl bench`, and what the benchmarks share with it: a client, a closed loop, words, percentiles."""

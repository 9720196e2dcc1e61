"""Worker: one process per loaded model, which tokenizes, schedules, batches on MLX, detokenizes and parses."""

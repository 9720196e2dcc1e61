"""Audio in and out: models that hear or speak, by mlx-audio, and their loop."""

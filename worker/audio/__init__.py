"""Speech to text and text to speech: models of mlx-audio, and their loop."""

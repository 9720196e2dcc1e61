"""Speech to text and text to speech with models of mlx-audio, and the loop that computes them."""

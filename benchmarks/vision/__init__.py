"""Cost of images: on the way to an answer, inside of a worker, and beside mlx-vlm's own server."""

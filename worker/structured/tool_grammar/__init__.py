"""Grammars that make a model call tools, in its family's own markup. Imports no MLX."""

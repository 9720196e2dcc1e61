"""Parsers from generated text to events (reasoning, content and tool calls) for every model family. Imports no MLX."""

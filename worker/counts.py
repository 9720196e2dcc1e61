"""What the prefix cache has done; free of MLX, so that the IO threads can hold it before the model is loaded."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """What happened since the worker started."""

    queries: int = 0
    hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0

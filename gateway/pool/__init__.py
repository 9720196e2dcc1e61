"""Pool of workers: which models have one, its start and its end."""

__all__ = ["pool"]

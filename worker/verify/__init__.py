"""Checks that a request's output is its own, however it is run: `python -m worker.verify`, for `mlxctl verify`."""

__all__: list[str] = []

"""Checks that a request's output is its own, however it is run: `python -m worker.tools.verify`, for `mlxctl
verify`.
"""

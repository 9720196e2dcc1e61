"""Checks that a request's output does not depend on how it is run: `python -m worker.tools.verify`."""

"""Families of common tools in many spellings: the tool's schema and requests for it.

The families are in `tables/tool_families.toml`. A parameter is written as `names; kind; descriptions`, with `|` between
descriptions. In a request, `{0}` is the value of the first parameter. An optional parameter has a phrase that may
follow the request. `tool_values.draw` defines the kinds.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from .files import table


class Family(NamedTuple):
    """Family of one tool: spellings of its name, descriptions, parameters, requests, optional parameters with their
    phrases."""

    names: list[str]
    about: list[str]
    params: list[str]
    asks: list[str]
    optional: Sequence[tuple[str, str]] = ()
    topic: str = ""


FAMILIES: Final = tuple(Family(**family) for family in table("tool_families")["family"])

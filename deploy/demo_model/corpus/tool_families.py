"""Tools that people really write, in many spellings: the shape of the tool, and how a person asks for it.

They stand in `tables/tool_families.toml`. A parameter is written as `names; kind; descriptions`, with `|` between the
descriptions. In a request `{0}` is the value of the first parameter. An optional parameter is a phrase that may follow
the request. The kinds are those of `tool_values.draw`.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from .files import table


class Family(NamedTuple):
    """One tool: spellings of its name, descriptions, parameters, requests, optional parameters with their phrases."""

    names: list[str]
    about: list[str]
    params: list[str]
    asks: list[str]
    optional: Sequence[tuple[str, str]] = ()
    topic: str = ""


FAMILIES: Final = tuple(Family(**family) for family in table("tool_families")["family"])

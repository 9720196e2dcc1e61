"""Samples of the generator: one turn of a skill, and one whole conversation."""

from dataclasses import dataclass
from typing import Any, Literal

Check = Literal["exact", "contains", "calls", "json"]


@dataclass(slots=True)
class Turn:
    """One request and its answer. `keys` are what a `contains` check wants to find in the answer."""

    user: str
    answer: str
    thought: str
    check: Check = "exact"
    keys: tuple[str, ...] = ()


@dataclass(slots=True)
class Sample:
    """One conversation in the shape of the OpenAI API; its last message is the answer that a measurement expects.

    `thinking` is the `enable_thinking` of the template. Reasoning is in `reasoning_content`. With `learn_last` the
    earlier answers come from another assistant and are not learned.
    """

    category: str
    messages: list[dict[str, Any]]
    check: Check = "exact"
    keys: tuple[str, ...] = ()
    tools: list[dict[str, Any]] | None = None
    thinking: bool = False
    skill: str = ""
    learn_last: bool = False

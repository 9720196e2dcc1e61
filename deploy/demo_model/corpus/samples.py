"""Samples of the generator: a turn of one skill, and a whole conversation."""

from dataclasses import dataclass
from typing import Any, Literal

Check = Literal["exact", "contains", "calls", "json"]


@dataclass(slots=True)
class Turn:
    """One request and its answer. A `contains` check requires every text of `keys` in the answer."""

    user: str
    answer: str
    thought: str
    check: Check = "exact"
    keys: tuple[str, ...] = ()


@dataclass(slots=True)
class Sample:
    """One conversation in the format of the OpenAI API; its last message is the expected answer.

    `thinking` is the template's `enable_thinking`. Reasoning is in `reasoning_content`. With `learn_last`, the earlier
    answers come from another assistant and are not learned.
    """

    category: str
    messages: list[dict[str, Any]]
    check: Check = "exact"
    keys: tuple[str, ...] = ()
    tools: list[dict[str, Any]] | None = None
    thinking: bool = False
    skill: str = ""
    learn_last: bool = False

"""The official clients' models as judges: whether a body has what they require, and nothing that they do not know."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter

# What other servers of open models add, and clients of theirs read.
REASONING: Final = frozenset({"reasoning", "reasoning_content"})


def check(kind: Any, value: Any, *, ours: frozenset[str] = frozenset()) -> None:
    """Strictly: no number for a text, nothing missing, nothing unknown but `ours`."""
    made = _adapter(kind).validate_json(json.dumps(value), strict=True)
    unknown = {f"{type(model).__name__}.{name}" for model, name in _unknown(made) if name not in ours}
    assert not unknown, f"{unknown} in {value}"


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _unknown(value: Any) -> Iterator[tuple[BaseModel, str]]:
    """The fields that a model does not have, at any depth."""
    if isinstance(value, BaseModel):
        for name in value.model_extra or ():
            yield value, name
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name))
    elif isinstance(value, list):
        for one in value:
            yield from _unknown(one)

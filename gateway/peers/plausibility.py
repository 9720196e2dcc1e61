"""Checks of the numbers that a peer sends: what is told to clients, charged to keys and counted must be possible."""

import math
from typing import Final

from msgspec.structs import astuple

from protocol.codec import MalformedFrame
from protocol.messages import Ready
from protocol.peering import PeerModel

# More than any count or time of a machine.
NUMBER_MAX: Final = 1 << 53


def check_model(model: PeerModel) -> None:
    """Raises `MalformedFrame` for a model whose numbers are negative or not finite."""
    given: list[object] = [*astuple(model), *(() if model.ready is None else _numbers(model.ready))]
    if not all(0 <= value <= NUMBER_MAX for value in given if isinstance(value, int | float)):
        raise MalformedFrame(f"a number of its model {model.name[:100]!r} is negative or out of range")
    defaults: list[object] = [*model.sampling.values(), *model.thinking.values()]
    if not all(math.isfinite(value) for value in defaults if isinstance(value, float)):
        raise MalformedFrame(f"a default of its model {model.name[:100]!r} is not finite")


def _numbers(ready: Ready) -> list[object]:
    """Fields of a loaded model, without its epoch, which may be any."""
    media = () if ready.media is None else astuple(ready.media)
    embedding = () if ready.embedding is None else astuple(ready.embedding)
    return [*astuple(ready)[1:], *media, *embedding]

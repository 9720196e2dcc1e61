"""Ollama's `keep_alive`: how long a model stays loaded after a request."""

import re
from typing import Annotated, Final

from msgspec import Meta

# Matches durations of zero in Go's notation, or in seconds. Each number of a longer duration must end in a unit;
# otherwise matching a row of zeros could take exponential time.
_ZERO: Final = re.compile(r"[-+]?(0+(\.0*)?|(0+(\.0*)?(ns|us|µs|μs|ms|s|m|h))+)")
KeepAlive = float | Annotated[str, Meta(max_length=64)]


def is_zero(keep_alive: float | str | None) -> bool:
    """Whether a `keep_alive` is a duration of zero."""
    return bool(_ZERO.fullmatch(keep_alive.strip())) if isinstance(keep_alive, str) else keep_alive == 0

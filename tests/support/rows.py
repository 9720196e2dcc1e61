"""Rows without a model."""

import time
from typing import Any

from protocol.messages import Sampling
from worker.engine.row import Row
from worker.output.stops import StopScanner


class Silent:
    """A detokenizer for rows whose text nobody reads."""

    def add(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def row(rid: int, **settings: Any) -> Row:
    defaults: dict[str, Any] = {
        "prompt": [1, 2, 3],
        "sampling": Sampling(),
        "max_tokens": 4,
        "detokenizer": Silent(),
        "stops": StopScanner(()),
        "arrived": time.monotonic(),
    }
    return Row(rid, **{**defaults, **settings})

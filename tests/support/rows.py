"""Rows without a model."""

import time
from typing import Any

from protocol.to_worker import Sampling
from worker.engine.row import Row, RowStats, RowText
from worker.output.stops import StopScanner


class Silent:
    """A detokenizer for rows whose text nobody reads."""

    def add(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def row(rid: int, *, detokenizer: Any = None, stops: StopScanner | None = None, **settings: Any) -> Row:
    defaults: dict[str, Any] = {
        "prompt": [1, 2, 3],
        "sampling": Sampling(),
        "max_tokens": 4,
        "text": RowText(detokenizer or Silent(), stops or StopScanner(())),
        "stats": RowStats(time.monotonic()),
    }
    return Row(rid, **{**defaults, **settings})

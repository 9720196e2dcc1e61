"""Rows without text, for checks and the warm-up."""

import time
from collections.abc import Sequence

from protocol.to_worker import Sampling
from worker.engine.row import Row, RowStats, RowText
from worker.output.stops import StopScanner


class _NullDetokenizer:
    """Detokenizer of a row without text."""

    def add(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def silent_row(
    rid: int, prompt: list[int], max_tokens: int, *, ignore_eos: bool = True, stop_ids: Sequence[int] = ()
) -> Row:
    """Return a greedy row whose tokens are not decoded."""
    return Row(
        rid=rid,
        prompt=prompt,
        sampling=Sampling(temperature=0.0, ignore_eos=ignore_eos, stop_ids=tuple(stop_ids)),
        max_tokens=max_tokens,
        text=RowText(_NullDetokenizer(), StopScanner(())),
        stats=RowStats(time.monotonic()),
    )

"""Outbox of a loop: deltas of one step, sent as one message, with periodic statistics."""

import time
from collections.abc import Callable
from typing import Final

from protocol.failures import Failure
from protocol.from_worker import Delta, DeltaKind, PromptLogprob, PromptPart, Step, TokenLogprob, Up, Usage
from worker.engine.gauges import Gauges
from worker.engine.output import TokenOutput
from worker.engine.row import Row
from worker.output.parsers.events import Event

_STATS_INTERVAL_S: Final = 0.1
_MEMORY_INTERVAL_S: Final = 1.0
_EMPTY_TEXT: Final = (Event(DeltaKind.TEXT),)


class Outbox:
    """Messages to the gateway, sent through `send` at once or with the next `flush`. Owned by the loop's thread.

    With `one_delta_per_frame` each delta has a message of its own, for data that can fill a frame.
    """

    def __init__(
        self, epoch: int, gauges: Gauges, send: Callable[[Up], None], *, one_delta_per_frame: bool = False
    ) -> None:
        self.send = send
        self._epoch = epoch
        self._gauges = gauges
        self._one_delta_per_frame = one_delta_per_frame
        self._deltas: list[Delta] = []
        self._stats_due = 0.0
        self._memory_due = 0.0

    def add(self, delta: Delta) -> None:
        """Add a delta to the next message."""
        self._deltas.append(delta)

    def add_echo(self, row: Row, logprobs: tuple[TokenLogprob, ...] | None = None) -> None:
        """Add log-probabilities of the next tokens of an echoed prompt. The first call adds the prompt's text too."""
        text = "" if row.report.echo_sent else row.report.echo
        self._deltas.append(Delta(row.rid, text=text, logprobs=logprobs))

    def add_prompt(self, row: Row, logprobs: tuple[PromptLogprob, ...] = ()) -> None:
        """Add log-probabilities of the next tokens of a prompt, or all of the prompt's ids if there are none."""
        self._deltas.append(Delta(row.rid, prompt=PromptPart(() if logprobs else tuple(row.prompt), logprobs)))

    def add_output(
        self, row: Row, output: TokenOutput, usage: Usage | None = None, failure: Failure | None = None
    ) -> None:
        """Add one delta for each event. Ids and logprobs are on the first delta, the end on the last."""
        ids: tuple[int, ...] = tuple(row.text.unsent)
        logprobs, rest = output.logprobs, len(output.events) or 1
        row.text.unsent.clear()
        ending = () if output.finish is None else tuple(held.id for held in row.text.held if not held.is_sent)
        for event in output.events or _EMPTY_TEXT:
            rest -= 1
            is_last = rest == 0
            self._deltas.append(
                Delta(
                    row.rid,
                    event.kind,
                    event.text,
                    ids,
                    event.tool,
                    logprobs,
                    output.finish if is_last else None,
                    usage if is_last else None,
                    failure if is_last else None,
                    row.text.stops.hit if is_last else "",
                    ending_ids=ending if is_last else (),
                )
            )
            ids, logprobs = (), None

    def flush(self, measure: Callable[[], None]) -> None:
        """Send the deltas, with statistics when they are due; `measure` updates the memory gauges."""
        now = time.monotonic()
        is_due = now >= self._stats_due
        if not self._deltas and not is_due:
            return
        if now >= self._memory_due:
            measure()
            self._memory_due = now + _MEMORY_INTERVAL_S
        if is_due:
            self._stats_due = now + _STATS_INTERVAL_S
        deltas, self._deltas = self._deltas, []
        if self._one_delta_per_frame:
            for delta in deltas:
                self.send(Step(self._epoch, self._gauges.step_seq, [delta]))
            deltas = []
            if not is_due:
                return
        self.send(Step(self._epoch, self._gauges.step_seq, deltas, self._gauges.snapshot() if is_due else None))

"""Outbox of the engine: deltas of one step, sent as one message, with statistics now and then."""

import time
from collections.abc import Callable
from typing import Final

from protocol.failures import Failure
from protocol.from_worker import Delta, DeltaKind, PromptLogprob, PromptPart, Step, TokenLogprob, Up, Usage
from worker.engine.gauges import Gauges
from worker.engine.output import TokenOutput
from worker.engine.row import Row
from worker.output.parsers import Event

_STATS_EVERY_S: Final = 0.1
_MEMORY_EVERY_S: Final = 1.0
_NOTHING: Final = (Event(DeltaKind.TEXT),)


class Outbox:
    """Owned by the engine thread. Messages leave by `send`, at once or with the next `flush`."""

    def __init__(self, epoch: int, gauges: Gauges, send: Callable[[Up], None]) -> None:
        self.send = send
        self._epoch = epoch
        self._gauges = gauges
        self._deltas: list[Delta] = []
        self._stats_due = 0.0
        self._memory_due = 0.0

    def echo(self, row: Row, logprobs: tuple[TokenLogprob, ...] | None = None) -> None:
        """Send the text of a prompt before its answer, with log-probabilities of its first tokens, or of the next
        ones.
        """
        text = "" if row.report.echo_sent else row.report.echo
        self._deltas.append(Delta(row.rid, text=text, logprobs=logprobs))

    def tell_prompt(self, row: Row, logprobs: tuple[PromptLogprob, ...] = ()) -> None:
        """Log-probabilities of the next tokens of a prompt; without them, all of its ids."""
        self._deltas.append(Delta(row.rid, prompt=PromptPart(() if logprobs else tuple(row.prompt), logprobs)))

    def say(self, row: Row, piece: TokenOutput, usage: Usage | None = None, failure: Failure | None = None) -> None:
        """One delta for each event; ids and logprobs ride on the first, the end on the last."""
        ids: tuple[int, ...] = tuple(row.text.unsent)
        logprobs, rest = piece.logprobs, len(piece.events) or 1
        row.text.unsent.clear()
        ending = () if piece.finish is None else tuple(held.id for held in row.text.held if not held.is_sent)
        for event in piece.events or _NOTHING:
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
                    piece.finish if is_last else None,
                    usage if is_last else None,
                    failure if is_last else None,
                    row.text.stops.hit if is_last else "",
                    ending_ids=ending if is_last else (),
                )
            )
            ids, logprobs = (), None

    def flush(self, measure: Callable[[], None]) -> None:
        """One message for everything that this step produced; `measure` brings the gauges of memory up to date."""
        now = time.monotonic()
        is_due = now >= self._stats_due
        if not self._deltas and not is_due:
            return
        if now >= self._memory_due:
            measure()
            self._memory_due = now + _MEMORY_EVERY_S
        if is_due:
            self._stats_due = now + _STATS_EVERY_S
        deltas, self._deltas = self._deltas, []
        self.send(Step(self._epoch, self._gauges.step_seq, deltas, self._gauges.snapshot() if is_due else None))

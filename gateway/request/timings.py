"""Phases of a request and their durations."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from gateway.control_types import RequestTiming
from protocol.from_worker import Usage

NO_USAGE: Final = Usage(0, 0, 0)


@dataclass(slots=True)
class Phases:
    """Durations of a request's phases in seconds. Of several sequences, the longest duration counts.

    `loading_from` and `sent_at` are seconds after the request's arrival, None before these events. `load` is any wait
    for the model: for a load, for memory or for a new worker. The worker reports `queue`, `prefill` and `decode`.
    """

    loading_from: float | None = None
    load: float = 0.0
    sent_at: float | None = None
    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    # Sums of what workers have reported, and the longest pause and rest in milliseconds.
    usage: Usage = NO_USAGE

    def add(self, usage: Usage) -> None:
        """Add the worker's timings of a finished sequence."""
        self.queue = max(self.queue, usage.queue_ms / 1000)
        self.prefill = max(self.prefill, usage.prefill_ms / 1000)
        self.decode = max(self.decode, usage.decode_ms / 1000)
        known = self.usage
        self.usage = Usage(
            prompt=known.prompt + usage.prompt,
            cached=known.cached + usage.cached,
            completion=known.completion + usage.completion,
            reasoning=known.reasoning + usage.reasoning,
            restored=known.restored + usage.restored,
            drafted=known.drafted + usage.drafted,
            drafts_accepted=known.drafts_accepted + usage.drafts_accepted,
            preemptions=known.preemptions + usage.preemptions,
            grammar_waits=known.grammar_waits + usage.grammar_waits,
            paused_ms=max(known.paused_ms, usage.paused_ms),
            rested_ms=max(known.rested_ms, usage.rested_ms),
        )

    def timing(self, total_s: float, first_token_s: float | None, resumes: int) -> RequestTiming:
        """Return the timing of the request until now."""
        usage = self.usage
        return RequestTiming(
            total_ms=_ms(total_s),
            ttft_ms=None if first_token_s is None else _ms(first_token_s),
            load_ms=_ms(self.load),
            queue_ms=_ms(self.queue),
            prefill_ms=_ms(self.prefill),
            decode_ms=_ms(self.decode),
            paused_ms=round(usage.paused_ms, 1),
            rested_ms=round(usage.rested_ms, 1),
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            restored_tokens=usage.restored,
            completion_tokens=usage.completion,
            reasoning_tokens=usage.reasoning,
            drafted_tokens=usage.drafted,
            accepted_tokens=usage.drafts_accepted,
            preemptions=usage.preemptions,
            grammar_waits=usage.grammar_waits,
            resumes=resumes,
        )

    def cut(self, now: float, prefill_from: float | None, first_token: float | None) -> None:
        """Estimate the phases of a request that ended before its worker reported them.

        All arguments are seconds after the request's arrival.
        """
        if self.sent_at is None:
            return
        started = prefill_from if prefill_from is not None else first_token
        self.queue = max(self.queue, (now if started is None else started) - self.sent_at)
        if started is not None:
            self.prefill = max(self.prefill, (now if first_token is None else first_token) - started)
        if first_token is not None:
            self.decode = max(self.decode, now - first_token)

    def spans(self) -> Iterator[tuple[str, float, float]]:
        """Yield the name, the start and the duration of each phase that took time."""
        if self.loading_from is not None and self.load > 0:
            yield "load", self.loading_from, self.load
        start = self.sent_at or 0.0
        for name, length in (("queue", self.queue), ("prefill", self.prefill), ("decode", self.decode)):
            if length > 0:
                yield name, start, length
            start += length

    def fields(self) -> dict[str, float]:
        """Return the durations as fields of a log line, in milliseconds."""
        named = {"load": self.load, "queue": self.queue, "prefill": self.prefill, "decode": self.decode}
        return {f"{name}_ms": _ms(length) for name, length in named.items() if length > 0}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)

"""Accounting of a request's tokens and times, in its record, its model's metrics, the ledger and its key's charge."""

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.access.rate_limit import UsageCharge
from gateway.config.settings import ModelConfig
from gateway.errors import ApiError, from_failure
from gateway.link.collector import Collector
from gateway.request.opener import LOST
from gateway.request.record import RequestRecord
from gateway.request.runtime import Runtime
from protocol.failures import Code, Failure
from protocol.from_worker import Delta, Finish
from protocol.to_worker import Generate

_STOPPED: Final = Failure(Code.ABORTED, "The server stopped this generation.")
_FINISHES: Final = {
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.TOOL_CALLS: "tool_calls",
    Finish.ABORT: "abort",
    Finish.ERROR: "error",
}
# Finish reasons of an answer that its model ended.
_COMPLETE: Final = frozenset({"stop", "tool_calls"})


class TokenAccounting:
    """Counts the output of one request's sequences. The request's generation passes every delta through it."""

    def __init__(
        self, runtime: Runtime, model: ModelConfig, generates: Sequence[Generate], record: RequestRecord
    ) -> None:
        self._record = record
        self._ledger = runtime.ledger
        self._model = model
        self._sequences = len(generates)
        self._numbers = runtime.metrics.model(model.name)
        if model.adapter:
            self._numbers.adapters[model.adapter] += len(generates)
        self._observe_gap = self._numbers.itl.observe
        # Number of tokens of a resumed request that an earlier daemon generated and has not charged.
        self._resumed_tokens = sum(len(generate.resume) for generate in generates)
        self._newest_token: dict[int, float] = {}
        # Number of sequences whose usage the worker has reported.
        self._reported = 0
        self.tokens = 0
        self.ended: set[int] = set()
        # Error for the client if the request was cancelled or there was no memory for its scores. It replaces the
        # worker's failure.
        self.cancelled: ApiError | None = None
        # Error of a failed request. It is set once all output before the failure has been returned.
        self.failure: ApiError | None = None

    def book(self, deltas: list[Delta]) -> list[Delta]:
        """Count new deltas and return those that the client gets.

        A delta that ends in ERROR or ABORT becomes `failure` instead.
        """
        now = self._record.clock()
        newest, has_end = self._newest_token, False
        for delta in deltas:
            rid = delta.rid
            if count := len(delta.token_ids):
                self.tokens += count
                if rid in newest:
                    if not self._record.is_of_batch_class:
                        self._observe_gap((now - newest[rid]) / count, count)
                else:
                    self._on_first_token(now)
                newest[rid] = now
            has_end = has_end or delta.finish is not None
        return self._book_ends(deltas) if has_end else deltas

    @property
    def is_complete(self) -> bool:
        """Whether all sequences have ended by themselves, with an answer or with tool calls."""
        ends = self._record.finishes
        return self.failure is None and len(ends) == self._sequences and {*ends} <= _COMPLETE

    def close(self, collector: Collector, unfinished: Sequence[int]) -> None:
        """Count the sequences whose usage the worker did not report. `unfinished` of them were aborted."""
        record = self._record
        for _ in unfinished:
            self._numbers.sequence_ended("abort", None)
            record.finishes.append("abort")
        if self._reported < self._sequences:
            prompt, cached, completion = self._known(collector)
            record.prompt_tokens, record.cached_tokens, record.completion_tokens = prompt, cached, completion
            self._cut_phases(collector)

    def charge(self, collector: Collector, usage: UsageCharge | None) -> None:
        """Charge the reported usage. For sequences that did not end, charge the tokens that are known."""
        record = self._record
        prompt, cached, completion = self._known(collector)
        self._ledger.book(record.caller.key or "", self._model.name, self._sequences, prompt, cached, completion)
        record.is_booked = True
        if usage is not None:
            usage.prompt, usage.completion = prompt, completion

    def _known(self, collector: Collector) -> tuple[int, int, int]:
        """Return the numbers of prompt, cached and completion tokens, as reported at the end or as seen so far."""
        record = self._record
        return (
            max(record.prompt_tokens, sum(collector.accepted.values())),
            max(record.cached_tokens, sum(collector.cached.values())),
            max(record.completion_tokens, self._resumed_tokens + self.tokens),
        )

    def _on_first_token(self, now: float) -> None:
        if self._record.first_token_s is None:
            self._record.first_token_s = now - self._record.started
            if not self._record.is_of_batch_class:
                self._numbers.ttft.observe(self._record.first_token_s)

    def _book_ends(self, deltas: list[Delta]) -> list[Delta]:
        """Count the terminal deltas among `deltas`, and return the deltas without a failure."""
        good: list[Delta] = []
        for delta in deltas:
            if delta.finish is None:
                good.append(delta)
                continue
            if delta.finish is Finish.ERROR or delta.finish is Finish.ABORT:
                self._note_failure(delta.failure or (_STOPPED if delta.finish is Finish.ABORT else LOST))
                if delta.text:
                    good.append(msgspec.structs.replace(delta, finish=None, usage=None, failure=None))
            else:
                good.append(delta)
            self._book_end(delta, _FINISHES[delta.finish])
        return good

    def _note_failure(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = self.cancelled or from_failure(failure, is_operator=self._record.caller.is_admin)
            self._record.detail = failure.detail

    def _book_end(self, delta: Delta, finish: str) -> None:
        self.ended.add(delta.rid)
        self._numbers.sequence_ended(finish, delta.usage)
        record = self._record
        record.finishes.append(finish)
        if delta.usage is not None:
            if not record.served_by:
                self._numbers.note_prefill(delta.usage)
            self._reported += 1
            record.prompt_tokens += delta.usage.prompt
            record.cached_tokens += delta.usage.cached
            record.completion_tokens += delta.usage.completion
            record.phases.add(delta.usage)

    def _cut_phases(self, collector: Collector) -> None:
        """Estimate the phases of a request that ended before its worker reported them."""
        record = self._record
        began = collector.prefill_began_at
        # The collector's times are on the event loop's clock.
        ago = 0.0 if began is None else asyncio.get_running_loop().time() - began
        now = record.clock() - record.started
        record.phases.cut(now, None if began is None else now - ago, record.first_token_s)

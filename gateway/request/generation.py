"""One request from admission to its last event: its output, its abort, and its state as operators see it.

Accounting of a request's tokens and times, in its record, its model's metrics, the ledger and its key's charge.

Leases of a request while it is served: admission, its key's rate limit, its model, and its place in the registry.

Memory for the log-probabilities of a request's prompts. They may be a thousand times as large as the prompts.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self

import msgspec

from gateway.access.caller import is_of_batch_class
from gateway.access.rate_limit import Meter, UsageCharge
from gateway.config.settings import ModelConfig
from gateway.errors import FULL_RETRY_AFTER_S, ApiError, BadRequest, Cancelled, Unavailable, from_failure
from gateway.link.collector import Collector, OnUnread
from gateway.media.modalities import likely_tokens
from gateway.request.body_memory import BodyLease
from gateway.request.opener import LOST, Opener, Runtime
from gateway.request.record import Header, RequestRecord, deviations_header, truncated_header
from protocol.checkpoint import TEXT
from protocol.codec import BYTES_PER_TOKEN, prompt_bytes
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

    def record(self, deltas: list[Delta]) -> list[Delta]:
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
        return self._record_ends(deltas) if has_end else deltas

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
        self._ledger.record(record.caller.key or "", self._model.name, self._sequences, prompt, cached, completion)
        record.is_recorded = True
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

    def _record_ends(self, deltas: list[Delta]) -> list[Delta]:
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
            self._record_end(delta, _FINISHES[delta.finish])
        return good

    def _note_failure(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = self.cancelled or from_failure(failure, is_operator=self._record.caller.is_admin)
            self._record.detail = failure.detail

    def _record_end(self, delta: Delta, finish: str) -> None:
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


def _estimate(meter: Meter, generates: Sequence[Generate], record: RequestRecord) -> float:
    """Estimate the tokens that will be charged. A prompt's tokens are estimated by its size, because it is not
    tokenized here.
    """
    if not meter.is_limited:
        return 0.0
    # Each sequence is charged for its prompt, including a stored conversation that it continues. Media are estimated
    # separately, because they have far more bytes than tokens.
    media_tokens = likely_tokens(record.media)
    return sum(
        (prompt_bytes(each) - record.media_bytes) / BYTES_PER_TOKEN + media_tokens + meter.expected(each.max_tokens)
        for each in generates
    )


# Maximum size of the log-probabilities in one answer. Repeated ones count each time.
SCORES_BYTES_MAX: Final = 256 << 20
# Approximate size of one token with its text as JSON. The objects that wait for a slow reader take twice as much.
TOKEN_JSON_BYTES: Final = 80


class ScoreRoom:
    """Memory for the prompt scores of one request until its end. It is a part of the memory for request bodies.

    Scores count twice, as objects and in the answer. All are reserved before the first is computed, so that some of
    several concurrent requests finish; if memory was reserved bit by bit, all could fail.
    """

    def __init__(self, lease: BodyLease | None, repeats: int) -> None:
        """The answer contains the `prompt_logprobs` of each prompt `repeats` times."""
        self._lease = lease
        self._repeats = repeats
        self._answer_bytes = 0
        # Sequences that have a reservation. When another worker takes over a request, it accepts the sequences again.
        self._held: set[int] = set()

    def hold(self, generate: Generate, tokens: int) -> None:
        """Reserve memory for the requested scores of a prompt of `tokens` tokens.

        Raises `BadRequest` if the limits never allow so much, and `Unavailable` if there is not enough memory now.
        """
        if generate.rid in self._held:
            return
        self._held.add(generate.rid)
        echo = scores_bytes(tokens, generate.top_logprobs if generate.echo else None)
        entries = scores_bytes(tokens, generate.prompt_logprobs)
        answer_bytes = echo + entries * self._repeats
        self._answer_bytes += answer_bytes
        more, lease = echo + entries + answer_bytes, self._lease
        if self._answer_bytes > SCORES_BYTES_MAX or (lease is not None and not lease.may_ever_hold(more)):
            param = "prompt_logprobs" if entries else "logprobs"
            raise BadRequest(
                f"The log-probabilities of the prompts take {self._answer_bytes / (1 << 20):.1f} MiB, more than there "
                f"is room for: ask for smaller '{param}', fewer choices or fewer tokens.",
                param,
            )
        if lease is not None and not lease.hold(more):
            message = "The log-probabilities of the prompts find no room in the memory set aside for requests."
            raise Unavailable(f"{message} Try again later.", FULL_RETRY_AFTER_S, "body_memory_full")


def scores_bytes(tokens: int, top: int | None) -> int:
    """Estimate the size as JSON of the log-probabilities of `tokens` tokens, each with `top` alternatives."""
    return 0 if top is None else tokens * (1 + top) * TOKEN_JSON_BYTES


class Generation:
    """Context for the sequences of one request. Entering it takes the request's leases; leaving it releases them.

    Entering raises `Overloaded`, `RateLimited` or `Unavailable`. Leaving aborts unfinished sequences immediately.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: ModelConfig,
        generates: Sequence[Generate],
        record: RequestRecord,
        bind: Callable[[Sequence[int]], None],
        *,
        kind: str = TEXT,
        repeats: int = 1,
    ) -> None:
        """`kind` is the kind of model that the request needs. The answer contains each prompt's log-probabilities
        `repeats` times.
        """
        self._runtime = runtime
        self._model = model
        self._generates = [record.caller.bind(generate) for generate in generates]
        if model.adapter:
            self._generates = [msgspec.structs.replace(each, adapter=model.adapter) for each in self._generates]
        self.record = record
        self._bind = bind
        self.opener = Opener(runtime, model, self._generates, record, kind=kind)
        self.accounting = TokenAccounting(runtime, model, self._generates, record)
        # Output of the sequences. Until a worker has the request, it is an empty one that nothing is added to.
        self.collector = Collector([generate.rid for generate in self._generates])
        self._scores = ScoreRoom(record.lease, repeats)
        self._held = ExitStack()
        # Charge of the caller's key, to which the usage is added at the end.
        self._charge: UsageCharge | None = None
        self._numbers = runtime.metrics.model(model.name)
        self._seen_activity = 0.0
        self._seen_step = 0
        # Whether progress ends a `read`, as output does.
        self.wakes_on_progress = False
        # True if the next daemon is to resume the request.
        self._is_left = False

    def __enter__(self) -> Self:
        runtime, model, record, count = self._runtime, self._model, self.record, len(self._generates)
        caller = record.caller
        record.is_of_batch_class = is_of_batch_class(self._generates[0])
        # If one of them is refused, none is taken.
        with ExitStack() as held:
            if record.is_of_batch_class:
                # Such a request takes no place in a queue from others, and no part of its key's rates.
                runtime.admission.check_open(model.name)
            else:
                held.enter_context(runtime.admission.lease(model, count, caller.key, caller.queue_quota_percent))
            if caller.meter is not None:
                estimate = _estimate(caller.meter, self._generates, record)
                hold = caller.meter.hold_budget if record.is_of_batch_class else caller.meter.hold
                self._charge = held.enter_context(hold(estimate, count))
            held.enter_context(runtime.pool.broker.lease(model.name))
            held.enter_context(runtime.requests.hold(self))
            if model.adapter:
                running = runtime.metrics.model(model.name).adapters_running
                running[model.adapter] += count
                held.callback(running.subtract, {model.adapter: count})
            self._held = held.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        collector = self.collector
        if self.is_open and not self._is_left:
            # If the request is left to the next daemon, that daemon charges it.
            self.accounting.charge(collector, self._charge)
        self._held.close()
        if self.is_open:
            unfinished = [rid for rid in collector.rids if rid not in self.accounting.ended]
            if unfinished:
                self._runtime.link.abort(unfinished, "client")
            self.accounting.close(collector, unfinished)
            record = self.record
            has_next_turn = record.has_next_turn and not record.is_of_batch_class
            if has_next_turn and self.accounting.is_complete:
                self._runtime.next_turns.expect(self._model.name, self._generates[0], collector.epoch)
            self.record.epoch, self.record.resumes = collector.epoch, collector.resumes
        if not self.record.is_of_batch_class:
            self._numbers.e2e.observe(self.record.clock() - self.record.started)
        self._runtime.recent.add(self.record)

    def open_now(self) -> bool:
        """Start the request on the model's worker.

        Returns False if it is not ready; `open` then waits for it. Raises `ApiError`.
        """
        if (collector := self.opener.open_now()) is not None:
            self._begin(collector)
        return self.is_open

    async def open(self) -> None:
        """Wait until the model is ready, and start the request. Raises `ApiError`."""
        self._begin(await self.opener.open())

    def _begin(self, collector: Collector) -> None:
        self._bind(collector.rids)
        collector.on_accepted = self._hold_scores
        collector.wakes_on_progress = self.wakes_on_progress
        self.collector = collector
        self._seen_step = self._newest_step()

    @property
    def is_open(self) -> bool:
        """Whether the request was given to a worker. If so, it survives the loss of that worker."""
        return self.collector.epoch != 0

    @property
    def is_done(self) -> bool:
        return len(self.accounting.ended) == len(self._generates)

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens that is known so far."""
        return sum(self.collector.accepted.values())

    @property
    def headers(self) -> list[Header]:
        """Headers of the answer that are known so far."""
        collector = self.collector
        return [*self.record.headers, *deviations_header(collector.deviations), *truncated_header(collector.truncated)]

    @property
    def cached_tokens(self) -> int:
        """Number of cached prompt tokens, as far as known."""
        return sum(self.collector.cached.values())

    @property
    def prefilled_tokens(self) -> int:
        """Number of processed prompt tokens of the sequence that reported last."""
        return 0 if self.collector.progress is None else self.collector.progress.processed

    @property
    def prefill_left_s(self) -> float | None:
        """Estimated rest of the prefill, at the speed so far; None if unknown. Cached tokens took no time."""
        progress = self.collector.progress
        if progress is None or progress.processed <= progress.cached or not progress.elapsed_ms:
            return None
        ms_per_token = progress.elapsed_ms / (progress.processed - progress.cached)
        return (progress.total - progress.processed) * ms_per_token / 1000

    @property
    def generated_tokens(self) -> int:
        return self.accounting.tokens

    @property
    def sequences(self) -> int:
        return len(self._generates)

    @property
    def state(self) -> str:
        """State of the request's most advanced sequence: `queued`, `loading`, `prefill` or `decode`."""
        if self.opener.is_waiting:
            return "loading" if self.opener.is_loading else "queued"
        if self.record.first_token_s is not None:
            return "decode"
        return "queued" if self.collector.progress is None else "prefill"

    def cancel(self) -> None:
        """Cancel the request by order of an operator. The client gets an error that says so."""
        if self.is_done or self.accounting.cancelled is not None:
            return
        self.accounting.cancelled = Cancelled()
        self._stop("cancelled", self.accounting.cancelled)

    def _hold_scores(self, rid: int, prompt_tokens: int) -> None:
        """Reserve memory for the scores of a prompt, or stop the request with an error."""
        try:
            self._scores.hold(next(each for each in self._generates if each.rid == rid), prompt_tokens)
        except ApiError as error:
            if self.accounting.cancelled is None:
                self.accounting.cancelled = error
                self._runtime.link.stop(self.collector.rids, "no room for the scores of its prompt")

    def leave(self) -> None:
        """Stop the request here. The next daemon resumes it and charges all of it."""
        self._is_left = True
        self._stop("left to the next daemon")

    def _stop(self, reason: str, error: Cancelled | None = None) -> None:
        if not self.opener.interrupt(error):
            self._runtime.link.stop(self.collector.rids, reason)

    async def read(self, timeout_s: float | None = None, on_unread: OnUnread | None = None) -> list[Delta]:
        """Return new output, or nothing on timeout. A delta that ends in ERROR or ABORT becomes the `failure` of
        `accounting` instead. `open` or `open_now` comes first.

        While the task waits, new output calls `on_unread` instead of waking the task: see `Collector.read_deltas`.
        """
        return self.accounting.record(await self.collector.read_deltas(timeout_s, on_unread))

    def read_now(self) -> list[Delta]:
        """Return new output without waiting. Used by an `on_unread`."""
        return self.accounting.record(self.collector.read_deltas_nowait())

    async def compare(self) -> None:
        """Compare the prompt with an earlier one, if the client has asked for it and the worker knows it by now."""
        if self.record.comparison is not None and self.is_open:
            await self.record.comparison.run(self.collector.rids[0], self.collector.epoch)

    def shows_life(self) -> bool:
        """Whether the worker has been active since the last call of this method.

        A step for other requests counts too: this request may wait behind them, or the parser may hold back its output.
        """
        newest, step = self.collector.last_activity, self._newest_step()
        is_new = newest > self._seen_activity or step != self._seen_step
        self._seen_activity, self._seen_step = newest, step
        return is_new

    def _newest_step(self) -> int:
        stats = self._numbers.stats
        return 0 if stats is None else stats.step_seq

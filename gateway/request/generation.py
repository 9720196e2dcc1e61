"""One request from admission to its last event: its output, its abort, and its state as operators see it."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import msgspec

from gateway.access.rate_limit import UsageCharge
from gateway.config.settings import ModelConfig
from gateway.errors import ApiError, Cancelled
from gateway.link.collector import Collector, Relay
from gateway.request.accounting import TokenAccounting
from gateway.request.headers import relaxed_header, truncated_header
from gateway.request.leases import leases
from gateway.request.opener import Opener
from gateway.request.record import Header, RequestRecord
from gateway.request.runtime import Runtime
from gateway.request.score_room import ScoreRoom
from protocol.from_worker import Delta, Progress
from protocol.kinds import TEXT
from protocol.to_worker import Generate


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
        self._opener = Opener(runtime, model, self._generates, record, bind, kind=kind)
        self._accounting = TokenAccounting(runtime, model, self._generates, record)
        self._scores = ScoreRoom(record.lease, repeats)
        self._held = ExitStack()
        self._charge: UsageCharge | None = None
        self._collector: Collector | None = None
        self._numbers = runtime.metrics.model(model.name)
        self._seen_activity = 0.0
        self._seen_step = 0
        # Whether progress ends a `read`, as output does.
        self.wakes_on_progress = False
        # True if the next daemon is to resume the request.
        self._is_left = False

    def __enter__(self) -> Self:
        self._charge = self._held.enter_context(leases(self._runtime, self._model, self._generates, self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        collector = self._collector
        if collector is not None and not self._is_left:
            # If the request is left to the next daemon, that daemon charges it.
            self._accounting.charge(collector, self._charge)
        self._held.close()
        if collector is not None:
            unfinished = [rid for rid in collector.rids if rid not in self._accounting.ended]
            if unfinished:
                self._runtime.link.abort(unfinished, "client")
            self._accounting.close(collector, unfinished)
            record = self.record
            has_next_turn = record.has_next_turn and not record.is_of_batch_class
            if has_next_turn and self._accounting.is_complete:
                self._runtime.next_turns.expect(self._model.name, self._generates[0], collector.epoch)
            self.record.epoch, self.record.resumes = collector.epoch, collector.resumes
        if not self.record.is_of_batch_class:
            self._numbers.e2e.observe(self.record.clock() - self.record.started)
        self._runtime.recent.add(self.record)

    def open_now(self) -> bool:
        """Start the request on the model's worker.

        Returns False if it is not ready; `open` then waits for it. Raises `ApiError`.
        """
        self._begin(self._opener.open_now())
        return self.is_open

    async def open(self) -> None:
        """Wait until the model is ready, and start the request. Raises `ApiError`."""
        self._begin(await self._opener.open())

    def _begin(self, collector: Collector | None) -> None:
        if collector is not None:
            collector.on_accepted = self._hold_scores
            collector.wakes_on_progress = self.wakes_on_progress
        self._collector = collector
        self._seen_step = self._newest_step()

    @property
    def is_open(self) -> bool:
        """Whether the request was given to a worker. If so, it survives the loss of that worker."""
        return self._collector is not None

    @property
    def is_late(self) -> bool:
        """Whether the request's deadline has passed."""
        return self._opener.is_late

    @property
    def is_running(self) -> bool:
        """Whether no sequence has ended yet."""
        return not self._accounting.ended

    @property
    def is_done(self) -> bool:
        return len(self._accounting.ended) == len(self._generates)

    @property
    def failure(self) -> ApiError | None:
        """Error of a failed request. It is set once all output before the failure was read."""
        return self._accounting.failure

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens that is known so far."""
        return sum(self._collector.accepted.values()) if self._collector is not None else 0

    @property
    def headers(self) -> list[Header]:
        """Headers of the answer that are known so far."""
        named = [*relaxed_header(self.relaxed), *truncated_header(self.left_out)]
        return [*self.record.headers, *named]

    @property
    def left_out(self) -> tuple[int, int]:
        """Numbers of turns and of tokens that were left out of the prompt, as far as known."""
        return (0, 0) if self._collector is None else self._collector.left_out

    @property
    def cached_tokens(self) -> int:
        """Number of cached prompt tokens, as far as known."""
        return sum(self._collector.cached.values()) if self._collector is not None else 0

    @property
    def accepted(self) -> dict[int, int]:
        """Number of prompt tokens of each sequence that a worker has accepted, by rid."""
        return {} if self._collector is None else self._collector.accepted

    @property
    def cached(self) -> dict[int, int]:
        """Number of cached prompt tokens of each sequence, by rid, as far as known."""
        return {} if self._collector is None else self._collector.cached

    @property
    def relaxed(self) -> tuple[str, ...]:
        return () if self._collector is None else self._collector.relaxed

    @property
    def progress(self) -> Progress | None:
        """Progress of the prefill of the sequence that reported last."""
        return None if self._collector is None else self._collector.progress

    @property
    def prefilled_tokens(self) -> int:
        """Number of processed prompt tokens of the sequence that reported last."""
        return 0 if self.progress is None else self.progress.processed

    @property
    def prefill_left_s(self) -> float | None:
        """Estimated rest of the prefill, at the speed so far; None if unknown. Cached tokens took no time."""
        progress = self.progress
        if progress is None or progress.processed <= progress.cached or not progress.elapsed_ms:
            return None
        ms_per_token = progress.elapsed_ms / (progress.processed - progress.cached)
        return (progress.total - progress.processed) * ms_per_token / 1000

    @property
    def generated_tokens(self) -> int:
        return self._accounting.tokens

    @property
    def sequences(self) -> int:
        return len(self._generates)

    @property
    def state(self) -> str:
        """State of the request's most advanced sequence: `queued`, `loading`, `prefill` or `decode`."""
        if self._opener.is_waiting:
            return "loading" if self._opener.is_loading else "queued"
        if self.record.first_token_s is not None:
            return "decode"
        return "queued" if self.progress is None else "prefill"

    def cancel(self) -> None:
        """Cancel the request by order of an operator. The client gets an error that says so."""
        if self.is_done or self._accounting.cancelled is not None:
            return
        self._accounting.cancelled = Cancelled()
        self._stop("cancelled", self._accounting.cancelled)

    def _hold_scores(self, rid: int, prompt_tokens: int) -> None:
        """Reserve memory for the scores of a prompt, or stop the request with an error."""
        try:
            self._scores.hold(next(each for each in self._generates if each.rid == rid), prompt_tokens)
        except ApiError as error:
            if self._accounting.cancelled is None:
                self._accounting.cancelled = error
                self._runtime.link.stop(self._opened().rids, "no room for the scores of its prompt")

    def leave(self) -> None:
        """Stop the request here. The next daemon resumes it and charges all of it."""
        self._is_left = True
        self._stop("left to the next daemon")

    def _stop(self, reason: str, error: Cancelled | None = None) -> None:
        if not self._opener.interrupt(error) and self._collector is not None:
            self._runtime.link.stop(self._collector.rids, reason)

    async def read(self, timeout_s: float | None = None, on_unread: Relay | None = None) -> list[Delta]:
        """Return new output, or nothing on timeout. A delta that ends in ERROR or ABORT becomes `failure` instead.

        While the task waits, new output calls `on_unread` instead of waking the task: see `Collector.read_deltas`.
        """
        return self._accounting.book(await self._opened().read_deltas(timeout_s, on_unread))

    def read_now(self) -> list[Delta]:
        """Return new output without waiting. Used by an `on_unread`."""
        return self._accounting.book(self._opened().read_deltas_nowait())

    def read_progress(self) -> Progress | None:
        """Return the newest progress if it was not read yet and `wakes_on_progress`."""
        return self._opened().read_progress()

    async def compare(self) -> None:
        """Compare the prompt with an earlier one, if the client has asked for it and the worker knows it by now."""
        if self.record.comparison is not None and self._collector is not None:
            await self.record.comparison.run(self._collector.rids[0], self._collector.epoch)

    def shows_life(self) -> bool:
        """Whether the worker has been active since the last call of this method.

        A step for other requests counts too: this request may wait behind them, or the parser may hold back its output.
        """
        newest, step = self._opened().last_activity, self._newest_step()
        is_new = newest > self._seen_activity or step != self._seen_step
        self._seen_activity, self._seen_step = newest, step
        return is_new

    def _newest_step(self) -> int:
        stats = self._numbers.stats
        return 0 if stats is None else stats.step_seq

    def _opened(self) -> Collector:
        assert self._collector is not None, "open comes first"
        return self._collector

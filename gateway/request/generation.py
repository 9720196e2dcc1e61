"""One request from admission to its last event: the leases it holds, its abort, its numbers."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Final, Self

import msgspec

from gateway.access.rate_limit import Meter, UsageCharge
from gateway.config.settings import ModelConfig
from gateway.errors import ApiError, BadRequest, Cancelled, Unavailable, from_failure, from_unsendable
from gateway.link.collector import Collector, Relay
from gateway.link.link import LATE
from gateway.link.transport import WorkerGone
from gateway.media.modalities import check, likely_tokens
from gateway.remote.peers.peer_stream import PeerStream
from gateway.request.headers import relaxed_header, served_by_header, truncated_header
from gateway.request.model_kind import check_kind
from gateway.request.record import Header, RequestRecord
from gateway.request.runtime import Runtime
from gateway.request.score_room import ScoreRoom
from gateway.workers.pool.pool import Pool
from gateway.workers.supervisor.handle import WorkerHandle
from gateway.workers.supervisor.state import ModelUnavailable, State
from protocol.codec import Unsendable, prompt_bytes
from protocol.failures import Code, Failure
from protocol.kinds import TEXT
from protocol.messages import Delta, Finish, Generate

QUEUE_RETRY_AFTER_S: Final = 5.0
QUEUE_RETRY_AFTER_MAX_S: Final = 300.0
# About what English and code have.
BYTES_PER_TOKEN: Final = 4
_LOST: Final = Failure(Code.WORKER_DIED, "The model's worker was lost. Try again.")
_STOPPED: Final = Failure(Code.ABORTED, "The server stopped this generation.")
_FINISHES: Final = {
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.TOOL_CALLS: "tool_calls",
    Finish.ABORT: "abort",
    Finish.ERROR: "error",
}


def retry_after_s(pool: Pool, model: ModelConfig) -> float:
    """About when a model that was not ready in time will be: by what its loads took, within bounds."""
    return min(QUEUE_RETRY_AFTER_MAX_S, max(QUEUE_RETRY_AFTER_S, pool.load_left_s(model.name)))


class Generation:
    """The sequences of one request. A context manager: entering takes the leases, leaving gives everything back.

    Entering raises `Overloaded`, `RateLimited` or `Unavailable`. Whatever is unfinished on leaving is aborted at once.
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
        stays_here: bool = False,
        form: str = "",
        repeats: int = 1,
    ) -> None:
        """`kind` is that of the model which such requests are for. `repeats` is how often the answer has the
        log-probabilities of a prompt. One that `stays_here` is sent to no peer, nor is
        one for anything but text, or for an adapter. With `form` it begins at a peer that has the model in it."""
        self._runtime = runtime
        self._model = model
        # Kept, because a reload may take the model out of the pool. None of a model that only peers have.
        self._worker = runtime.pool.find(model.name)
        self._generates = [record.caller.bind(generate) for generate in generates]
        if model.adapter:
            self._generates = [msgspec.structs.replace(each, adapter=model.adapter) for each in self._generates]
        self.record = record
        self._journey = (
            None
            if stays_here or kind != TEXT or model.adapter
            else runtime.fleet.journey(model, self._generates, record.id, self._note_place, form)
        )
        self._bind = bind
        self._kind = kind
        # All sequences share it. It counts from the request's arrival, and holds while the model loads too.
        limit_ms = generates[0].deadline_ms
        self._deadline = record.started + limit_ms / 1000 if limit_ms else math.inf
        self._held = ExitStack()
        # What the caller's key is charged in the end.
        self._bill: UsageCharge | None = None
        self._tokens = 0
        # Tokens of an earlier daemon, which it has charged nobody for.
        self._had = sum(len(generate.resume) for generate in generates)
        self._numbers = runtime.metrics.model(model.name)
        if model.adapter:
            self._numbers.adapters[model.adapter] += len(generates)
        self._collector: Collector | None = None
        self._seen_activity = 0.0
        self._seen_step = 0
        self._observe_gap = self._numbers.itl.observe
        self._newest_token: dict[int, float] = {}
        self._ended: set[int] = set()
        # Sequences of which the worker has told what they cost.
        self._told = 0
        # While it waits for its model: what `cancel` cuts short.
        self._patience: asyncio.Timeout | None = None
        self._cancelled: ApiError | None = None
        self._scores = ScoreRoom(record.lease, repeats)
        # The next daemon goes on with it.
        self._is_left = False
        # Why it cannot go on: set by `next` after everything before it was handed out.
        self.failure: ApiError | None = None
        # No sequence has ended yet: what most calls of `next` need to know.
        self.is_running = True

    def __enter__(self) -> Self:
        with ExitStack() as held:
            caller, runtime = self.record.caller, self._runtime
            share = caller.queue_share or runtime.config.server.queue_share
            held.enter_context(runtime.admission.lease(self._model, len(self._generates), caller.key, share))
            meter = caller.meter
            if meter is not None:
                self._bill = held.enter_context(meter.hold(self._estimate(meter), len(self._generates)))
            if self._worker is not None:
                held.enter_context(self._runtime.pool.busy(self._model.name))
            held.enter_context(self._runtime.requests.hold(self))
            if self._model.adapter:
                running, count = self._numbers.adapters_running, len(self._generates)
                running[self._model.adapter] += count
                held.callback(running.subtract, {self._model.adapter: count})
            self._held = held.pop_all()
        return self

    def _estimate(self, meter: Meter) -> float:
        """Tokens that this will probably be charged: the prompts' by their size, for they are not tokenized here."""
        if not meter.is_limited:
            return 0.0
        # Each sequence is charged for its prompt, and for the conversation that it continues, sent again or not. Media
        # have far more bytes than tokens.
        media_bytes, media_tokens = self.record.media_bytes, likely_tokens(self.record.media)
        return sum(
            (prompt_bytes(each) - media_bytes) / BYTES_PER_TOKEN + media_tokens + meter.expected(each.max_tokens)
            for each in self._generates
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._charge()
        self._held.close()
        if self._collector is not None:
            self._leave(self._collector)
        self._numbers.e2e.observe(time.perf_counter() - self.record.started)

    def _leave(self, collector: Collector) -> None:
        """Abort what has not ended, and note of what ended without its usage what was seen of it."""
        record = self.record
        left = [rid for rid in collector.rids if rid not in self._ended]
        if left:
            self._runtime.link.abort(left, "client")
            for _ in left:
                self._numbers.sequence_ended("abort", None)
                record.finishes.append("abort")
        if self._told < len(self._generates):
            record.prompt_tokens = max(record.prompt_tokens, self.prompt_tokens)
            record.cached_tokens = max(record.cached_tokens, self.cached_tokens)
            record.completion_tokens = max(record.completion_tokens, self._had + self._tokens)
            self._cut_phases(collector)

    def _charge(self) -> None:
        """Usage comes with the end; of what did not end, what is known counts. What is left is charged at its end."""
        if self._collector is None or self._is_left:
            return
        record = self.record
        prompt = max(record.prompt_tokens, self.prompt_tokens)
        completion = max(record.completion_tokens, self._had + self._tokens)
        cached = max(record.cached_tokens, self.cached_tokens)
        name, sequences = self._model.name, len(self._generates)
        self._runtime.ledger.book(record.caller.key or "", name, sequences, prompt, cached, completion)
        record.is_booked = True
        if self._bill is not None:
            self._bill.prompt, self._bill.completion = prompt, completion

    # -- starting ------------------------------------------------------------------------------------------------

    def open_now(self) -> bool:
        """Start on a worker that is ready, or at a peer. False when neither is: then `open` waits for a worker.

        Raises `ApiError`.
        """
        stream = None if self._journey is None else self._journey.begin()
        if stream is not None:
            return self._submit(stream)
        return self._worker is not None and self._worker.is_ready and self._submit(self._worker)

    async def open(self) -> None:
        """Wait until the model is ready, and start. Raises `ApiError`."""
        if self._worker is None and self._kind != TEXT:
            message = f"The model '{self._model.name}' is a peer's: peers are asked for text alone."
            raise BadRequest(message, "model", "unsupported_model_kind")
        if self._worker is not None and self._worker.ready is None:
            # Before it is loaded in vain.
            check_kind(self._model, None, self._kind)
        queue_s = self._runtime.config.server.queue_timeout_s
        limit_s = min(queue_s or math.inf, self._deadline - time.perf_counter())
        phases = self.record.phases
        phases.loading_from = self._elapsed()
        self._numbers.opening += len(self._generates)
        try:
            async with asyncio.timeout(limit_s if limit_s < math.inf else None) as self._patience:
                losses = 0
                while losses < 2:
                    worker = await self._runtime.pool.ensure_ready(self._model.name)
                    # Since then another model may have been given its memory: that is no loss, but a longer wait.
                    losses += worker.is_ready
                    if self._submit(worker):
                        return
            raise from_failure(_LOST)
        except ModelUnavailable as error:
            stream = None if self._journey is None else self._journey.begin_elsewhere()
            if stream is not None and self._submit(stream):
                return
            raise from_failure(error.failure, error.retry_after_s, is_operator=self.record.caller.is_admin) from None
        except TimeoutError:
            if self._cancelled is not None:
                raise self._cancelled from None
            if time.perf_counter() >= self._deadline:
                raise from_failure(LATE) from None
            message = f"The model was not ready within {queue_s:g} seconds."
            raise Unavailable(message, retry_after_s(self._runtime.pool, self._model), "queue_timeout") from None
        finally:
            self._patience = None
            self._numbers.opening -= len(self._generates)
            phases.load = (phases.sent_at or self._elapsed()) - phases.loading_from

    def _submit(self, worker: WorkerHandle | PeerStream) -> bool:
        try:
            return self._send(worker)
        finally:
            if isinstance(worker, PeerStream) and self._collector is None:
                worker.discard()

    def _send(self, worker: WorkerHandle | PeerStream) -> bool:
        generates = self._generates
        if isinstance(worker, PeerStream):
            check_kind(self._model, self._runtime.view(self._model).ready, self._kind)
        elif worker.is_ready:
            check_kind(self._model, worker.ready, self._kind)
        if self.record.media and worker.is_ready:
            check(self._model.name, self._model.path, self._runtime.view(self._model).ready, self.record.media)
        if self._deadline < math.inf:
            left_ms = max(1, int((self._deadline - time.perf_counter()) * 1000))
            generates = [msgspec.structs.replace(generate, deadline_ms=left_ms) for generate in generates]
        try:
            self._collector = self._runtime.link.submit(worker, generates)
        except WorkerGone:
            return False
        except Unsendable as error:
            self._runtime.metrics.rejected(self._model.name, "unsendable")
            raise from_unsendable(error) from None
        self._collector.on_accepted = self._hold_scores
        self.record.rids = self._collector.rids
        self.record.phases.sent_at = self._elapsed()
        self._seen_step = self._newest_step()
        self._bind(self._collector.rids)
        return True

    def _note_place(self, place: str) -> None:
        self.record.served_by = place

    def _elapsed(self) -> float:
        return time.perf_counter() - self.record.started

    # -- running -------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether it was given to a worker. From then on the loss of a worker is nothing but a pause."""
        return self._collector is not None

    @property
    def is_done(self) -> bool:
        return len(self._ended) == len(self._generates)

    @property
    def form(self) -> str:
        """The form of the model that generates it, where peers have a part in it; empty if it is not known."""
        return "" if self._journey is None else self._journey.form

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens known so far."""
        return sum(self._collector.accepted.values()) if self._collector is not None else 0

    @property
    def headers(self) -> list[Header]:
        """Of the answer, as far as they are known."""
        named = [*relaxed_header(self.relaxed), *truncated_header(self.left_out)]
        return [*self.record.headers, *named, *served_by_header(self.record.served_by)]

    @property
    def left_out(self) -> tuple[int, int]:
        """Turns and tokens that were left out of its prompt, as far as that is known."""
        return (0, 0) if self._collector is None else self._collector.left_out

    @property
    def cached_tokens(self) -> int:
        """Cached prompt tokens known so far."""
        return sum(self._collector.cached.values()) if self._collector is not None else 0

    @property
    def accepted(self) -> dict[int, int]:
        """Prompt tokens of each sequence whose worker has read its prompt."""
        return {} if self._collector is None else self._collector.accepted

    @property
    def cached(self) -> dict[int, int]:
        """Cached prompt tokens of each sequence in prefill."""
        return {} if self._collector is None else self._collector.cached

    @property
    def relaxed(self) -> tuple[str, ...]:
        return () if self._collector is None else self._collector.relaxed

    @property
    def progress(self) -> tuple[int, int] | None:
        """Prompt tokens processed and in all, of the sequence whose worker told it last."""
        return None if self._collector is None else self._collector.progress

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens processed so far, of the sequence whose worker told it last."""
        progress = None if self._collector is None else self._collector.progress
        return 0 if progress is None else progress[0]

    @property
    def generated_tokens(self) -> int:
        return self._tokens

    @property
    def sequences(self) -> int:
        return len(self._generates)

    @property
    def state(self) -> str:
        """`queued`, `loading`, `prefill` or `decode`: where the sequence that is furthest stands."""
        if self._patience is not None:
            is_loading = self._worker is not None and self._worker.state in (State.STARTING, State.LOADING)
            return "loading" if is_loading else "queued"
        if self.record.first_token_s is not None:
            return "decode"
        return "queued" if self._collector is None or self._collector.progress is None else "prefill"

    def cancel(self) -> None:
        """Cancel it as an operator: its client gets an error that says so."""
        if self.is_done or self._cancelled is not None:
            return
        self._cancelled = Cancelled()
        if self._patience is not None:
            self._patience.reschedule(0.0)
        elif self._collector is not None:
            self._runtime.link.stop(self._collector.rids, "cancelled")

    def _hold_scores(self, rid: int, prompt_tokens: int) -> None:
        """Make room for the scores of a prompt, or end the request: its client gets the error that says why."""
        try:
            self._scores.hold(next(each for each in self._generates if each.rid == rid), prompt_tokens)
        except ApiError as error:
            if self._cancelled is None:
                self._cancelled = error
                self._runtime.link.stop(self._opened().rids, "no room for the scores of its prompt")

    def leave(self) -> None:
        """End it here, for the next daemon to go on with: whoever asked is charged then, for all of it."""
        self._is_left = True
        if self._patience is not None:
            self._patience.reschedule(0.0)
        elif self._collector is not None:
            self._runtime.link.stop(self._collector.rids, "left to the next daemon")

    async def next(self, timeout_s: float | None = None, relay: Relay | None = None) -> list[Delta]:
        """New output, never with an ERROR or ABORT in it: those end up in `failure`. Empty on timeout.

        With a `relay`, what is new while this waits goes through it: see `Collector.next`.
        """
        return self._note(await self._opened().next(timeout_s, relay))

    def take(self) -> list[Delta]:
        """New deltas, for a relay."""
        return self._note(self._opened().take())

    def _note(self, deltas: list[Delta]) -> list[Delta]:
        now = time.perf_counter()
        newest = self._newest_token
        for delta in deltas:
            rid = delta.rid
            if count := len(delta.token_ids):
                self._tokens += count
                if rid in newest:
                    self._observe_gap((now - newest[rid]) / count, count)
                else:
                    self._on_first_token(now)
                newest[rid] = now
            if delta.finish is not None:
                self.is_running = False
                return self._finish(deltas)
        return deltas

    def shows_life(self) -> bool:
        """Whether the worker did anything since this was last asked.

        A step for others counts: this request may wait behind them, or have output that the parser still holds back.
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

    def _on_first_token(self, now: float) -> None:
        if self.record.first_token_s is None:
            self.record.first_token_s = now - self.record.started
            self._numbers.ttft.observe(self.record.first_token_s)

    def _finish(self, deltas: list[Delta]) -> list[Delta]:
        """Book the terminal deltas among these, and keep failures apart."""
        good: list[Delta] = []
        for delta in deltas:
            if delta.finish is None:
                good.append(delta)
                continue
            if delta.finish is Finish.ERROR or delta.finish is Finish.ABORT:
                failure = delta.failure or (_STOPPED if delta.finish is Finish.ABORT else _LOST)
                if delta.text:
                    good.append(msgspec.structs.replace(delta, finish=None, usage=None, failure=None))
                if self.failure is None:
                    self.failure = self._cancelled or from_failure(failure, is_operator=self.record.caller.is_admin)
                    self.record.detail = failure.detail
            else:
                good.append(delta)
            self._book(delta, delta.finish)
        return good

    def _book(self, delta: Delta, finish: Finish) -> None:
        self._ended.add(delta.rid)
        self._numbers.sequence_ended(_FINISHES[finish], delta.usage)
        record = self.record
        record.finishes.append(_FINISHES[finish])
        if delta.usage is not None:
            if not record.served_by:
                self._numbers.note_prefill(delta.usage)
            self._told += 1
            record.prompt_tokens += delta.usage.prompt
            record.cached_tokens += delta.usage.cached
            record.completion_tokens += delta.usage.completion
            record.phases.add(delta.usage)

    def _cut_phases(self, collector: Collector) -> None:
        """It ends before its worker could say where its time went: what was seen from here."""
        record = self.record
        began = collector.began
        # The collector's clock is the loop's.
        ago = 0.0 if began is None else asyncio.get_running_loop().time() - began
        now = self._elapsed()
        record.phases.cut(now, None if began is None else now - ago, record.first_token_s)

"""The step loop: the one thread that touches MLX.

Every row that enters leaves through `_finish`, exactly once.
"""

import logging
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Final, assert_never

from mlx_lm.models.cache import make_prompt_cache

from protocol.failures import Code, Failure
from protocol.messages import (
    Abort,
    Accepted,
    Delta,
    Drain,
    Drained,
    Finish,
    Kind,
    Progress,
    Rejected,
    SetMemory,
    Shutdown,
    Step,
    TokenLogprob,
    Up,
    Usage,
)
from protocol.spec import WorkerSpec
from worker.cache import batched
from worker.cache.disk import CacheDisk
from worker.cache.fingerprint import open_disk
from worker.cache.kv import Layout
from worker.cache.prefix import PrefixCache
from worker.engine.batch import Batch, MediaFailed, Tick, Token
from worker.engine.chunking import ChunkPolicy
from worker.engine.gauges import Gauges
from worker.engine.inbox import Command, Inbox, Wake
from worker.engine.kv_budget import KvBudget, KvCost
from worker.engine.logprobs import LogprobReader
from worker.engine.output import Piece, Writer
from worker.engine.queue import Queue
from worker.engine.row import Row
from worker.engine.self_check import refusal
from worker.errors import GPU_FAULTS, RequestInvalid, StepFailed, is_allocation_failure
from worker.model import memory
from worker.model.lanes import Lane
from worker.model.loader import Loaded
from worker.parsers import Event
from worker.speculation.drafter import Drafter
from worker.speculation.speculator import Speculator
from worker.text.encodable import encodable
from worker.vision.encoder import Encoder
from worker.vision.features import FeatureCache

log = logging.getLogger("mlxd.worker")


_STATS_EVERY_S: Final = 0.1
_MEMORY_EVERY_S: Final = 1.0
# An abort can overtake its request, which a grammar or a queue of long prompts may hold in the intake for minutes: the
# newest of those that named no row are kept, far more than requests can be on their way.
_MOST_TOMBSTONES: Final = 1 << 16
# A second failure of the step loop within this time is not bad luck.
_RECOVERY_S: Final = 60.0
# Rows that may wait, at a time, for another row to prefill what they share.
_MAX_HELD: Final = 64
_NOTHING: Final = (Event(Kind.TEXT),)


class Engine:
    """Owns the rows and the batch. Commands come in by `inbox`, messages leave by `send`."""

    def __init__(
        self,
        loaded: Loaded,
        spec: WorkerSpec,
        inbox: Inbox,
        send: Callable[[Up], None],
        gauges: Gauges,
        writer: Writer,
        drafter: Drafter | None = None,
    ) -> None:
        self._loaded = loaded
        self.speculation, drafts = _speculation(loaded, spec)
        gauges.speculator = Speculator() if drafts else None
        self._drafter = drafter or gauges.speculator
        self._spec = spec
        self._inbox = inbox
        self._send = send
        self._gauges = gauges
        self._writer = writer
        self._plan = loaded.plan
        self.max_running = 1 if self._plan.lane is Lane.SINGLE else spec.max_running
        self._layout = Layout.of(lambda: make_prompt_cache(loaded.model))
        disk: CacheDisk | None = None
        if self._plan.reuses_prefixes:
            disk = open_disk(spec, loaded, self._layout, lambda: inbox.put(Wake.UP))
        self._share = memory.Share(spec, loaded.weights_bytes)
        limits = self._share.limits()
        self._share.enforce(limits)
        self._encoder: Encoder | None = None
        if loaded.vision is not None:
            features = FeatureCache(limits.features)
            self._encoder = Encoder(loaded.vision.tower, features, lambda: inbox.put(Wake.UP))
        prefixes = self._prefix_bytes(limits)
        self._cache = PrefixCache(self._layout, prefixes, disk=disk, disk_min_tokens=spec.disk_cache_tokens)
        self._is_waiting = False
        self._batch = self._new_batch()
        # Known once the engine is warm.
        self.kv_cost: KvCost
        self._kv: KvBudget
        self._queue = Queue()
        self._policy = ChunkPolicy(spec.prefill_chunk, is_fixed=spec.deterministic)
        self._logprobs = LogprobReader(writer.token_bytes)
        self._rows: dict[int, Row] = {}
        self._tombstones: dict[int, None] = {}
        self._deltas: list[Delta] = []
        self._drain_until: float | None = None
        self._aborted_by_drain = 0
        # When the newest drain ended: what came before, and took its time in the intake, is refused as well.
        self._drained_at = float("-inf")
        self._is_stopping = False
        self._recovered_at = float("-inf")
        self._stats_due = 0.0
        self._memory_due = 0.0
        self._share_due = 0.0

    @property
    def cache(self) -> PrefixCache:
        """For looking at; it belongs to the engine thread."""
        return self._cache

    @property
    def features(self) -> FeatureCache | None:
        """Likewise; None for a model of text."""
        return self._encoder.features if self._encoder is not None else None

    def run(self) -> None:
        """Serve until told to shut down. Raises `StepFailed` when the loop cannot go on."""
        while not self._is_stopping:
            self._take_commands()
            self._recovering(self._enforce_deadlines)
            self._recovering(self._admit)
            self._recovering(self._encode)
            self._recovering(self._make_room)
            if self._batch:
                self._recovering(self._tick)
            self._flush()
            self._recovering(self._batch.settle)
            self._recovering(self._cache.hand_over)
            self._recovering(self._tend_share)
        self._fail_all(Failure(Code.DRAINING, "the model is being stopped; try again"))
        self._flush()
        self._cache.close()
        self._batch.close()
        if self._encoder is not None:
            self._encoder.close()

    def warm_up(self, prompt: list[int]) -> int:
        """Compile the kernels of prefill and decode before the first request pays for it.

        Returns the longest sequence that memory has room for, in tokens. Raises `LoadFailed`.
        """
        row = self._writer.silent_row(prompt)
        try:
            self._batch.insert(row)
            while self._batch:
                self._batch.tick(self._spec.prefill_chunk)
            self._batch.settle()
        except Exception as error:  # the boundary to code of every architecture
            raise refusal(error) from error
        self._cache.clear()
        assert self._batch.kv_cost is not None
        self.kv_cost = self._batch.kv_cost
        limits = self._share.limits()
        self._apply(limits)
        return self.kv_cost.longest(limits.kv)

    def _apply(self, limits: memory.Limits) -> None:
        """Keep these limits: what is above them goes before MLX hears of them."""
        self._cache.resize(self._prefix_bytes(limits))
        if self._encoder is not None:
            self._encoder.features.resize(limits.features)
        self._kv = KvBudget(self.kv_cost, limits.kv, limits.buffers, self._batch.widest_step)
        self._gauges.kv_limit = limits.kv
        self._make_room()
        self._share.enforce(limits)
        self._gauges.share_bytes = self._share.bytes
        self._gauges.mem_limit = limits.total
        self._gauges.wired_limit = self._share.wired_limit

    def _prefix_bytes(self, limits: memory.Limits) -> int:
        """Of the memory for what may be asked again, the part that is not for features of media."""
        if not self._plan.reuses_prefixes:
            return 0
        return limits.prefixes - (limits.features if self._encoder is not None else 0)

    def _tend_share(self) -> None:
        """Now and then: give back what a failed allocation took, and lower what had to stay wired."""
        now = time.monotonic()
        if now < self._share_due:
            return
        self._share_due = now + _MEMORY_EVERY_S
        if self._share.relax(now):
            self._apply(self._share.limits())
        self._share.check()
        self._gauges.wired_limit = self._share.wired_limit

    def fail_all(self, failure: Failure) -> None:
        """The terminal event of every row before the loop dies. Asks nothing of a device that may be broken."""
        self._batch.abandon()
        self._fail_all(failure)
        self._flush()

    # -- commands ----------------------------------------------------------------------------------------------------

    def _take_commands(self) -> None:
        """Everything in the inbox, aborts first; blocks only when there is nothing else to do."""
        is_idle = not self._rows and self._drain_until is None
        if is_idle:
            self._idle()
        commands = self._inbox.take(is_idle=is_idle, is_waiting=self._is_waiting)
        self._gauges.busy_since = time.monotonic()
        for command in sorted(commands, key=lambda command: not isinstance(command, Abort)):
            self._recovering(partial(self._obey, command))

    def _obey(self, command: Command) -> None:
        match command:
            case Abort():
                for rid in command.rids:
                    self._recovering(partial(self._abort, rid))
            case Row():
                self._enqueue(command)
            case Drain():
                self._drain_until = time.monotonic() + command.deadline_s
            case Shutdown():
                self._is_stopping = True
            case SetMemory():
                self._apply(self._share.change(command))
            case Wake.UP:
                pass
            case _:
                assert_never(command)

    def _idle(self) -> None:
        self._gauges.running = self._gauges.waiting = 0
        self._gauges.busy_since = 0.0
        self._gauges.kv_bytes = 0
        self._gauges.measure_memory()
        self._observe_caches()
        self._recovering(self._cache.flush)

    def _observe_caches(self) -> None:
        self._gauges.observe_cache(self._cache)
        if self._encoder is not None:
            self._gauges.observe_features(self._encoder.features)

    def _abort(self, rid: int) -> None:
        row = self._rows.get(rid)
        if row is not None:
            self._finish(row, Finish.ABORT)
            return
        self._tombstones[rid] = None
        while len(self._tombstones) > _MOST_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]

    def _enqueue(self, row: Row) -> None:
        if row.rid in self._rows:  # its one terminal event belongs to the row that is already here
            log.error("request %d arrived twice; the second was dropped", row.rid)
            return
        if self._drain_until is not None or row.arrived <= self._drained_at:
            self._send(Rejected(row.rid, Failure(Code.DRAINING, "the model is being stopped; try again")))
            return
        if len(self._queue) >= self._spec.max_waiting:
            self._send(Rejected(row.rid, Failure(Code.BUSY, "the model's queue is full; try again")))
            return
        relaxed = row.rule.grammar.relaxed if row.rule is not None else ()
        self._send(Accepted(row.rid, len(row.prompt), (*relaxed, *row.relaxed)))
        self._rows[row.rid] = row
        if row.rid in self._tombstones:
            del self._tombstones[row.rid]
            self._finish(row, Finish.ABORT)
            return
        if row.echo:
            self._deltas.append(Delta(row.rid, text=row.echo))
        if row.max_tokens <= len(row.output):
            self._finish(row, Finish.LENGTH)
            return
        self._queue.push(row)

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for row in [row for row in self._rows.values() if row.deadline is not None and now >= row.deadline]:
            self._finish(row, Finish.ERROR, Failure(Code.DEADLINE_EXCEEDED, "the request's deadline has passed"))
        if self._drain_until is None:
            return
        if self._rows and now >= self._drain_until:
            self._aborted_by_drain = max(self._aborted_by_drain, len(self._rows))
            self._fail_all(Failure(Code.DRAINING, "the model is being stopped; try again"))
        if not self._rows:
            self._flush()
            self._drained_at = time.monotonic()
            self._send(Drained(self._spec.epoch, self._aborted_by_drain))
            self._drain_until, self._aborted_by_drain = None, 0

    # -- one tick ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        held: list[Row] = []
        while len(self._queue) and len(self._batch) < self.max_running and len(held) < _MAX_HELD:
            row = self._queue.pop()
            if not self._kv.admits(self._batch.rows, row):
                held.append(row)
                break  # a smaller one behind it must not starve it
            if self._batch.must_wait(row):
                held.append(row)
                continue
            row.admitted = row.admitted or time.monotonic()
            with self._failing_media():
                if row.has_thought_enough:  # resumed just there
                    self._close_reasoning(row)
                else:
                    self._batch.insert(row)
        self._queue.put_back(held)
        self._is_waiting = bool(held) and not self._batch

    def _encode(self) -> None:
        """At most one medium a tick: running rows wait for no more than that."""
        if self._encoder is None:
            return
        for rid, error in self._encoder.step():
            if (row := self._rows.get(rid)) is not None:
                self._fail_medium(row, error)
        # Pixels that are there are encoded at once.
        self._is_waiting = self._is_waiting and not self._encoder.has_pixels

    @contextmanager
    def _failing_media(self) -> Generator[None]:
        """A medium that cannot be encoded is the end of its row alone."""
        try:
            yield
        except MediaFailed as failed:
            self._fail_medium(failed.row, failed.error)

    def _fail_medium(self, row: Row, error: Exception) -> None:
        if isinstance(error, RequestInvalid):
            self._finish(row, Finish.ERROR, error.failure)
        else:
            self._fail_row(row, f"its media were encoded: {type(error).__name__}: {error}")

    def _make_room(self) -> None:
        """Put rows back into the queue, their KV into the prefix cache, while the next step would not fit."""
        while (row := self._kv.surplus(self._batch.rows)) is not None:
            log.info("row %d is preempted for older ones", row.rid)
            self._batch.remove(row)
            self._queue.push(row)
            self._gauges.preemptions += 1

    def _tick(self) -> None:
        prefilling, decoding = self._batch.prefilling, self._batch.decoding
        chunk = self._policy.chunk(prefilling, decoding, self._batch.longest_prefill)
        started = time.monotonic()
        tick = self._batch.tick(chunk)
        now = time.monotonic()
        # A block waits for itself, so its time is known; a plain step's is that of the steps around it.
        self._policy.observe(now - started - tick.block_s, tick.prefilled, 0 if tick.block_s else decoding)
        self._gauges.step_seq += 1
        self._gauges.prompt_tokens += tick.prefilled
        self._gauges.generation_tokens += len(tick.tokens)
        self._emit(tick, now)

    def _recovering(self, act: Callable[[], None]) -> None:
        """Act, and begin again with all rows if that raises: whatever touches a row's KV may find no memory."""
        try:
            with self._failing_media():
                act()
        except StepFailed:
            raise
        except Exception as error:  # the root of the step loop
            self._recover(error)

    def _emit(self, tick: Tick, now: float) -> None:
        for row, done, total in tick.progress:
            if row.want_progress:
                self._send(Progress(row.rid, done, total, row.cached or 0))
        closed: set[Row] = set()
        for token, logprob in zip(tick.tokens, self._read_logprobs(tick.tokens), strict=True):
            if token.row.is_finished or token.row in closed:
                continue  # of a block, what comes after the row's end
            if not token.row.first_token:
                token.row.first_token = now
            self._advance(token.row, token.id, token.ended, logprob)
            if token.row.has_thought_enough and not token.row.is_finished:
                closed.add(token.row)
                self._close_reasoning(token.row)
        for row, error in tick.broken:
            if not row.is_finished:
                self._fail_row(row, f"tokens were chosen: {type(error).__name__}: {error}")

    def _advance(self, row: Row, token: int, ended: str | None, logprob: TokenLogprob | None) -> None:
        """Take one token and send what it added."""
        try:
            piece = self._writer.advance(row, token, ended, logprob)
        except BaseException as error:  # the boundary of one row; a panic in Rust is no Exception
            self._fail_row(row, f"its text was decoded: {type(error).__name__}: {error}")
            return
        if piece.finish is not None:
            self._finish(row, piece.finish, piece=piece)
        elif not piece.is_empty:
            self._say(row, piece)

    def _fail_row(self, row: Row, when: str) -> None:
        log.error("row %d failed while %s", row.rid, when)
        self._finish(row, Finish.ERROR, Failure(Code.ROW_FAILED, encodable(f"the request failed while {when}")))

    def _close_reasoning(self, row: Row) -> None:
        """Write the end of the reasoning block for the model and go on from there."""
        self._batch.remove(row)
        row.thinking_budget = None
        for token in row.closing_ids:
            ended = "length" if len(row.output) + 1 >= row.max_tokens else None
            self._advance(row, token, ended, None)
            if row.is_finished:
                return
        with self._failing_media():
            self._batch.insert(row)

    def _read_logprobs(self, tokens: list[Token]) -> list[TokenLogprob | None]:
        wanted = [token for token in tokens if token.row.top_logprobs is not None]
        if not wanted:
            return [None] * len(tokens)
        entries = iter(self._logprobs.read([(each.id, each.logprobs, each.row.top_logprobs or 0) for each in wanted]))
        return [next(entries) if token.row.top_logprobs is not None else None for token in tokens]

    def _say(self, row: Row, piece: Piece, usage: Usage | None = None, failure: Failure | None = None) -> None:
        """One delta for each event; ids and logprobs ride on the first, the end on the last."""
        ids: tuple[int, ...] = tuple(row.unsent)
        logprobs, rest = piece.logprobs, len(piece.events) or 1
        row.unsent.clear()
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
                    row.stops.hit if is_last else "",
                )
            )
            ids, logprobs = (), None

    def _recover(self, error: Exception) -> None:
        """An exception out of a step leaves the batch in an unknown state: build a new one and prefill every row again.

        Sampling depends on (seed, position) alone, so the rows go on with the tokens they would have had.
        """
        now = time.monotonic()
        if is_allocation_failure(error) and self._share.shrink(now):
            self._gauges.allocation_failures += 1
            log.warning(
                "a step of %d rows failed to allocate memory; the KV budget is halved: %s", len(self._batch), error
            )
            traceback.clear_frames(error.__traceback__)  # they hold what the step had computed
            self._cache.clear()
            if self._encoder is not None:
                self._encoder.features.clear()
            self._rebuild()
            return
        is_fault = any(sign in str(error) for sign in GPU_FAULTS)
        if is_fault or now - self._recovered_at < _RECOVERY_S:
            raise StepFailed(Code.WORKER_DIED, "the model's step loop failed", detail=repr(error)) from error
        log.exception("a step failed; rebuilding the batch of %d rows", len(self._batch))
        self._recovered_at = now
        self._rebuild()

    def _rebuild(self) -> None:
        """A new batch. The rows of the old one wait to be admitted again; those too that its failed step had let go of,
        and told nobody."""
        self._batch.abandon()
        self._batch.close()
        self._batch = self._new_batch()
        self._apply(self._share.limits())
        for row in self._rows.values():
            if row not in self._queue:
                self._queue.push(row)

    # -- ends --------------------------------------------------------------------------------------------------------

    def _finish(self, row: Row, finish: Finish, failure: Failure | None = None, piece: Piece | None = None) -> None:
        """The one place where a row ends."""
        assert not row.is_finished
        row.is_finished = True
        del self._rows[row.rid]
        if finish in (Finish.STOP, Finish.LENGTH):
            self._inbox.answered(time.monotonic())
        self._queue.remove(row)
        if row.parser is not None:
            self._gauges.malformed_tool_calls += row.parser.malformed
        piece = piece or Piece([], None, finish)
        self._batch.account(row)
        self._say(row, piece, row.usage(time.monotonic()), failure)
        if self._encoder is not None:
            self._encoder.forget(row.rid)
        # Last: it may find no memory for the KV that it keeps, and the row has ended all the same.
        self._batch.remove(row)

    def _fail_all(self, failure: Failure) -> None:
        for row in list(self._rows.values()):
            self._finish(row, Finish.ERROR, failure)

    def _flush(self) -> None:
        """One message for everything that this tick produced, with stats now and then."""
        now = time.monotonic()
        gauges = self._gauges
        gauges.running, gauges.waiting = len(self._batch), len(self._queue)
        gauges.busy_since = now
        is_due = now >= self._stats_due
        if not self._deltas and not is_due:
            return
        if now >= self._memory_due:
            gauges.measure_memory()
            gauges.kv_bytes = self._batch.kv_bytes
            self._observe_caches()
            self._memory_due = now + _MEMORY_EVERY_S
        if is_due:
            self._stats_due = now + _STATS_EVERY_S
        deltas, self._deltas = self._deltas, []
        self._send(Step(self._spec.epoch, gauges.step_seq, deltas, gauges.snapshot() if is_due else None))

    def _new_batch(self) -> Batch:
        return Batch(
            self._loaded.model,
            self._loaded.eos_ids,
            self._cache,
            self._plan.lane,
            self._drafter,
            self._loaded.vision,
            self._encoder,
        )


def _speculation(loaded: Loaded, spec: WorkerSpec) -> tuple[str, bool]:
    """Whether there are drafts, for a person and as such."""
    if spec.speculate == "off":
        return "off", False
    if loaded.plan.lane is not Lane.TOGETHER:
        return f"off, because rows run in the lane {loaded.plan.lane}", False
    if not batched.can_rewind(make_prompt_cache(loaded.model)):
        return "off, because the caches of this architecture cannot go back to before a block", False
    return "auto", True

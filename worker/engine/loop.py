"""The step loop: the one thread that touches MLX. Every row that enters leaves through `_finish`, exactly once.

Who owns what, from the loop to the model:
- `Engine.run` takes commands, admits, preempts, recovers and ends rows. It has all rows, and the queue.
- `Engine._run_step` has the pacer choose a chunk, the batch run a step, and the emitter send what came of it.
- `Batch.step` is a step as the rows see it. It has the rows on the device, with their media, grammars and draws, and
  moves KV between them and the prefix cache.
- `Generator.run_passes` makes the forward passes of a step. It has the sequences by phase, and the caches of prompts.
- `DecodeBatch.decode` gives each row past its prompt its next tokens. It has their caches, and the pass in flight.
What they keep of one sequence is on its `Row`, and on `Row.member` while it is in the batch (row.py).
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Final, assert_never

from protocol.failures import Code, Failure
from protocol.from_worker import Accepted, Finish, Rejected, Up
from protocol.spec import WorkerSpec
from protocol.to_worker import Abort, Drain, SetMemory, SetPace, Shutdown
from worker.engine.adapter_orders import AdapterOrders
from worker.engine.batch import Batch
from worker.engine.capabilities import reader_of, rows_at_once, speculation_of
from worker.engine.emitter import Emitter
from worker.engine.forward import can_pack
from worker.engine.gauges import Gauges
from worker.engine.inbox import AdapterOrder, Command, EarlyAborts, EngineDrain, EngineInbox, WakeUp
from worker.engine.load_checks.self_check import refusal
from worker.engine.load_checks.silent_row import silent_row
from worker.engine.outbox import Outbox
from worker.engine.output import OutputWriter, TokenOutput
from worker.engine.rank_peers import RankPeers
from worker.engine.row import Row
from worker.engine.scheduling.kv_budget import KvCost
from worker.engine.scheduling.memory_limits import MemoryLimits
from worker.engine.scheduling.pacer import Pacer
from worker.engine.scheduling.queue import Queue
from worker.engine.sparse_rows import SparseRows
from worker.errors import RequestInvalid, StepFailed, foreign_code, is_allocation_failure, is_gpu_fault
from worker.model.device import has_watchdog
from worker.model.loader import LoadedModel
from worker.prefix_cache.block_events import BlockEventLog
from worker.prefix_cache.prefix import PrefixCache
from worker.speculation.drafter import Drafter
from worker.speculation.policy.speculator import Speculator
from worker.vision.encoder import MediaEncoder
from worker.vision.features import FeatureCache

log = logging.getLogger("mlxd.worker")

# A second failure of the step loop within this time is not bad luck.
_RECOVERY_S: Final = 60.0
# Rows that may wait, at a time, for another row to prefill what they share.
_MAX_HELD: Final = 64
# How often the longest row is looked for, in steps.
_CONTEXT_EVERY: Final = 32


class Engine:
    """Owns the rows and the batch. Commands come in by `inbox`, messages leave by `send`.

    `keeps` is the folder of measured times that are kept from start to start; empty is none.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        spec: WorkerSpec,
        inbox: EngineInbox,
        send: Callable[[Up], None],
        gauges: Gauges,
        writer: OutputWriter,
        drafter: Drafter | None = None,
        keeps: str = "",
        partners: RankPeers | None = None,
        journal: BlockEventLog | None = None,
    ) -> None:
        self._loaded = loaded
        self._partners = partners
        self.speculation, drafts = speculation_of(loaded, spec)
        gauges.speculator = Speculator(loaded.proposer) if drafts else None
        if isinstance(drafter, Speculator):
            gauges.speculator = drafter
        self._drafter = drafter or gauges.speculator
        self._spec = spec
        self._inbox = inbox
        self._outbox = Outbox(spec.epoch, gauges, send)
        self._gauges = gauges
        self._plan = loaded.plan
        self._memory = MemoryLimits(loaded, spec, gauges, lambda: inbox.put(WakeUp.UP), keeps, partners, journal)
        self.kept = kept = self._memory.kept
        self.max_running = rows_at_once(spec, kept, self._plan.lane)
        self._encoder: MediaEncoder | None = None
        if loaded.vision is not None and self._memory.features is not None:
            self._encoder = MediaEncoder(loaded.vision.tower, self._memory.features, lambda: inbox.put(WakeUp.UP))
        self._sparse = SparseRows(reader_of(loaded, spec))
        gauges.choices = self._sparse.counts
        self._is_waiting = False
        self._batch = self.new_batch()
        self._queue = Queue()
        costs = gauges.speculator.costs if gauges.speculator is not None else None
        can_ride = can_pack(loaded.model)
        self.pacer = Pacer(spec, costs, kept, can_ride=can_ride, has_watchdog=has_watchdog())
        self._context = 0
        self._woke = 0.0
        self._emitter = Emitter(writer, self._outbox, self._finish)
        self._rows: dict[int, Row] = {}
        self._adapters = AdapterOrders(loaded, spec.epoch, self._memory, self._slots, self._apply_limits)
        self._early_aborts = EarlyAborts()
        self._drain = EngineDrain()
        self._is_stopping = False
        self._recovered_at = float("-inf")
        # The batch was abandoned when the release of a row failed.
        self._must_rebuild = False

    @property
    def cache(self) -> PrefixCache:
        """For looking at; it belongs to the engine thread."""
        return self._memory.cache

    @property
    def features(self) -> FeatureCache | None:
        """Likewise; None for a model of text."""
        return self._memory.features

    @property
    def sparse(self) -> SparseRows:
        """Likewise."""
        return self._sparse

    @property
    def kv_cost(self) -> KvCost:
        """Known once the engine is warm."""
        return self._memory.kv_cost

    def run(self) -> None:
        """Serve until told to shut down. Raises `StepFailed` when the loop cannot go on."""
        while not self._is_stopping:
            self._take_commands()
            self._recovering(self._enforce_deadlines)
            self._recovering(self._admit)
            self._recovering(self._encode)
            self._recovering(self._make_room)
            if not self.pacer.left_s():
                self._recovering(self._choose)
                if self._batch:
                    self._recovering(self._run_step)
            self._flush()
            self._recovering(self._batch.settle)
            self._recovering(self._memory.cache.hand_over)
            self._memory.cache.tell()
            self._recovering(self._tend_memory)
            self._recovering(self._adapters.tend)
            if self.pacer.rests:
                self._recovering(self._rest)
        self._fail_all(Failure(Code.DRAINING, "the model is being stopped; try again"))
        self._flush()
        self.pacer.close()
        self._memory.cache.close()
        self._batch.close()
        if self._encoder is not None:
            self._encoder.close()

    def warm_up(self, prompt: list[int]) -> int:
        """Compile the kernels of prefill and decode before the first request pays for it.

        Returns the longest sequence that memory has room for, in tokens. Raises `LoadFailed`.
        """
        row = silent_row(0, prompt, 2)
        with foreign_code(refusal):
            self._batch.insert(row)
            while self._batch:
                self._batch.step(self._spec.prefill_chunk)
            self._batch.settle()
            if self.cache.failure is not None:
                raise self.cache.failure
        self._memory.cache.clear()
        assert self._batch.kv_cost is not None
        self._memory.kv_cost = self._batch.kv_cost
        self._apply_limits()
        limit = self._memory.kv.limit
        return self._sparse.longest(self.kv_cost.longest(limit), limit)

    def _apply_limits(self) -> None:
        self._memory.apply(self._batch.widest_step, self._make_room)

    def _slots(self) -> set[int]:
        """Slots of the adapters that rows have."""
        return {row.adapter_slot for row in self._rows.values()}

    def _tend_memory(self) -> None:
        if self._memory.relax():
            self._apply_limits()

    def fail_all(self, failure: Failure) -> None:
        """The terminal event of every row before the loop dies. Asks nothing of a device that may be broken."""
        self._batch.abandon()
        self._fail_all(failure)
        self._flush()

    # -- commands ----------------------------------------------------------------------------------------------------

    def _take_commands(self) -> None:
        """Everything in the inbox, aborts first; blocks only when there is nothing else to do."""
        is_idle = not self._rows and not self._drain.is_on
        if is_idle:
            self._idle()
        commands = self._inbox.take(is_idle=is_idle, is_waiting=self._is_waiting, rest_s=self.pacer.left_s())
        self._gauges.busy_since = self._woke = time.monotonic()
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
                self._drain.begin(command.deadline_s)
            case Shutdown():
                self._is_stopping = True
            case SetMemory():
                self._memory.share.change(command)
                self._apply_limits()
            case SetPace():
                self.pacer.change(command)
            case AdapterOrder():
                self._adapters.obey(command)
            case WakeUp.UP:
                pass
            case _:
                assert_never(command)

    def _idle(self) -> None:
        self._gauges.running = self._gauges.waiting = 0
        self._gauges.busy_since = 0.0
        self._gauges.kv_bytes = 0
        self._gauges.measure_memory()
        self._memory.observe()
        self._recovering(self._memory.cache.flush)
        self.pacer.tend()

    def _rest(self) -> None:
        """Leave the GPU to others for a while. Nothing that was launched may run on into the rest."""
        self._batch.wait()
        self.pacer.worked(self._woke)

    def _abort(self, rid: int) -> None:
        row = self._rows.get(rid)
        if row is not None:
            self._finish(row, Finish.ABORT)
        else:
            self._early_aborts.add(rid)

    def _enqueue(self, row: Row) -> None:
        if (refusal := self._adapters.refusal(row)) is not None:
            self._outbox.send(Rejected(row.rid, refusal))
            return
        if row.rid in self._rows:  # its one terminal event belongs to the row that is already here
            log.error("request %d arrived twice; the second was dropped", row.rid)
            return
        if self._drain.refuses(row.stats.arrived):
            self._outbox.send(Rejected(row.rid, Failure(Code.DRAINING, "the model is being stopped; try again")))
            return
        if len(self._queue) >= self._spec.max_waiting:
            self._outbox.send(Rejected(row.rid, Failure(Code.BUSY, "the model's queue is full; try again")))
            return
        relaxed = row.rule.grammar.relaxed if row.rule is not None else ()
        self._outbox.send(Accepted(row.rid, len(row.prompt), (*relaxed, *row.relaxed), row.left_out))
        self._rows[row.rid] = row
        if self._early_aborts.take(row.rid):
            self._finish(row, Finish.ABORT)
            return
        if row.report.sends_ids:
            self._outbox.tell_prompt(row)
        report = row.report
        if report.echo and not report.echo_sent and (report.scored_top is None or row.top_logprobs is None):
            self._outbox.echo(row)
        if row.max_tokens <= len(row.output) and row.report.scored_top is None:
            self._finish(row, Finish.LENGTH)
            return
        self._queue.push(row)

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for row in [row for row in self._rows.values() if row.deadline is not None and now >= row.deadline]:
            self._finish(row, Finish.ERROR, Failure(Code.DEADLINE_EXCEEDED, "the request's deadline has passed"))
        if self._rows and self._drain.is_due(now):
            self._drain.aborted = max(self._drain.aborted, len(self._rows))
            self._fail_all(Failure(Code.DRAINING, "the model is being stopped; try again"))
        if self._drain.is_on and not self._rows:
            self._flush()
            self._outbox.send(self._drain.end(self._spec.epoch))

    # -- one step ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        held: list[Row] = []
        while len(self._queue) and len(self._batch) < self.max_running and len(held) < _MAX_HELD:
            row = self._queue.pop()
            if not self._memory.kv.admits(self._batch.rows, row, self._sparse.needs(row)):
                held.append(row)
                break  # a smaller one behind it must not starve it
            if self._sparse.must_wait(row) or self._batch.must_wait(row, is_first=not held):
                held.append(row)
                continue
            row.stats.admitted = row.stats.admitted or time.monotonic()
            if row.thinking.is_enough:  # resumed just there
                self._close_reasoning(row)
            elif not self._batch.insert(row):
                held.append(row)
        self._queue.put_back(held)
        self._is_waiting = bool(held) and not self._batch

    def _encode(self) -> None:
        """At most one medium a tick: running rows wait for no more than that."""
        if self._encoder is None:
            return
        try:
            failed = self._encoder.step()
        except (MemoryError, RuntimeError) as error:  # MLX raises the latter for memory that it cannot have
            if not is_allocation_failure(error):
                raise
            # Running rows stay: the medium is encoded once more, with what is cached out of its way.
            if not self._memory.shrink(error, "the encode of a medium"):
                self._memory.clear()
            self._apply_limits()
            return
        for rid, error in failed:
            if (row := self._rows.get(rid)) is not None:
                self._fail_medium(row, error)
        # What there is to do for the tower, or was done for a row, is not waited for.
        self._is_waiting = self._is_waiting and not self._encoder.is_busy

    def _choose(self) -> None:
        """Read on in a prompt whose kept tokens are being chosen, for as long as a tick may take."""
        if not self._sparse.is_busy:
            self.pacer.chosen()
            return
        self._is_waiting = False
        # A step as others: its request is kept alive by it.
        self._gauges.step_seq += 1
        self._batch.wait()
        try:
            self._sparse.step(self.pacer.choosing_s(self._batch.prefilling, self._batch.decoding))
        except Exception as error:  # the boundary of one row, to code of every architecture
            rid = self._sparse.drop()
            if is_gpu_fault(error):
                raise
            # It is read once more where memory can be had for it; else its request fails alone.
            if self._memory.shrink(error, "the reading of a prompt by the draft model"):
                self._apply_limits()
            elif rid is not None and (row := self._rows.get(rid)) is not None:
                self._emitter.fail(row, "its prompt was read by the draft model", error)

    def _fail_medium(self, row: Row, error: Exception) -> None:
        if isinstance(error, RequestInvalid):
            self._finish(row, Finish.ERROR, error.failure)
        else:
            self._emitter.fail(row, "its media were encoded", error)

    def _make_room(self) -> None:
        """Put rows back into the queue, their KV into the prefix cache, while the next step would not fit."""
        while (row := self._memory.kv.surplus(self._batch.rows, self._sparse.nbytes)) is not None:
            log.info("row %d is preempted for older ones", row.rid)
            self._batch.remove(row)
            self._queue.push(row)
            self._gauges.preemptions += 1

    def _run_step(self) -> None:
        prefilling, decoding = self._batch.prefilling, self._batch.decoding
        if prefilling or self._gauges.step_seq % _CONTEXT_EVERY == 0:
            self._context = self._batch.context
        chunk = self.pacer.chunk(prefilling, decoding, self._batch.longest_prefill, self._context)
        # Prompts come first: a tick has a chunk of them, or a slice of what a model that drafts has to read.
        unread = 0 if prefilling or self._sparse.is_busy else self._batch.unread
        reads = self.pacer.reads(decoding, unread, self._context) if unread else 0
        output = self._batch.step(chunk.tokens, rides=chunk.rides, reads=reads)
        now = time.monotonic()
        for timed in output.timed:
            self.pacer.observe(timed)
        self._gauges.step_seq += 1
        self._gauges.prompt_tokens += output.prefilled
        self._gauges.generation_tokens += len(output.tokens)
        for row in output.returned:
            self._queue.push(row)
        self._emitter.emit(output, now, self._close_reasoning)

    def _recovering(self, act: Callable[[], None]) -> None:
        """Act, and begin again with all rows if that raises: whatever touches a row's KV may find no memory."""
        try:
            act()
            if self._must_rebuild:
                self._rebuild()
        except StepFailed:
            raise
        except Exception as error:  # the root of the step loop
            self._recover(error)

    def _close_reasoning(self, row: Row) -> None:
        """Write the end of the reasoning block for the model and go on from there."""
        self._batch.remove(row)
        row.thinking.budget = None
        for token in row.thinking.closing_ids:
            ended = "length" if len(row.output) + 1 >= row.max_tokens else None
            self._emitter.advance(row, token, ended)
            if row.is_finished:
                return
        if not self._batch.insert(row):
            self._queue.push(row)

    def _recover(self, error: Exception) -> None:
        """An exception out of a step leaves the batch in an unknown state: build a new one and prefill every row again.

        Sampling depends on (seed, position) alone, so the rows go on with the tokens they would have had.
        """
        if self._partners is not None:  # nobody knows what they have done of it
            raise StepFailed(Code.WORKER_DIED, "the group's step loop failed", detail=repr(error)) from error
        now = time.monotonic()
        if self._memory.shrink(error, f"a step of {len(self._batch)} rows"):
            self._rebuild()
            return
        if is_gpu_fault(error) or now - self._recovered_at < _RECOVERY_S:
            raise StepFailed(Code.WORKER_DIED, "the model's step loop failed", detail=repr(error)) from error
        log.exception("a step failed; rebuilding the batch of %d rows", len(self._batch))
        self._recovered_at = now
        self._rebuild()

    def _rebuild(self) -> None:
        """A new batch. The rows of the old one wait to be admitted again; those too that its failed step had let go of,
        and told nobody."""
        self._must_rebuild = False
        self._batch.abandon()
        self._batch.close()
        self._sparse.drop()
        self._batch = self.new_batch()
        self._apply_limits()
        for row in self._rows.values():
            if row not in self._queue:
                self._queue.push(row)

    # -- ends --------------------------------------------------------------------------------------------------------

    def _finish(
        self, row: Row, finish: Finish, failure: Failure | None = None, piece: TokenOutput | None = None
    ) -> None:
        """The one place where a row ends."""
        assert not row.is_finished
        row.is_finished = True
        del self._rows[row.rid]
        if finish in (Finish.STOP, Finish.LENGTH):
            self._inbox.answered(time.monotonic())
        self._queue.remove(row)
        if row.text.parser is not None:
            self._gauges.malformed_tool_calls += row.text.parser.malformed
        piece = piece or TokenOutput([], None, finish)
        self._batch.account(row)
        self._outbox.say(row, piece, row.usage(time.monotonic()), failure)
        try:
            self._release(row)
        except StepFailed:
            raise
        except Exception as error:  # the boundary of one row, whose client has its answer
            self._contain(row, error)

    def _release(self, row: Row) -> None:
        """Give up what a row holds that has ended."""
        if self._encoder is not None:
            self._encoder.forget(row.rid)
        self._sparse.forget(row)
        self._batch.remove(row)

    def _contain(self, row: Row, error: Exception) -> None:
        """A failed release leaves the batch in an unknown state: the other rows go on in another one.

        It never counts as a failed step: each row is released once, so that no request can end the worker by it.
        """
        if self._partners is not None or (is_gpu_fault(error) and not is_allocation_failure(error)):
            raise StepFailed(Code.WORKER_DIED, "the model's step loop failed", detail=repr(error)) from error
        log.error("row %d has ended and could not be released; rebuilding the batch", row.rid, exc_info=error)
        self.cache.counts.prefix_failures += 1
        self._batch.abandon()
        self._must_rebuild = True

    def _fail_all(self, failure: Failure) -> None:
        for row in list(self._rows.values()):
            self._finish(row, Finish.ERROR, failure)

    def _flush(self) -> None:
        gauges = self._gauges
        gauges.running, gauges.waiting = len(self._batch), len(self._queue)
        gauges.busy_since = time.monotonic()
        self._outbox.flush(self._measure)

    def _measure(self) -> None:
        self._gauges.measure_memory()
        self._gauges.kv_bytes = self._batch.kv_bytes + self._sparse.nbytes
        if self._partners is not None:
            self._gauges.ranks = self._partners.stats()
        self._memory.observe()

    def new_batch(self) -> Batch:
        """An empty batch as the loop has it."""
        if self._partners is not None:
            return self._partners.batch(self._loaded.model, self._loaded.eos_ids, self._memory.cache, self._plan.lane)
        return Batch(
            self._loaded.model,
            self._loaded.eos_ids,
            self._memory.cache,
            self._plan.lane,
            self._drafter,
            self._loaded.vision,
            self._encoder,
            self._loaded.table_rows,
        )

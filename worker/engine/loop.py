"""Step loop: runs on the only thread that uses MLX.

Owners of state and work, from the loop to the model:
- `Engine.run` handles commands, and admits, preempts, recovers and ends rows. It owns all rows, and the queue.
- `Engine._run_step` calls the pacer for a chunk size, the batch for a step, and the emitter to send the output.
- `Batch.step` runs a step for all rows. It owns the rows on the device, with their media, grammars and draws, and
  moves KV between them and the prefix cache.
- `Generator.run_passes` makes the forward passes of a step. It owns the sequences by phase, and the caches of prompts.
- `DecodeBatch.decode` gives each row past its prompt its next tokens. It owns their caches, and the pass in flight.

The state of one sequence is on its `Row`, and on `Row.sequence` while it is in the batch (row.py).

Capabilities of an engine: concurrent rows, pace, drafts and sparse prefill, from a model and its specification.

Commands that load and unload adapters, handled between two ticks, and the memory that adapters take.

Rows with a sparse prefill, while they wait for the selection of their tokens.
"""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from mlx_lm.generate import generation_stream

from protocol.failures import Code, Failure
from protocol.from_worker import Accepted, AdaptersSet, Finish, Rejected, Up
from protocol.spec import DEFAULT_MAX_RUNNING, WorkerSpec
from protocol.stats import Stats
from protocol.to_worker import SetMemory, SetPace
from worker.engine.batch import Batch
from worker.engine.forward import can_pack
from worker.engine.gauges import Gauges
from worker.engine.inbox import AdapterOrder, Command, EngineInbox, WakeUp
from worker.engine.load_checks import refusal, silent_row
from worker.engine.output import Emitter, OutputWriter, TokenOutput
from worker.engine.rank_peers import RankPeers
from worker.engine.request_loop import RequestLoop
from worker.engine.row import Row
from worker.engine.scheduling.kv_budget import AdmissionPass, KvCost
from worker.engine.scheduling.memory_limits import MemoryLimits
from worker.engine.scheduling.pacing import Heartbeat, Pacer
from worker.engine.scheduling.queue import Queue
from worker.engine.scheduling.timing_profile_file import KeptFile, has_watchdog
from worker.errors import StepFailed, foreign_code, is_allocation_failure, is_gpu_fault
from worker.kv import batched
from worker.kv.quantized import make_caches
from worker.model.batch_mode import BatchMode
from worker.model.loader import LoadedModel
from worker.model.lora.adapters import Adapters, adapters_of
from worker.model.pass_costs import WIDTHS, PassCosts
from worker.prefix_cache.kv_events import BlockEventLog
from worker.sparse_prefill import Chooser, ImportanceReader
from worker.speculation.drafter import Drafter
from worker.speculation.policy import Speculator
from worker.vision.encoder import MediaEncoder

log = logging.getLogger("mlxd.worker")

# Maximum number of rows that a calibration chooses.
MAX_CALIBRATED_ROWS: Final = 64


def rows_at_once(spec: WorkerSpec, kept: KeptFile | None, mode: BatchMode) -> int:
    """Return the number of rows that may run together, as configured or calibrated."""
    if mode is BatchMode.SINGLE:
        return 1
    if spec.max_running:
        return spec.max_running
    return kept.calibration.max_running if kept is not None and kept.calibration is not None else DEFAULT_MAX_RUNNING


def pacer_of(
    loaded: LoadedModel, spec: WorkerSpec, costs: PassCosts, kept: KeptFile | None, block_tokens: int
) -> Pacer:
    """Return the pacer of a model; a row that generates has up to `block_tokens` tokens in a pass."""
    return Pacer(
        spec,
        costs,
        kept,
        can_fuse=can_pack(loaded.model),
        has_watchdog=has_watchdog(),
        pass_tokens=loaded.pass_tokens,
        block_tokens=block_tokens,
    )


def reader_of(loaded: LoadedModel, spec: WorkerSpec) -> ImportanceReader | None:
    """Return the model that selects tokens for sparse prefill, if it is configured."""
    return ImportanceReader(loaded.draft) if spec.sparse_keep and loaded.draft is not None else None


def speculation_of(loaded: LoadedModel, spec: WorkerSpec) -> tuple[str, bool]:
    """Return a description of speculation's state for people, and whether speculation is on."""
    if spec.speculate == "off":
        return "off", False
    if spec.group is not None:
        return "off, because ranks of a group must take the same steps", False
    if loaded.plan.mode is not BatchMode.TOGETHER:
        return f"off, because rows run in the batch mode {loaded.plan.mode}", False
    if not batched.can_rewind(make_caches(loaded.model)):
        return "off, because the caches of this architecture cannot go back to before a block", False
    rows = spec.max_running or MAX_CALIBRATED_ROWS
    if loaded.pass_tokens and rows * WIDTHS[-1] > loaded.pass_tokens:
        most = loaded.pass_tokens // WIDTHS[-1]
        return f"off, because the experts of a pass compute drafts of at most {most} rows (max_running)", False
    if spec.draft:
        return f"auto, with drafts by {spec.draft}", True
    if loaded.no_head:
        return f"auto, without the checkpoint's head for multi-token prediction: {loaded.no_head}", True
    return "auto", True


# An adapter is refused if it would leave memory for a context of fewer tokens than this.
MIN_CONTEXT: Final = 256


class AdapterOrders:
    """Adapters of an engine. `rows` returns the engine's rows, and `apply` applies changed memory limits."""

    def __init__(
        self,
        loaded: LoadedModel,
        epoch: int,
        memory: MemoryLimits,
        rows: Callable[[], Iterable[Row]],
        apply: Callable[[], None],
    ) -> None:
        # This field is None if the model was not loaded to serve requests.
        self._adapters = adapters_of(loaded.model)
        self._base_bytes = loaded.weights_bytes - (self._adapters.nbytes if self._adapters is not None else 0)
        self._epoch = epoch
        self._memory = memory
        self._rows = rows
        self._apply = apply
        # Callback of the newest command, which gets a report when an adapter has been freed.
        self._reply: Callable[[AdaptersSet], None] | None = None

    def refusal(self, row: Row) -> Failure | None:
        """Return the failure of a row whose adapter was unloaded after the request was read."""
        if row.adapter is None or (self._adapters is not None and self._adapters.holds(row.adapter)):
            return None
        message = f"the adapter {row.adapter.name!r} was unloaded before the request began"
        return Failure(Code.MODEL_MISSING, message, param="model")

    def handle(self, order: AdapterOrder) -> None:
        adapters = self._adapters
        if adapters is None:
            return
        self._reply = order.reply
        adapters.change(order.wanted, order.read)
        self._weigh(adapters)
        for name, path in order.wanted:
            room = self._memory.kv_cost.longest(self._memory.kv.limit)
            if (name, path) in order.read and adapters.has(name) and room < MIN_CONTEXT:
                message = f"beside the adapter {name!r} there would be no memory left for KV"
                adapters.fail(name, path, Failure(Code.OUT_OF_MEMORY, message))
                self._weigh(adapters)
        self._report(adapters, order.call_id)

    def free_retired(self) -> None:
        """Free retired adapters that no row uses any more."""
        adapters = self._adapters
        if adapters is not None and adapters.is_retiring:
            before = adapters.nbytes
            self._weigh(adapters)
            if adapters.nbytes != before:
                self._report(adapters, 0)

    def _weigh(self, adapters: Adapters) -> None:
        """Free adapters that no row uses, then divide memory again with the present size of the weights."""
        adapters.sweep(lambda: {row.adapter_slot for row in self._rows()})
        self._memory.grant.weigh(self._base_bytes + adapters.nbytes)
        self._apply()

    def _report(self, adapters: Adapters, call_id: int) -> None:
        if self._reply is not None:
            self._reply(AdaptersSet(self._epoch, call_id, adapters.infos, self._base_bytes + adapters.nbytes))


class SparseRows:
    """Rows of a sparse prefill, owned by the engine. Every method does nothing for a model without sparse prefill."""

    def __init__(self, reader: ImportanceReader | None) -> None:
        self._chooser = Chooser(reader, generation_stream) if reader is not None else None

    @property
    def counts(self) -> Stats | None:
        return self._chooser.counts if self._chooser is not None else None

    @property
    def is_busy(self) -> bool:
        return self._chooser is not None and self._chooser.is_busy

    @property
    def nbytes(self) -> int:
        """Bytes of KV that the draft model needs for the prompt that it currently reads."""
        return self._chooser.nbytes if self._chooser is not None else 0

    def needs(self, row: Row) -> int:
        """Return the bytes of KV that the draft model needs until it has selected the row's tokens. If the row needs no
        selection, return the bytes for the prompt that it currently reads.
        """
        if self._chooser is None or not row.keep or row.kept is not None:
            return self.nbytes
        return self._chooser.needs(len(row.prompt))

    def longest(self, tokens: int, budget: int) -> int:
        """Return the length of the longest prompt, at most `tokens`, that the draft model can read with `budget` bytes
        of KV."""
        return tokens if self._chooser is None else min(tokens, self._chooser.longest(budget))

    def must_wait(self, row: Row) -> bool:
        """Whether the tokens of a row are not selected yet; if so, request their selection."""
        if not row.keep or row.kept is not None:
            return False
        assert self._chooser is not None, "the intake refuses what the model cannot do"
        row.kept = self._chooser.kept(row.rid, row.tokens()[: len(row.prompt)], row.keep, row.cache_salt)
        return row.kept is None

    def step(self, limit_s: float) -> None:
        """Continue the draft model's prefill for about `limit_s` seconds."""
        assert self._chooser is not None
        self._chooser.step(limit_s)

    def forget(self, row: Row) -> None:
        """Drop the selection of a row that has ended."""
        if self._chooser is not None and row.keep:
            self._chooser.forget(row.rid)

    def drop(self) -> int | None:
        """Drop the KV of the prompt that the draft model is reading; reading restarts when the prompt is requested
        again. Return the rid of the prompt's row."""
        return self._chooser.drop() if self._chooser is not None else None


# A second failure of the step loop within this time ends the worker.
_RECOVERY_INTERVAL_S: Final = 60.0
_CONTEXT_INTERVAL_STEPS: Final = 32


class Engine(RequestLoop[Row]):
    """Owner of the rows and the batch. Commands come from `inbox`, messages leave through `send`.

    `keeps` is the folder for timings that are saved for the next start; it is empty if none are saved.
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
        rank_peers: RankPeers | None = None,
        journal: BlockEventLog | None = None,
    ) -> None:
        super().__init__(spec, gauges, send)
        self._loaded = loaded
        self._rank_peers = rank_peers
        self.speculation, drafts = speculation_of(loaded, spec)
        gauges.speculator = Speculator(loaded.proposer) if drafts else None
        if isinstance(drafter, Speculator):
            gauges.speculator = drafter
        self._drafter = drafter or gauges.speculator
        self._inbox = inbox
        wake = partial(inbox.put, WakeUp.UP)
        self._memory = MemoryLimits(loaded, spec, gauges, wake, keeps, rank_peers, journal)
        self.cache, self.features = self._memory.cache, self._memory.features
        self.kept = kept = self._memory.kept
        self.max_running = rows_at_once(spec, kept, loaded.plan.mode)
        self._encoder: MediaEncoder | None = None
        if loaded.vision is not None and self.features is not None:
            self._encoder = MediaEncoder(loaded.vision.tower, self.features, wake)
        self.sparse = SparseRows(reader_of(loaded, spec))
        gauges.choices = self.sparse.counts
        self._is_waiting = False
        self._batch = self.new_batch()
        self._queue = Queue()
        costs = kept.costs if kept is not None else gauges.speculator.costs if gauges.speculator else PassCosts()
        if gauges.speculator is not None:
            gauges.speculator.costs = costs
        self.pacer = pacer_of(loaded, spec, costs, kept, self._batch.widest_step)
        self.heartbeat = Heartbeat(loaded.model, spec.keep_warm_s)
        self._context, self._woke, self._recovered_at = 0, 0.0, float("-inf")
        self._emitter = Emitter(writer, self._outbox, self._finish)
        self._adapters = AdapterOrders(loaded, spec.epoch, self._memory, self._requests.values, self._apply_limits)
        # Whether the batch was abandoned because the release of a row failed, and must be built again.
        self._must_rebuild = False

    @property
    def kv_cost(self) -> KvCost:
        """Cost of KV, which is known after `warm_up`."""
        return self._memory.kv_cost

    def run(self) -> None:
        """Serve until a shutdown. Raises `StepFailed` when the loop cannot continue."""
        while not self._is_stopping:
            self._receive_commands()
            self._guarded(self._enforce_deadlines)
            self._guarded(self._admit)
            self._guarded(self._encode)
            self._guarded(self._make_room)
            if not self.pacer.left_s():
                self._guarded(self._select_tokens)
                if self._batch:
                    self._guarded(self._run_step)
            self._flush()
            self._guarded(self._batch.store_ended)
            self._guarded(self.cache.hand_over)
            self.cache.publish_events()
            self._guarded(self._restore_memory_limits)
            self._guarded(self._adapters.free_retired)
            if self.pacer.duty_cycle.is_on:
                self._guarded(self._rest)
        self._end_all()
        self.pacer.close()
        self.cache.close()
        self._batch.close()
        if self._encoder is not None:
            self._encoder.close()

    def warm_up(self, prompt: list[int]) -> int:
        """Compile the kernels of prefill and decode before the first request pays for it.

        Returns the longest sequence that fits memory, in tokens. Raises `LoadFailed`.
        """
        with foreign_code(refusal):
            self._batch.insert(silent_row(0, prompt, 2))
            while self._batch:
                self._batch.step(self.pacer.policy.most(1))
            self._batch.store_ended()
            if self.cache.failure is not None:
                raise self.cache.failure
        self.cache.clear()
        assert self._batch.kv_cost is not None
        self._memory.kv_cost = self._batch.kv_cost
        self._apply_limits()
        limit = self._memory.kv.limit
        return self.sparse.longest(self.kv_cost.longest(limit), limit)

    def fail_all(self, failure: Failure) -> None:
        """Send the terminal event of every row before the loop dies. Does not use the device, which may be broken."""
        self._batch.abandon()
        super().fail_all(failure)

    def _apply_limits(self) -> None:
        self._memory.apply(self._batch.widest_step, self._make_room)

    def _restore_memory_limits(self) -> None:
        if self._memory.relax():
            self._apply_limits()

    # -- commands ----------------------------------------------------------------------------------------------------

    def _receive_commands(self) -> None:
        """Handle everything in the inbox; blocks only when there is nothing else to do."""
        if is_idle := self._is_idle:
            self._idle()
        receive = partial(self._inbox.receive, is_idle=is_idle, is_waiting=self._is_waiting, rest_s=self.pacer.left_s())
        commands = self.heartbeat.receive(receive, self._guarded, is_idle=is_idle)
        self._gauges.busy_since = self._woke = time.monotonic()
        self._handle_all(commands)

    def _handle(self, command: Command) -> None:
        match command:
            case SetMemory():
                self._memory.grant.change(command)
                self.heartbeat.has_memory = command.cache_part == 1.0
                self._apply_limits()
            case SetPace():
                self.pacer.change(command)
                self.heartbeat.has_power = command.may_keep_warm
            case AdapterOrder():
                self._adapters.handle(command)
            case WakeUp():
                pass
            case _:
                super()._handle(command)

    def _idle(self) -> None:
        super()._idle()
        self._gauges.kv_bytes = 0
        self._memory.observe()
        self._guarded(self.cache.flush)
        self.pacer.flush_if_due()

    def _rest(self) -> None:
        """Wait until all launched work has ended, and begin a pause in which other processes can use the GPU."""
        self._batch.wait()
        self.pacer.worked(self._woke)

    @property
    def _is_full(self) -> bool:
        return len(self._queue) - len(self._batched) >= self._spec.max_waiting

    def _accepted(self, request: Row) -> Accepted:
        return Accepted(request.rid, request.prompt_tokens, request.deviations, request.truncated)

    def _enqueue(self, request: Row) -> None:
        if (refusal := self._adapters.refusal(request)) is not None:
            self._outbox.send(Rejected(request.rid, refusal))
        else:
            request.stats.rested_s = self.pacer.duty_cycle.total_s
            super()._enqueue(request)

    def _enter(self, request: Row) -> None:
        report = request.report
        if report.sends_ids:
            self._outbox.add_prompt(request)
        if report.echo and not report.echo_sent and (report.scored_top is None or request.top_logprobs is None):
            self._outbox.add_echo(request)
        if request.max_tokens <= len(request.output) and report.scored_top is None and not request.only_prefills:
            self._finish(request, Finish.LENGTH)
        else:
            self._queue.push(request)

    # -- one step ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        held: list[Row] = []
        room = AdmissionPass(self._memory.kv, self.sparse.needs)
        while len(self._queue) and len(self._batch) < self.max_running and room.tries:
            row = self._queue.pop()
            yields = self._first_to_yield([row]) is not None
            if self._batch.is_awaiting(row) or not room.admits(self._batch.rows, row, yields=yields):
                held.append(row)
                continue
            if self.sparse.must_wait(row) or self._batch.must_wait(row, is_first=not held):
                held.append(row)
                continue
            row.stats.admitted = row.stats.admitted or time.monotonic()
            if row.thinking.is_enough:  # the row is resumed, and its reasoning budget is used up
                self._close_reasoning(row)
            elif not self._batch.insert(row):
                held.append(row)
        self._queue.put_back(held)
        self._is_waiting = bool(held) and not self._batch

    def _encode(self) -> None:
        """Encode at most one medium, so that running rows wait for only one."""
        if self._encoder is None:
            return
        try:
            failed = self._encoder.step()
        except (MemoryError, RuntimeError) as error:  # MLX raises RuntimeError for memory that it cannot allocate
            if not is_allocation_failure(error):
                raise
            # The encoder's next step tries the medium once more. `shrink` clears the caches and halves the KV limits,
            # so rows may be preempted below. If it cannot halve them further, only the caches are cleared.
            if not self._memory.shrink(error, "the encode of a medium"):
                self._memory.clear()
            self._apply_limits()
            return
        for rid, error in failed:
            if (row := self._requests.get(rid)) is not None:
                self._emitter.fail(row, "its media were encoded", error)
        self._is_waiting = self._is_waiting and not self._encoder.is_busy

    def _select_tokens(self) -> None:
        """Continue the draft model's prefill of a sparse prompt, for as long as a tick may take."""
        if not self.sparse.is_busy:
            self.pacer.end_selection()
            return
        self._is_waiting = False
        # The selection counts as a step, so that the request's liveness check passes.
        self._gauges.step_seq += 1
        self._batch.wait()
        try:
            self.sparse.step(self.pacer.policy.selection_s(self._batch.prefilling, self._batch.decoding))
        except Exception as error:  # an error of a model's code fails only this row
            rid = self.sparse.drop()
            if is_gpu_fault(error):
                raise
            # The draft model reads the prompt again if memory was freed; otherwise only the prompt's request fails.
            if self._memory.shrink(error, "the reading of a prompt by the draft model"):
                self._apply_limits()
            elif rid is not None and (row := self._requests.get(rid)) is not None:
                self._emitter.fail(row, "its prompt was read by the draft model", error)

    def _make_room(self) -> None:
        """Preempt rows of batches beside others, then rows until the next step fits. KV goes to the prefix cache."""
        while rows := self._batch.rows:
            row = self._first_to_yield(reversed(rows)) or self._memory.kv.surplus(rows, self.sparse.nbytes)
            if row is None:
                break
            log.info("row %d is preempted for others", row.rid)
            self._batch.remove(row)
            row.stats.preempt()
            self._queue.push(row)
            self._gauges.preemptions += 1
        if self._batch.kv_bytes > self._memory.kv.limit:
            self._batch.compact()

    def _run_step(self) -> None:
        prefilling, decoding = self._batch.prefilling, self._batch.decoding
        if prefilling or self._gauges.step_seq % _CONTEXT_INTERVAL_STEPS == 0:
            self._context = self._batch.context
        chunk = self.pacer.chunk(prefilling, decoding, self._batch.longest_prefill, self._context)
        # The draft model reads rows' texts only in ticks without a chunk of a prompt and without a slice of a sparse
        # prefill.
        unread = 0 if prefilling or self.sparse.is_busy else self._batch.unread
        reads = self.pacer.reads(decoding, unread, self._context) if unread else 0
        output = self._batch.step(chunk.tokens, is_fused=chunk.is_fused, reads=reads)
        now = time.monotonic()
        for timed in output.timed:
            self.pacer.observe(timed)
        self._gauges.step_seq += 1
        self._gauges.prompt_tokens += output.prefilled
        self._gauges.generation_tokens += len(output.tokens)
        for row in output.returned:
            self._queue.push(row)
        self._emitter.emit(output, now, self._close_reasoning)

    def _close_reasoning(self, row: Row) -> None:
        """Append the end of the reasoning block to the output and continue from there."""
        self._batch.remove(row)
        row.thinking.budget = None
        for token in row.thinking.closing_ids:
            ended = "length" if len(row.output) + 1 >= row.max_tokens else None
            self._emitter.advance(row, token, ended)
            if row.is_finished:
                return
        if not self._batch.insert(row):
            self._queue.push(row)

    # -- recovery ----------------------------------------------------------------------------------------------------

    def _guarded(self, act: Callable[[], None]) -> None:
        """Call `act` and recover from its error: anything that touches a row's KV may run out of memory."""
        try:
            act()
            if self._must_rebuild:
                self._rebuild()
        except StepFailed:
            raise
        except Exception as error:  # the step loop must recover from any error
            self._recover(error)

    def _recover(self, error: Exception) -> None:
        """Build a new batch and prefill every row again: an exception leaves the batch in an unknown state.

        Sampling depends on (seed, position) alone, so the rows get the tokens that they would have had.
        """
        if self._rank_peers is not None:  # the state of the other ranks is unknown
            raise StepFailed(Code.WORKER_DIED, "the group's step loop failed", detail=repr(error)) from error
        now = time.monotonic()
        if self._memory.shrink(error, f"a step of {len(self._batch)} rows"):
            self._rebuild()
            return
        if is_gpu_fault(error) or now - self._recovered_at < _RECOVERY_INTERVAL_S:
            raise _loop_failed(error) from error
        log.exception("a step failed; rebuilding the batch of %d rows", len(self._batch))
        self._recovered_at = now
        self._rebuild()

    def _rebuild(self) -> None:
        """Replace the batch, and queue its rows again, including those that the failed step had already taken out."""
        self._must_rebuild = False
        self._batch.abandon()
        self._batch.close()
        self.sparse.drop()
        self._batch = self.new_batch()
        self._apply_limits()
        for row in self._requests.values():
            if row not in self._queue:
                self._queue.push(row)

    # -- ends --------------------------------------------------------------------------------------------------------

    def _finish(
        self, request: Row, finish: Finish, failure: Failure | None = None, output: TokenOutput | None = None
    ) -> None:
        row = request
        assert not row.is_finished
        row.is_finished = True
        del self._requests[row.rid]
        self._batched.discard(row.rid)
        if finish in (Finish.STOP, Finish.LENGTH):
            self._inbox.note_answer(time.monotonic())
        self._queue.remove(row)
        if row.text.parser is not None:
            self._gauges.malformed_tool_calls += row.text.parser.malformed
        self._batch.account(row)
        row.stats.rested_s = self.pacer.duty_cycle.total_s - row.stats.rested_s
        self._outbox.add_output(row, output or TokenOutput([], None, finish), row.usage(time.monotonic()), failure)
        try:
            if self._encoder is not None:
                self._encoder.forget(row.rid)
            self.sparse.forget(row)
            self._batch.remove(row)
        except StepFailed:
            raise
        except Exception as error:  # an error must not affect other rows; this row's client has its answer
            self._recover_from_release(row, error)

    def _recover_from_release(self, row: Row, error: Exception) -> None:
        """Have the batch rebuilt after a row's release has failed, because the failure leaves it in an unknown state.

        This never counts as a failed step, so that no request can end the worker: each row is released only once.
        """
        if self._rank_peers is not None or (is_gpu_fault(error) and not is_allocation_failure(error)):
            raise _loop_failed(error) from error
        log.error("row %d has ended and could not be released; rebuilding the batch", row.rid, exc_info=error)
        self.cache.counts.prefix_failures += 1
        self._batch.abandon()
        self._must_rebuild = True

    def _flush(self) -> None:
        gauges = self._gauges
        gauges.running, gauges.waiting, gauges.busy_since = len(self._batch), len(self._queue), time.monotonic()
        self._outbox.flush(self._measure)

    def _measure(self) -> None:
        super()._measure()
        self._gauges.kv_bytes = self._batch.kv_bytes + self.sparse.nbytes
        if self._rank_peers is not None:
            self._gauges.ranks = self._rank_peers.stats()
        self._memory.observe()

    def new_batch(self) -> Batch:
        """Return an empty batch for this model."""
        if self._rank_peers is not None:
            return self._rank_peers.batch(self._loaded.model, self._loaded.eos_ids, self.cache, self._loaded.plan.mode)
        loaded, drafter, encoder = self._loaded, self._drafter, self._encoder
        more = (drafter, loaded.vision, encoder, loaded.table_rows, loaded.pass_tokens)
        return Batch(loaded.model, loaded.eos_ids, self.cache, loaded.plan.mode, *more)


def _loop_failed(error: Exception) -> StepFailed:
    return StepFailed(Code.WORKER_DIED, "the model's step loop failed", detail=repr(error))

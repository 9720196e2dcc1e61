"""Follower of a group: a rank that replays rank 0's plans on its part of the model."""

import logging
import os
import socket
import time
from dataclasses import replace
from typing import Any, Final, assert_never

import mlx.core as mx
import psutil
import zmq

from protocol import group
from protocol.failures import Code, ExitStatus, Failure
from protocol.from_worker import Goodbye, RankInfo
from protocol.spec import WorkerSpec
from protocol.to_worker import SetMemory, Shutdown
from worker.engine.batch import Batch
from worker.engine.load_checks import silent_row
from worker.engine.row import Row, RowQuestions
from worker.errors import LoadFailed, PartnerLost, WorkerError, is_fabric_fault
from worker.group import rank_agreement
from worker.group.rank_agreement import Identity, extend_checksum, identity_of, measured
from worker.group.rank_heartbeats import LINGER_MS, FollowerWatch, RankProgress, RankSockets
from worker.kv.quantized import make_caches
from worker.kv.spans_and_checkpoints import KvLayout
from worker.model import loader, memory
from worker.model.batch_mode import BatchMode
from worker.model.loader import resolve
from worker.model.rank_split import Division
from worker.prefix_cache.cache_and_eviction import PrefixCache
from worker.prefix_cache.radix_tree import TokenCost

log = logging.getLogger("mlxd.worker")

_POLL_MS: Final = 250
# MLX's memory may exceed a rank's limit by the limit divided by this number, for temporary arrays of a step.
_SPILL_DIVISOR: Final = 8
# Maximum time in seconds until an earlier process of this rank has ended and its memory is free.
_FREE_MEMORY_TIMEOUT_S: Final = 10.0


def follow(follower: "Follower") -> int:
    """Run a follower to its end; return its exit status."""
    try:
        follower.run()
    except Exception as error:  # a follower must report any error before it ends
        failure, status = _end(error)
        log.error("the rank ends: %s %s", failure.message, failure.detail)
        follower.fail(failure)
        return status
    follower.close()
    return ExitStatus.OK


def _end(error: Exception) -> tuple[Failure, int]:
    match error:
        case LoadFailed():
            return error.failure, error.exit_status
        case PartnerLost():
            return error.failure, ExitStatus.PARTNER_LOST
        case WorkerError(failure=failure):
            return Failure(Code.WORKER_DIED, failure.message, failure.detail), ExitStatus.INTERNAL
        case _ if is_fabric_fault(error):
            return Failure(
                Code.WORKER_DIED, "the connection to another rank was lost", repr(error)
            ), ExitStatus.PARTNER_LOST
        case _:
            log.exception("the rank failed")
            return Failure(Code.WORKER_DIED, "the rank failed", repr(error)), ExitStatus.INTERNAL


class Follower:
    """Rank other than rank 0. Everything except its watch thread runs on the main thread."""

    def __init__(self, spec: WorkerSpec) -> None:
        assert spec.rank is not None
        assert spec.group is not None
        rank = spec.rank
        self._spec, self._rank, self._group = spec, rank, spec.group
        self._progress = RankProgress(rank.first_s)
        self._sockets = RankSockets(rank)
        self.watch = FollowerWatch(rank, self._sockets, self._progress, _lost)
        self._socket = self._sockets.connect(rank.plan)
        self._limit_bytes = spec.memory_bytes // spec.group.beside(rank.rank) if spec.group.is_remote(rank.rank) else 0
        self.crc = 0
        self._is_leaving = False
        self._rows: dict[int, Row] = {}
        # The fields below are set when the model is loaded.
        self._model: Any
        self._eos_ids: tuple[int, ...] = ()
        self._layout: KvLayout
        self._grant: memory.MemoryGrant
        self.cache: PrefixCache
        self._batch: Batch

    def run(self) -> None:
        """Follow rank 0 until it ends the group. Raises the error that ends this rank."""
        self.watch.start()
        self._load()
        while not self._is_leaving:
            message = self._receive()
            if not isinstance(message, group.TickPlan):
                raise PartnerLost(f"rank 0 sent {type(message).__name__} out of turn")
            self.do(message)

    def fail(self, failure: Failure) -> None:
        """Send rank 0 the reason why this rank ends."""
        self.watch.fail(Goodbye(self._spec.epoch, "the rank ends", failure))

    def close(self) -> None:
        """Leave the group after the last message is sent."""
        if self.watch.close():
            self._socket.close(LINGER_MS)
            self._sockets.close()

    # -- start -------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        spec, rank = self._spec, self._rank
        memory.prepare_load()
        identity = self.identity()
        if self._group.is_remote(rank.rank):
            self._check_free_memory()
        node, device = self._group.nodes[rank.rank], str(mx.default_device())
        info = RankInfo(rank.rank, node, socket.gethostname(), os.getpid(), device)
        links = rank_agreement.own_links(spec)
        join = group.JoinGroup(spec.epoch, info, identity.versions, identity.form, links)
        end = time.monotonic() + rank.join_s
        while not self._socket.poll(_POLL_MS, zmq.POLLOUT):
            if time.monotonic() > end:
                raise PartnerLost(f"rank 0 cannot be reached at {rank.plan}")
        self._socket.send(group.encode(join))
        go = self._receive()
        if not isinstance(go, group.StartLoading):
            raise PartnerLost(f"rank 0 sent {type(go).__name__} out of turn")
        division = Division(rank_agreement.connect(go, spec), go.parallel)
        loaded = self.load_part(division)
        memory.give_back()
        if self._limit_bytes and loaded.weights_bytes > self._limit_bytes:
            raise LoadFailed(Code.OUT_OF_MEMORY, self._exceeds("the weights of its part take", loaded.weights_bytes))
        self._model, self._eos_ids = loaded.model, loaded.eos_ids
        self._layout = KvLayout.of(lambda: make_caches(self._model))
        self._grant = memory.MemoryGrant(spec, loaded.weights_bytes)
        self._grant.enforce(self._grant.limits())
        answer = group.RankLoaded(loaded.weights_bytes, self._layout.needs_checkpoints)
        self._socket.send(group.encode(answer))

    def _check_free_memory(self) -> None:
        """Check that the weights of this rank's part fit the machine, where no gateway plans memory. Raises
        `LoadFailed`."""
        need = loader.check_weights(resolve(self._spec.path)) // self._group.size
        end = time.monotonic() + _FREE_MEMORY_TIMEOUT_S
        while (free := psutil.virtual_memory().available) < need:
            if time.monotonic() > end:
                why = f"the weights of its part take {need >> 20} MiB, and {free >> 20} MiB are free on this machine"
                raise LoadFailed(Code.OUT_OF_MEMORY, why)
            time.sleep(_POLL_MS / 1e3)

    def load_part(self, division: Division) -> loader.LoadedModel:
        """Load this rank's part of the model. Raises `LoadFailed`."""
        return loader.load(self._spec, lambda _stage, _done, _total: None, division)

    def identity(self) -> Identity:
        """Return this rank's identity. Raises `LoadFailed`."""
        return identity_of(self._spec)

    def _receive(self) -> group.Down:
        """Receive the next message. There is no timeout: the watch thread ends this process if rank 0 is gone."""
        while not self._socket.poll(_POLL_MS):
            pass
        return group.decode_down(self._socket.recv())

    # -- plans -------------------------------------------------------------------------------------------------------

    def do(self, plan: group.TickPlan) -> None:
        """Run one plan. Raises `PartnerLost` if the tokens of this rank differ from those of rank 0."""
        if plan.crc != self.crc:  # no collective has begun, so rank 0 does not send any token of this plan
            raise PartnerLost(f"out of step before plan {plan.seq}")
        self.watch.begin(plan.seq)
        began = time.perf_counter()
        for op in plan.ops:
            self._act(op)
        if plan.chunk:
            self._step(plan)
        self._progress.end()
        step_us = int((time.perf_counter() - began) * 1e6)
        active = mx.get_active_memory()
        if self._limit_bytes and active > self._limit_bytes + self._limit_bytes // _SPILL_DIVISOR:
            raise PartnerLost(self._exceeds("it takes", active))
        done = group.PlanDone(plan.seq, self.crc, step_us, active)
        self._socket.send(group.encode(done))

    def _exceeds(self, action: str, size_bytes: int) -> str:
        name, rank = self._spec.name, self._rank.rank
        given = f"the model's memory gives it {self._limit_bytes >> 20}"
        return f"rank {rank} of {name}: {action} {size_bytes >> 20} MiB, and {given}"

    def _step(self, plan: group.TickPlan) -> None:
        output = self._batch.step(plan.chunk, is_fused=plan.is_fused)
        self.crc = extend_checksum(self.crc, output.tokens)
        for _, scores in (*output.scoring, *output.scored):
            scores.take()  # the followers drop these scores, because rank 0 has its own
        for token in output.tokens:
            if token.ended is not None:
                del self._rows[token.row.rid]
            if token.ended != "stop":
                token.row.output.append(token.id)

    def _act(self, op: group.Op) -> None:
        match op:
            case group.BeginGroup(mode, cache_bytes, needs_checkpoints):
                self._layout = replace(self._layout, is_checkpointed=needs_checkpoints)
                self.cache = PrefixCache(self._layout, cache_bytes)
                self._batch = Batch(self._model, self._eos_ids, self.cache, BatchMode(mode))
                self._rows = {}
            case group.InsertRow():
                self._insert(op)
            case group.RemoveRow(rid):
                self._batch.remove(self._rows.pop(rid))
            case group.ResizeCache(cache_bytes, token_bytes, state_bytes, arrays):
                token_cost = TokenCost(token_bytes, state_bytes, arrays) if token_bytes or state_bytes else None
                self.cache.resize(cache_bytes, token_cost)
            case group.ClearCache():
                self.cache.clear()
            case group.StoreEnded():
                self._batch.store_ended()
            case SetMemory():
                self._measure(op)
            case Shutdown():
                self._is_leaving = True
                self._batch.close()
            case _:
                assert_never(op)

    def _insert(self, op: group.InsertRow) -> None:
        row = silent_row(op.rid, op.prompt, op.max_tokens, ignore_eos=op.ignore_eos, stop_ids=op.stop_ids)
        row.output, row.boundaries, row.cache_salt = op.output, op.boundaries, op.salt
        row.report.scored_top = op.top
        row.questions = RowQuestions(op.questions, op.slices) if op.questions else None
        self._batch.insert(row)
        reused = row.sequence.reused if row.sequence is not None else 0
        if reused != op.reused:
            raise PartnerLost(f"{reused} tokens of a prompt are cached here, and {op.reused} on rank 0")
        self._rows[op.rid] = row

    def _measure(self, order: SetMemory) -> None:
        cost = self._batch.kv_cost
        if cost is None:
            raise PartnerLost("the group was asked for its memory before a row had run")
        limits = self._grant.change(order)
        self._grant.enforce(limits)
        self._socket.send(group.encode(measured(self._layout, cost, limits)))


def _lost(failure: Failure, status: int) -> None:
    """End the process at once, because its main thread may wait in native code forever."""
    log.error("the group is lost: %s %s", failure.message, failure.detail)
    os._exit(status)

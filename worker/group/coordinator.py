"""Coordinator of a group, on rank 0: gathers the followers, sends plans, and waits until the followers have done
them.

Batch and prefix cache of rank 0, which record their operations for the followers.
"""

import logging
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar

import mlx.core as mx
import msgspec
import zmq

from protocol import group
from protocol.codec import MalformedFrame
from protocol.failures import Code
from protocol.from_worker import GroupInfo, RankInfo
from protocol.group import (
    RING,
    BeginGroup,
    ClearCache,
    InsertRow,
    Op,
    RemoveRow,
    ResizeCache,
    StoreEnded,
    indivisible_reason,
)
from protocol.group import resolve as divided
from protocol.spec import WorkerSpec
from protocol.stats import RankStats
from protocol.to_worker import SetMemory, Shutdown
from worker.engine.batch import Batch
from worker.engine.output import StepOutput
from worker.engine.row import BatchSequence, Token
from worker.engine.scheduling.kv_budget import KvCost
from worker.errors import LoadFailed, PartnerLost, StepFailed, is_fabric_fault
from worker.group import rank_agreement
from worker.group.rank_agreement import (
    Identity,
    costliest,
    extend_checksum,
    identity_of,
    measured,
    mismatch,
    tightest,
    token_cost,
)
from worker.group.rank_heartbeats import LeadWatch, Lost, RankProgress, RankSockets
from worker.kv.spans_and_checkpoints import KvLayout
from worker.model import memory
from worker.model.batch_mode import BatchMode
from worker.model.loader import read_config, resolve
from worker.model.memory import AllocationLimits
from worker.model.rank_split import Division
from worker.prefix_cache.cache_and_eviction import PrefixCache
from worker.prefix_cache.radix_tree import TokenCost

log = logging.getLogger("mlxd.worker")


class Planner(Protocol):
    """Port to the plans of rank 0, owned by the engine thread. `token_cost` is the cost of cached prefixes."""

    token_cost: TokenCost | None

    def note(self, op: Op) -> None:
        """Record an operation, which followers execute with the next plan."""
        ...

    def begin(self, chunk: int, *, is_fused: bool) -> None:
        """Send the next plan, whose tick also runs on rank 0 now."""
        ...

    def confirm(self, tokens: Sequence[Token]) -> None:
        """Wait until all ranks have done the plan. Raises `PartnerLost` if a rank has generated other tokens."""
        ...


class PlannedCache(PrefixCache):
    """Prefix cache of rank 0, which records its operations for the followers."""

    def __init__(self, layout: KvLayout, budget: int, planner: Planner) -> None:
        super().__init__(layout, budget)
        self._planner = planner

    def resize(self, budget: int, token_cost: TokenCost | None = None) -> None:
        token_cost = self._planner.token_cost
        if token_cost is None:
            self._planner.note(ResizeCache(budget))
        else:
            self._planner.note(ResizeCache(budget, token_cost.token_bytes, token_cost.state_bytes, token_cost.arrays))
        super().resize(budget, token_cost)

    def clear(self) -> None:
        self._planner.note(ClearCache())
        super().clear()


class PlannedBatch(Batch):
    """Batch of rank 0, which records its operations for the followers."""

    def __init__(
        self, model: Any, eos_ids: Sequence[int], cache: PrefixCache, mode: BatchMode, planner: Planner
    ) -> None:
        planner.note(BeginGroup(mode, cache.budget, cache.needs_checkpoints))
        self._planner = planner
        super().__init__(model, eos_ids, cache, mode)

    def _enter(self, sequence: BatchSequence) -> None:
        row = sequence.row
        insert = InsertRow(
            row.rid,
            row.prompt,
            row.output,
            row.max_tokens,
            sequence.reused,
            row.sampling.ignore_eos and row.rule is None,
            row.sampling.stop_ids,
            row.boundaries,
            row.cache_salt,
            row.report.scored_top,
            list(row.questions.left) if row.questions is not None else [],
            list(row.questions.slices) if row.questions is not None else [],
        )
        self._planner.note(insert)
        super()._enter(sequence)

    def _take_out(self, sequence: BatchSequence) -> list[int]:
        self._planner.note(RemoveRow(sequence.row.rid))
        return super()._take_out(sequence)

    def store_ended(self) -> None:
        if self._ended:
            self._planner.note(StoreEnded())
        super().store_ended()

    def _begin(self, chunk: int, *, is_fused: bool) -> None:
        self._planner.begin(chunk, is_fused=is_fused)

    def step(self, chunk: int, *, is_fused: bool = True, reads: int = 0) -> StepOutput:
        """Run one step of all ranks. Tokens are returned only after all ranks have generated them."""
        try:
            output = super().step(chunk, is_fused=is_fused, reads=reads)
        except StepFailed:
            raise
        except Exception as error:  # any error of MLX means that the ranks differ in their state
            if is_fabric_fault(error):
                raise PartnerLost("the connection between the ranks of the group was lost", repr(error)) from error
            raise StepFailed(Code.WORKER_DIED, "the group's step failed", detail=repr(error)) from error
        self._planner.confirm(output.tokens)
        return output


# A wait consists of short polls, so that signals are handled between them.
_POLL_MS: Final = 250
_Answer = TypeVar("_Answer", group.JoinGroup, group.RankLoaded, group.RankMemory, group.PlanDone)


def open_group(spec: WorkerSpec, lost: Lost) -> tuple["Coordinator", Division]:
    """Gather a group and connect its ranks, on rank 0. Raises `LoadFailed` and `PartnerLost`."""
    assert spec.group is not None
    identity = identity_of(spec)
    config = read_config(resolve(spec.path))
    parallel, backend = divided(config, spec.group.parallel, spec.group.backend, has_cuda=mx.cuda.is_available())
    if reason := indivisible_reason(config, parallel, spec.group.size, backend):
        raise LoadFailed(Code.BAD_CONFIG, reason)
    lead = Coordinator(spec, lost)
    return lead, lead.gather(identity, parallel, backend)


class Coordinator:
    """Coordinator of the followers, owned by the engine thread; `lost` ends the process from any thread."""

    def __init__(self, spec: WorkerSpec, lost: Lost) -> None:
        assert spec.group is not None
        assert spec.rank is not None
        self._spec, self._group, self._rank = spec, spec.group, spec.rank
        self._followers: Final = range(1, self._group.size)
        self._progress = RankProgress(self._rank.first_s)
        self._sockets = RankSockets(self._rank)
        self._socket = self._sockets.bind(self._rank.plan)
        self._watch = LeadWatch(self._rank, self._group.nodes, self._sockets, self._progress, lost)
        self._joined: dict[int, group.JoinGroup] = {}
        self._loaded: dict[int, group.RankLoaded] = {}
        self._done: dict[int, group.PlanDone] = {}
        self._parallel, self._backend = self._group.parallel, self._group.backend
        self._ops: list[group.Op] = []
        self._seq = 0
        self._crc = 0
        self._layout: KvLayout | None = None
        # Cost of cached prefixes; None if the cost is equal on all ranks.
        self.token_cost: TokenCost | None = None
        # Answers that arrived before the coordinator waited for them.
        self._early: list[tuple[int, group.Up]] = []
        self._load_ends = 0.0
        self._watch.start()

    # -- start -------------------------------------------------------------------------------------------------------

    def gather(self, identity: Identity, parallel: str, backend: str) -> Division:
        """Wait for all followers, and connect to them. Raises `LoadFailed` if one does not match."""
        self._parallel, self._backend = parallel, backend
        deadline = time.monotonic() + self._rank.join_s
        self._joined = self._await(group.JoinGroup, deadline, "join")
        for rank, join in sorted(self._joined.items()):
            if failure := mismatch(identity, join, self._name(rank), self._spec.epoch):
                raise failure
        if silent := self._watch.absent(deadline - time.monotonic()):
            raise PartnerLost(f"{self._names(silent)} joined, and cannot be heard at {self._rank.watch}")
        links = (rank_agreement.own_links(self._spec), *(join.links for _, join in sorted(self._joined.items())))
        coordinator = "" if backend == RING else rank_agreement.own_links(self._spec)[0]
        go = group.StartLoading(backend, parallel, links, coordinator)
        self._send_all(group.encode(go))
        connected = rank_agreement.connect(go, self._spec)
        self._load_ends = time.monotonic() + self._rank.load_s
        log.info(
            "group of %d by %s, %s parallel: without drafts, media, adapters, packed passes, and prefixes on disk",
            self._group.size,
            backend,
            parallel,
        )
        return Division(connected, parallel)

    # -- rank peers of the engine --------------------------------------------------------------------------------------

    def cache(self, layout: KvLayout, budget: int) -> PrefixCache:
        if not self._loaded:
            self._loaded = self._await(group.RankLoaded, self._load_ends, "load its part")
        needs = layout.needs_checkpoints or any(each.needs_checkpoints for each in self._loaded.values())
        self._layout = replace(layout, is_checkpointed=needs)
        return PlannedCache(self._layout, budget, self)

    def batch(self, model: Any, eos_ids: Sequence[int], cache: PrefixCache, mode: BatchMode) -> Batch:
        return PlannedBatch(model, eos_ids, cache, mode, self)

    def least(self, order: SetMemory, cost: KvCost, limits: AllocationLimits) -> tuple[KvCost, AllocationLimits]:
        assert self._layout is not None
        self._ops.append(order)
        self.begin(0)
        answers = self._await(group.RankMemory, math.inf, "measure its memory")
        self._await_done()
        ranks = [measured(self._layout, cost, limits), *answers.values()]
        self.token_cost = token_cost(ranks)
        return costliest(ranks), tightest(limits, ranks)

    def stats(self) -> tuple[RankStats, ...]:
        own = RankStats(memory.measure().active, int(self._progress.longest_s * 1e6))
        return (own, *(RankStats(done.memory, done.step_us) for _, done in sorted(self._done.items())))

    def leave(self) -> None:
        """Leave the group. The call fails neither for a follower that is already gone nor for a follower that hangs."""
        self._watch.leave()
        self._ops.append(Shutdown())
        gone = self._unreached(self._next_plan(0))
        others = [rank for rank in self._followers if rank not in gone]
        with suppress(PartnerLost, LoadFailed):
            self._await(group.PlanDone, time.monotonic() + self._rank.leave_s, "leave", others)
        self.close()

    def close(self) -> None:
        self._watch.close()
        self._socket.close()
        self._sockets.close()

    def info(self, own_bytes: int) -> GroupInfo:
        """Return facts about the ranks for the gateway; `own_bytes` is the size of rank 0's weights."""
        own = RankInfo(0, self._name(0), shard_bytes=own_bytes)
        others = (
            msgspec.structs.replace(join.info, shard_bytes=self._loaded[rank].shard_bytes)
            for rank, join in sorted(self._joined.items())
        )
        return GroupInfo(self._parallel, self._backend, (own, *others))

    # -- plans -------------------------------------------------------------------------------------------------------

    def note(self, op: group.Op) -> None:
        self._ops.append(op)

    def begin(self, chunk: int, *, is_fused: bool = True) -> None:
        self._send_all(self._next_plan(chunk, is_fused=is_fused))

    def confirm(self, tokens: Sequence[Token]) -> None:
        self._crc = extend_checksum(self._crc, tokens)
        self._await_done()

    def _await_done(self) -> None:
        self._progress.finish()
        self._done = self._await(group.PlanDone, math.inf, f"do plan {self._seq}")
        self._progress.end()
        for rank, done in self._done.items():
            if (done.seq, done.crc) != (self._seq, self._crc):
                raise PartnerLost(f"rank {rank} ({self._name(rank)}) is out of step at plan {self._seq}")

    def _next_plan(self, chunk: int, *, is_fused: bool = True) -> bytes:
        """Begin the next plan and return its frame."""
        self._seq += 1
        ops, self._ops = self._ops, []
        self._watch.begin(self._seq)
        return group.encode(group.TickPlan(self._seq, self._crc, ops, chunk, is_fused))

    def _send_all(self, frame: bytes) -> None:
        """Send a frame to all followers. Raises `PartnerLost` if some could not be reached."""
        if gone := self._unreached(frame):
            raise PartnerLost(f"{self._names(gone)} cannot be reached")

    def _unreached(self, frame: bytes) -> list[int]:
        """Send a frame to all followers. Return the followers without a connection."""
        gone: list[int] = []
        for rank in self._followers:
            try:
                self._socket.send_multipart((group.identity(rank), frame), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                log.info("rank %d (%s) cannot be reached: %s", rank, self._name(rank), error)
                gone.append(rank)
        return gone

    def _await(
        self, kind: "type[_Answer]", deadline: float, action: str, ranks: Sequence[int] | None = None
    ) -> "dict[int, _Answer]":
        """Return one answer from each of these ranks, by default from each follower.

        Without a deadline, only the watch thread ends the wait: it distinguishes a slow group from a stuck one.
        """
        answers: dict[int, _Answer] = {}
        early, self._early = self._early, []
        for rank, message in early:
            self._store(rank, message, kind, answers)
        while absent := [rank for rank in (self._followers if ranks is None else ranks) if rank not in answers]:
            left_ms = (deadline - time.monotonic()) * 1e3
            if left_ms <= 0:
                raise PartnerLost(f"{self._names(absent)} did not {action} in time")
            if self._socket.poll(int(min(left_ms, _POLL_MS)) or 1):
                self._receive(kind, answers)
        return answers

    def _store(self, rank: int, message: group.Up, kind: "type[_Answer]", answers: "dict[int, _Answer]") -> None:
        """Store an answer that is awaited now, or one that will be awaited later. Raises `PartnerLost` for a
        duplicate."""
        is_waited_for = isinstance(message, kind)
        if rank in answers if is_waited_for else any((rank, type(message)) == (by, type(m)) for by, m in self._early):
            name = type(message).__name__
            raise PartnerLost(f"rank {rank} ({self._name(rank)}) sent {name} twice; it is out of step")
        if isinstance(message, kind):
            answers[rank] = message
        else:
            self._early.append((rank, message))

    def _receive(self, kind: "type[_Answer]", answers: "dict[int, _Answer]") -> None:
        """Receive the next message and store it if a follower sent it."""
        sender, *_, frame = self._socket.recv_multipart()
        rank = int.from_bytes(sender, "big")
        if rank not in self._followers:
            log.warning("dropped a frame under the rank %d, which is none of the group's followers", rank)
            return
        try:
            message = group.decode_up(frame)
        except MalformedFrame as error:
            text = f"rank {rank} ({self._name(rank)}) is of another version of mlxd"
            raise LoadFailed(Code.INCOMPATIBLE, text, detail=str(error)) from error
        self._store(rank, message, kind, answers)

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {rank} ({self._name(rank)})" for rank in ranks)

    def _name(self, rank: int) -> str:
        return self._group.nodes[rank]

"""World of one seed: an engine, its clients and its faults, driven tick by tick through the engine's inbox."""
# pyright: reportPrivateUsage=false

import hashlib
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from protocol.failures import Code
from protocol.from_worker import Accepted, Delta, Finish, Rejected, Step, Up, Usage
from protocol.spec import WorkerSpec
from protocol.to_worker import Abort, Generate, SetMemory, Shutdown, TokensPrompt
from tests.simulation.engine.machine import (
    DISK_MIN_TOKENS,
    MEMORY_FOLDER,
    NO_MEMORY,
    Clock,
    SeededPacer,
    TurnDisk,
    TurnEngine,
    intake_of,
    machine,
    model_of,
)
from tests.simulation.engine.rates import DraftKind, Rates
from tests.simulation.engine.requests import BLOCK_SEEDS, KINDS, Answer, request_of, sent
from tests.support.disk import files
from tests.support.engine import spec
from tests.support.models import VOCAB, Breakable
from tests.support.prefix_checks import check_cache
from tests.worker.structured.test_drafted_rows import Free
from worker.engine.gauges import Gauges
from worker.engine.inbox import Command, EngineInbox
from worker.engine.row import Row
from worker.prompt.limits_and_truncation import is_restricted
from worker.speculation.drafter import Drafter
from worker.speculation.policy import Speculator
from worker.tools.verify.verifier import NoisyDrafts

# Ticks after which a row that could run, or a world without new tokens, counts as stuck.
PATIENCE_TICKS = 40
MAX_TICKS = 4000
# Failed allocations beyond this number in five minutes end a worker by design; so does a second broken step in one.
MAX_NO_MEMORY = 3


class WorkerDeath(Exception):
    """Death of the simulated worker; its successor resumes what has not ended."""


@dataclass(slots=True)
class Client:
    """Client of one request, and what it got. `had` are the ids and the text that earlier workers sent."""

    rid: int
    kind: int
    request: Generate
    ids: list[int] = field(default_factory=list)
    text: str = ""
    ending_ids: tuple[int, ...] = ()
    finish: Finish | None = None
    usage: Usage | None = None
    code: Code | None = None
    ends: int = 0
    is_aborted: bool = False
    is_early_aborted: bool = False

    def answer(self) -> Answer:
        assert self.usage is not None
        assert self.finish is not None
        ids, usage = tuple(self.ids), self.usage
        return Answer(ids, self.ending_ids, self.text, self.finish.name, usage.prompt, usage.completion)


class TurnInbox(EngineInbox):
    """Inbox whose `receive`, called at the start of each tick, asks the world for the commands of the tick."""

    def __init__(self, turn: Callable[[], list[Command]]) -> None:
        super().__init__()
        self._turn = turn

    def put(self, command: Command) -> None:
        """Ignore wake-ups: no tick blocks."""

    def receive(
        self, idle_s: float | None = None, *, is_idle: bool, is_waiting: bool, rest_s: float = 0.0
    ) -> list[Command]:
        return self._turn()


class Worker:
    """One life of the engine. `turn` is called before each tick and `receive` for each message."""

    def __init__(
        self, architecture: str, settings: WorkerSpec, turn: Callable[[], list[Command]], receive: Callable[[Up], None],
        drafter: Drafter | None = None,
    ) -> None:  # fmt: skip
        loaded = model_of(architecture)
        self.model = Breakable(loaded.model)
        self.gauges = Gauges()
        self.intake = intake_of(architecture)
        loaded = replace(loaded, model=self.model)
        self.engine = TurnEngine(loaded, settings, TurnInbox(turn), receive, self.gauges, self.intake.writer, drafter)
        self.engine.warm_up(list(range(8)))


@cache
def answers_alone(architecture: str, block: int) -> list[Answer]:
    """Return the answers of all requests of a block, by their kinds, without cache, drafts or faults.

    The engine is empty when it gets the next one.
    """
    clients = {kind + 1: Client(kind + 1, kind, sent(request_of(block, kind), kind + 1)) for kind in range(KINDS)}
    waiting = list(clients.values())
    clock, ticks = Clock(), 0

    def turn() -> list[Command]:
        nonlocal ticks
        ticks += 1
        assert ticks < MAX_TICKS, "a request alone does not end"
        if worker.engine._requests:
            return []
        return [_row(worker, waiting.pop(0).request, clock)] if waiting else [Shutdown()]

    with machine(clock, 256):
        settings = spec(model_of(architecture).path, cache_bytes=0, kv_bytes=1 << 30, speculate="off")
        worker = Worker(architecture, settings, turn, lambda message: _take(clients, message))
        worker.engine.run()
    return [client.answer() for client in clients.values()]


def alone(architecture: str, block: int, kind: int) -> Answer:
    return answers_alone(architecture, block)[kind]


def _row(worker: Worker, request: Generate, clock: Clock) -> Row:
    row = worker.intake.row(request, clock.now)
    if is_restricted(request):
        worker.intake.rules.restrict(row, request)
    return row


def _take(clients: dict[int, Client], message: Up) -> None:
    match message:
        case Rejected():
            client = clients[message.rid]
            assert client.ends == 0, f"request {client.rid} is rejected after its end"
            client.ends, client.code, client.finish = 1, message.failure.code, Finish.ERROR
        case Step():
            for delta in message.deltas:
                _take_delta(clients[delta.rid], delta)
        case _:
            pass


def _take_delta(client: Client, delta: Delta) -> None:
    assert client.ends == 0, f"request {client.rid} gets a delta after its end"
    client.ids += delta.token_ids
    client.text += delta.text
    if delta.finish is None:
        return
    client.ends, client.finish, client.usage = 1, delta.finish, delta.usage
    client.ending_ids = tuple(delta.ending_ids)
    client.code = delta.failure.code if delta.failure is not None else None


class World:
    """Engine, clients and faults of one seed; `run` raises AssertionError where a promise is broken."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(f"engine {seed}")
        self.rates = Rates.of(self.rng)
        self.clock = Clock()
        self.clients: dict[int, Client] = {}
        self.trace = hashlib.sha256()
        self.counts: Counter[str] = Counter()
        self._ticks = self._life_ticks = 0
        self._no_memory = 0
        self._broken_at = float("-inf")
        self._progress = self._progress_at = 0
        # Draws that others do not depend on.
        self._mask_rng = random.Random(f"masks {seed}")
        self._late_masks = self._mask_rng.choice((0.0, 0.0, 0.1, 0.5))
        self._free: tuple[int, int] = 0, 0
        # Number of faults of steps until the newest check.
        self._faults = 0
        self._quiet = self._stalled = 0
        # Requests that are still in the intake although the client has gone.
        self._late: list[Row] = []
        self._worker: Worker

    def run(self) -> str:
        """Run to the end. Returns the digest of all events."""
        with machine(self.clock, self.rates.reserved_tokens), tempfile.TemporaryDirectory(dir=MEMORY_FOLDER) as folder:
            self._folder = Path(folder)
            while True:
                try:
                    self._live()
                    break
                except WorkerDeath:
                    self.counts["deaths"] += 1
        self._judge_all()
        return self.trace.hexdigest()[:16]

    # -- one life ----------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        rates = self.rates
        drafter = self._new_drafter()
        settings = spec(
            model_of(rates.architecture).path,
            max_running=rates.max_running,
            max_waiting=rates.max_waiting,
            prefill_chunk=rates.prefill_chunk,
            cache_bytes=rates.cache_bytes,
            kv_bytes=1 << 30,
            speculate="auto" if rates.drafts is DraftKind.LOOKUP else "off",
            **(
                {"disk_cache_dir": str(self._folder), "disk_cache_bytes": 1 << 22, "disk_cache_tokens": DISK_MIN_TOKENS}
                if rates.has_disk
                else {}
            ),
        )
        self._life_ticks = self._no_memory = 0
        self._worker = Worker(rates.architecture, settings, self._turn, self._receive, drafter)
        engine = self._worker.engine
        engine.pacer = SeededPacer(settings, self.rng)
        engine.draw_late = self._draw_late
        self._kv_bytes = int(rates.kv_rows * engine.kv_cost.bytes(1, 128))
        engine.run()

    def _draw_late(self) -> int:
        if self._mask_rng.random() >= self._late_masks:
            return 0
        self.counts["late masks"] += 1
        return self._mask_rng.choice((1, 1, 2, 5))

    def _new_drafter(self) -> Drafter | None:
        match self.rates.drafts:
            case DraftKind.OFF:
                return None
            case DraftKind.LOOKUP:
                lookup = Speculator()
                lookup.costs = Free()
                return lookup
            case DraftKind.NOISY:
                noisy = NoisyDrafts(VOCAB, seed=self.seed)
                for kind in range(KINDS):
                    prompt = request_of(self.seed // BLOCK_SEEDS, kind).prompt
                    assert isinstance(prompt, TokensPrompt)
                    noisy.learn([*prompt.ids, *alone(self.rates.architecture, self.seed // BLOCK_SEEDS, kind).ids])
                return noisy

    def _receive(self, message: Up) -> None:
        match message:
            case Step():
                events = [(d.rid, d.text, tuple(d.token_ids), d.finish) for d in message.deltas]
                self.trace.update(repr(events).encode())
                self._progress += len(events)
            case Rejected() | Accepted():
                self.trace.update(repr((type(message).__name__, message.rid)).encode())
                self._progress += 1
            case _:
                pass
        _take(self.clients, message)

    @property
    def _waiting(self) -> list[Client]:
        return [client for client in self.clients.values() if not client.ends]

    def _turn(self) -> list[Command]:
        """Check the state after the tick before, then return the commands of the next tick."""
        engine, rates, rng = self._worker.engine, self.rates, self.rng
        self._ticks += 1
        self._life_ticks += 1
        tick_at = self.clock.now
        self.clock.now += rng.choice((0.001, 0.01, 0.05))
        engine.mask_threads.turn()
        disk = engine.cache.disk
        if isinstance(disk, TurnDisk):
            disk.is_full = rng.random() < rates.disk_full
            disk.turn()
            if rng.random() < rates.torn_file:
                self._tear(disk)
        commands: list[Command] = []
        if self._life_ticks == 1:
            self._late.clear()
            for client in self._waiting:
                if client.is_early_aborted:  # nobody sends the request to the next worker
                    client.ends, client.finish = 1, Finish.ABORT
            commands.append(self._memory_order(1.0, 1.0))
            commands += [self._submit(client) for client in self._waiting]
        else:
            self._check(tick_at)
        if not self._waiting and len(self.clients) == rates.requests:
            self._quiet += 1
            if self._quiet == 3:  # what is freed in the tick after the last answer is free now
                self._check_rest()
                return [Shutdown()]
            return commands
        return commands + self._events()

    def _events(self) -> list[Command]:
        rates, rng, commands = self.rates, self.rng, list[Command]()
        while len(self.clients) < rates.requests and (rng.random() < rates.arrive or not self._waiting):
            newest = self._arrive()
            commands.append(newest)
            if rng.random() < rates.abort:  # an abort that overtakes its request, by any time
                commands.pop()
                self._late.append(newest)
                rid = len(self.clients)
                self.clients[rid].is_aborted = self.clients[rid].is_early_aborted = True
                commands.append(Abort((rid,)))
                self.counts["early aborts"] += 1
        if self._late and rng.random() < 0.2:
            self.clock.now += 40.0
        elif self._late and rng.random() < 0.5:
            commands.append(self._late.pop())
        if self._waiting and rng.random() < rates.abort:
            victim = rng.choice(self._waiting)
            victim.is_aborted = True
            commands.append(Abort((victim.rid,)))
            self.counts["aborts"] += 1
        if rng.random() < rates.kv_change:
            commands.append(self._memory_order(rng.choice((0.5, 0.7, 1.0, 1.0)), rng.choice((0.0, 0.5, 1.0))))
            self.counts["memory orders"] += 1
        if rng.random() < rates.eviction:
            self._worker.engine.cache.clear()
        model = self._worker.model
        if rng.random() < rates.no_memory and self._no_memory < MAX_NO_MEMORY and not model.faults:
            self._no_memory += 1
            model.faults, model.words = 1, NO_MEMORY
            self.counts["failed allocations"] += 1
        elif rng.random() < rates.broken_step and self.clock.now - self._broken_at > 60 and not model.faults:
            self._broken_at = self.clock.now
            model.faults, model.words = 1, "a step failed"
            self.counts["broken steps"] += 1
        if self._life_ticks > 2 and rng.random() < rates.death and self.counts["deaths"] < 3:
            raise WorkerDeath
        return commands

    def _memory_order(self, kv_part: float, cache_part: float) -> SetMemory:
        """An order whose part of the 1 GiB for KV is this part of the world's own budget."""
        return SetMemory(1 << 40, kv_part * self._kv_bytes / (1 << 30), cache_part)

    def _tear(self, disk: TurnDisk) -> None:
        """Cut, damage, delete or make unreadable one file of the disk cache, whose KV may be gone from memory."""
        names = sorted(files(self._folder))
        if not names:
            return
        self.counts["torn files"] += 1
        path = self.rng.choice(names)
        if self.rng.random() < 0.5:
            self._worker.engine.cache.clear()
        match self.rng.randrange(4):
            case 0:
                path.unlink()
            case 1:
                disk.folder.broken = path.name
            case 2:
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            case _:
                content = bytearray(path.read_bytes())
                begin = self.rng.randrange(len(content))
                content[begin : begin + 256] = bytes(len(content[begin : begin + 256]))
                path.write_bytes(content)

    def _arrive(self) -> Row:
        rid, kind = len(self.clients) + 1, self.rng.randrange(KINDS)
        block = self.seed // BLOCK_SEEDS
        deadline_ms = self.rng.choice((50, 500)) if self.rng.random() < self.rates.deadline else 0
        request = sent(request_of(block, kind), rid, deadline_ms=deadline_ms)
        client = self.clients[rid] = Client(rid, kind, request)
        expected = alone(self.rates.architecture, block, kind)
        if len(expected.ids) > 1 and self.rng.random() < 0.15:  # a worker before this world had begun it
            client.ids += expected.ids[: self.rng.randrange(1, len(expected.ids))]
            self.counts["resumed"] += 1
        return self._submit(client)

    def _submit(self, client: Client) -> Row:
        request = sent(client.request, client.rid, resume=tuple(client.ids), deadline_ms=client.request.deadline_ms)
        return _row(self._worker, request, self.clock)

    # -- promises ----------------------------------------------------------------------------------------------------

    def _check(self, tick_at: float) -> None:
        """Check what must hold after every tick; the last one began at `tick_at`."""
        engine = self._worker.engine
        rows, queue = engine._batch.rows, engine._queue
        check_cache(engine.cache)
        live = {client.rid for client in self._waiting} - {row.rid for row in self._late}
        assert set(engine._requests) == live, "the engine's requests are not those without an end"
        assert {row.rid for row in rows} | {row.rid for row in queue._waiting} == live, "a request is nowhere"
        assert len(rows) + len(queue) == len(live), "a request is in the batch and in the queue"
        assert len(rows) <= engine.max_running
        late = [rid for rid, row in engine._requests.items() if row.deadline is not None and row.deadline <= tick_at]
        assert not late, f"requests {late} go on after their deadlines"
        for row in rows:
            assert row.sequence is not None
            assert row.sequence.row is row
        kv = engine._memory.kv
        if len(rows) > 1:
            # Rows that the next step would take over the limit are preempted before it.
            held = kv.cost.bytes(len(rows), max(row.slots for row in rows))
            assert held <= kv.limit, f"{len(rows)} rows hold {held} bytes of KV, and the limit is {kv.limit}"
        text = repr((self._ticks, [row.rid for row in rows], [len(row.output) for row in rows], len(queue)))
        self.trace.update(text.encode())
        self._check_waits()

    def _check_waits(self) -> None:
        engine = self._worker.engine
        done = sum(row.sequence.prefilled for row in engine._batch.rows if row.sequence is not None)
        if self._progress + done != self._progress_at or not self._waiting:
            self._progress_at, self._stalled = self._progress + done, 0
        else:
            self._stalled += 1
        assert self._stalled < PATIENCE_TICKS, "nothing moves although requests wait"
        assert self._ticks < MAX_TICKS, "the world does not end"
        queue, batch = engine._queue, engine._batch
        rid = 0
        if len(queue) and len(batch) < engine.max_running:
            head = queue.pop()
            queue.put_back([head])
            is_held = batch.is_prefilling_prefix_of(head) or (head.ticket is not None and not head.ticket.is_done)
            if not is_held and engine._memory.kv.admits(batch.rows, head):
                rid = head.rid
        # A step that fails puts its rows back into the queue.
        faults = self.counts["failed allocations"] + self.counts["broken steps"]
        is_same = rid != 0 and rid == self._free[0] and faults == self._faults
        self._free, self._faults = (rid, self._free[1] + 1 if is_same else 0), faults
        assert self._free[1] < 4, f"request {rid} waits for what is free"

    def _check_rest(self) -> None:
        """Check that nothing is left once all requests have ended."""
        engine = self._worker.engine
        assert not engine._batch.rows
        assert not len(engine._queue)
        assert not engine._requests
        assert engine._batch.kv_bytes == 0, "KV of no row"
        assert not engine._batch._ended
        assert not engine._batch._parked
        assert not engine._batch._prefilling
        disk = engine.cache.disk
        assert disk is None or (not disk._reads and disk.queued_bytes == 0), "the disk still owes something"
        self.counts["preemptions"] += self._worker.gauges.preemptions

    def _judge_all(self) -> None:
        for client in self.clients.values():
            assert client.ends == 1, f"request {client.rid} has {client.ends} ends"
            self._judge(client)

    def _judge(self, client: Client) -> None:
        expected = alone(self.rates.architecture, self.seed // BLOCK_SEEDS, client.kind)
        name = f"request {client.rid} (kind {client.kind})"
        match client.finish:
            case Finish.ABORT:
                assert client.is_aborted, f"{name} was aborted by nobody"
            case Finish.ERROR:
                is_late = client.code is Code.DEADLINE_EXCEEDED and client.request.deadline_ms > 0
                is_refused = client.code is Code.BUSY and self.rates.max_waiting < self.rates.requests
                assert is_late or is_refused, f"{name} failed with {client.code}"
            case _:
                assert not client.is_early_aborted, f"{name} was aborted before it came, and was answered"
                answer = client.answer()
                assert answer.ids == expected.ids, f"{name} has ids {answer.ids}, alone {expected.ids}"
                assert expected.text.endswith(answer.text), f"{name} has text {answer.text!r}, alone {expected.text!r}"
                assert replace(answer, text=expected.text) == expected, f"{name} has {answer}, alone {expected}"
                assert client.usage is not None
                assert client.usage.cached < client.usage.prompt
                return
        ids = tuple(client.ids)
        assert ids == expected.ids[: len(ids)], f"{name} has ids {ids} before its end, alone {expected.ids}"

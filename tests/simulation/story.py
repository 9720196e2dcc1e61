"""One seed's story: gateways one after another in one home, requests, operators' commands and faults."""

import asyncio
import contextlib
import json
import logging
import math
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from gateway.access.audit_log import AuditEntry
from gateway.access.key import Key, KeyFile, KeyLimits, KeyRefused, KeysUnusable
from gateway.access.key import _encode as encode_keys  # pyright: ignore[reportPrivateUsage]
from gateway.api.responses.journal import NotUnderstood, parsed
from gateway.config.settings import Config, FallbackConfig, MemoryConfig, ModelConfig, ServerConfig
from gateway.errors import Unavailable
from gateway.link.link import LATE_GRACE_S
from gateway.reload import Reloader
from gateway.state_dir import audit_path, write_private
from gateway.workers.supervisor.state import ModelUnavailable
from protocol.to_worker import ChatPrompt
from tests.simulation.background_client import BackgroundClient, Trouble, draw_background_plan, number_of
from tests.simulation.client import Client, Plan, draw_plan
from tests.simulation.http_call import HttpCall
from tests.simulation.pipelining_client import PipeliningClient, draw_connection
from tests.simulation.simulated_database import DatabaseFaults
from tests.simulation.simulated_disk import QUICK_S, DiskOfProcess, SimulatedDisk
from tests.simulation.simulated_gateway import LATE_S, SimulatedGateway
from tests.simulation.simulated_upstreams import MODEL as UPSTREAM_MODEL
from tests.simulation.simulated_upstreams import NAME as UPSTREAM
from tests.simulation.simulated_upstreams import PATIENCE_S, SimulatedUpstreams, upstream_config
from tests.simulation.virtual_loop import NumberedTask, VirtualLoop
from tests.simulation.world import GIB, Rates, Violated, World

MODELS = ("a", "b", "c")
KEYS = ("alice", "bob")
EVENTS = (
    *("unload", "restart", "load", "reload", "die", "hand over", "terminate"),
    *("key", "disk full", "disk slow", "power", "die writing", "jump", "pressure", "stop"),
)
# Time in which a story's requests and events begin. In a short one they meet; a long one has pauses between them.
SPANS_S = (10.0, 40.0)
# Everything has ended this long after the last request, whatever has happened. Six jumps of the clock count too.
LIVENESS_S = 900.0 + 6 * 400.0
# What is promised stays promised for some turns, and is checked once in so many.
CHECK_TURNS = 16
# A seed takes less than a tenth of a second. One that takes this long waits for something that is not simulated.
WALL_S = 20.0


# What the gateway logs when it ends a worker that is at fault; the first argument is the worker.
REPLACED = frozenset(
    {"worker %s is stuck: %s", "worker %s does not answer its new gateway and is replaced"},
)


# What the gateway logs about a file that it cannot read.
UNREADABLE = frozenset(
    {
        "API keys not reloaded, the previous ones stay in force: %s",
        "%s: %s; usage is counted from now on",
        "%s: %s; its usage is not counted",
        "response store is damaged (%s): it is set aside as %s, and a new one is created",
        "removed a state file that cannot be read, %s: %s",
        "journal %s: its response does not go on: %s",
    }
)
# Journals and state files are not synced, so they may be cut off after a power cut. If a gateway is killed while it
# creates a journal, no client knows the response's id.
UNREADABLE_AFTER_KILL = frozenset({"journal %s: its response does not go on: %s"})
UNREADABLE_AFTER_POWER_CUT = UNREADABLE_AFTER_KILL | {"removed a state file that cannot be read, %s: %s"}


class Hung(KeyboardInterrupt):
    """A seed takes longer than its wall-clock bound. asyncio ends its loop for a KeyboardInterrupt at once."""


def _on_alarm(signum: int, frame: object) -> None:
    raise Hung(f"no end after {WALL_S:.0f} s of real time")


class Faults(logging.Handler):
    """Keeps what the gateway logs that is a defect of it: errors with a traceback, and faults of sound workers."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[str] = []
        self.world: World | None = None
        self.excused: frozenset[str] = frozenset()

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError):
            return  # uvicorn logs the cancelled tasks of a gateway that has ended.
        if record.exc_info is not None:
            self.records.append(logging.Formatter().format(record))
        elif record.msg in UNREADABLE and record.msg not in self.excused:
            self.records.append(record.getMessage())
        elif record.msg in REPLACED and self.world is not None:
            assert isinstance(record.args, tuple)
            self.world.note(f"log {record.getMessage()}")
            if self.world.is_sound(str(record.args[0])):
                self.records.append(f"the worker is sound: {record.getMessage()}")


@dataclass(slots=True)
class Result:
    """Outcome of one seed."""

    seed: int
    digest: str
    trace: list[str]
    faults: dict[str, int]
    turns: int
    virtual_s: float
    failure: BaseException | None = None


def draw_rates(random: Random) -> Rates:
    """Draw how stormy a seed is: a third of the seeds is calm, and any fault may be absent."""
    storm = random.choice((0.0, 0.3, 1.0, 1.0, 3.0, 8.0))

    def rate(most: float) -> float:
        return min(0.9, storm * most * random.random()) if random.random() < 0.6 else 0.0

    return Rates(
        spawn_fails=rate(0.05),
        load_fails=rate(0.1),
        load_hangs=rate(0.05),
        dies=rate(0.016),
        hangs=rate(0.005),
        stops=rate(0.005),
        nonsense=rate(0.03),
        twice=rate(0.08),
        lies=rate(0.05),
        ignores_shutdown=rate(0.2),
        routes_late=rate(0.2),
        loses_welcome=rate(0.05),
        latency_s=random.choice((0.0002, 0.002, 0.05, 0.4)),
    )


class Story:
    """Owner of one seed's world, gateways and clients."""

    def __init__(self, seed: int, home: Path, loop: VirtualLoop, faults: Faults) -> None:
        self.faults = faults
        self.random = random = Random(seed)
        self.loop = loop
        self.home = home
        self.world = World(loop, random, draw_rates(random))
        # Draws that others do not depend on: of background responses and of the disk.
        self._own_random = Random(seed ^ 0xD15C)
        self.disk = SimulatedDisk(home, self._own_random, self.world.note)
        self._background_count = self._own_random.choice((0, 0, 0, 1, 3))
        # Whether the key "bob" may use the first model only.
        self._is_restricted = self._own_random.random() < 0.3
        # Draws of the parts that few seeds have.
        self._rare_random = Random(seed ^ 0xED6E)
        self._has_edge = self._rare_random.random() < 0.1
        self._has_upstream = self._rare_random.random() < 0.08
        self.upstreams = SimulatedUpstreams(self.world, self._rare_random)
        # Draws of limits of a key, of choices, and of models that a reload adds or removes.
        self._limit_random = Random(seed ^ 0x11A17)
        self._limits = draw_limits(self._limit_random)
        self._later: list[asyncio.Task[None]] = []
        self._database_at = -math.inf
        if self._background_count and self._rare_random.random() < 0.2:
            rate = self._rare_random.choice((0.0, 0.01, 0.1))
            self.disk.database_faults = DatabaseFaults(
                self._rare_random, rate, lambda: self.disk.is_full, self._note_database
            )
        self.span_s = random.choice(SPANS_S)
        self.boots = 0
        self.config = self._draw_config()
        assert isinstance(self.config.memory.budget_bytes, int)
        self._budget = self.config.memory.budget_bytes
        # Secrets that are in force, and those that clients have, by key.
        self.secrets = self._make_keys()
        self._had = dict(self.secrets)
        self._key_changes = 0
        self._operators_disk = DiskOfProcess(self.disk)
        # Whether there is a gateway to which clients can connect.
        self._listening = asyncio.Event()
        # Only one gateway ends and starts at a time.
        self._succession = asyncio.Lock()
        self._deaths = asyncio.Event()
        self._power_cut_at = self._disk_at = -math.inf
        self._burials: list[asyncio.Task[None]] = []
        self.gateway = self._make_gateway()
        self.clients: list[Client] = []
        self.failure: BaseException | None = None
        loop.on_turn = self.check_turn

    def _draw_config(self) -> Config:
        random = self.random
        names = MODELS[: random.randint(1, 3)]
        models = {name: self._draw_model(random, name) for name in names}
        server = ServerConfig(
            drain_s=random.choice((0.0, 2.0, 10.0)),
            queue_timeout_s=60.0,
            request_timeout_s=random.choice((0.0, 0.0, 3.0)),
            response_store_bytes=1 << 26 if self._background_count else 0,
        )
        memory = MemoryConfig(budget_bytes=random.choice((8, 12, 16)) * GIB)
        self._residency_s = random.choice((0.5, 5.0))
        return Config(
            home=self.home,
            server=server,
            models=models,
            config_path=self.home / "mlxd.toml",
            memory=memory,
            upstreams={UPSTREAM: upstream_config([*MODELS])} if self._has_upstream else {},
        )

    def _draw_model(self, random: Random, name: str) -> ModelConfig:
        fallback = FallbackConfig(to=(UPSTREAM,), when=("unavailable", "queue"))
        model = ModelConfig(
            name=name,
            path=f"/nowhere/{name}",
            preload=random.random() < 0.4,
            memory_bytes=random.choice((3, 6, 7)) * GIB,
            ttl_s=random.choice((0.0, 0.0, 5.0)),
            max_running=random.choice((1, 4, 16)),
            kind="text",
            fallback=fallback if self._has_upstream else FallbackConfig(),
        )
        # Of all queues of the next gateway.
        self._waiting_max = random.choice((1, 100))
        return model

    def _make_keys(self) -> dict[str, str]:
        self.config.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        data, secrets = _keys(self._is_restricted, self._limits)
        self.config.keys_path.parent.mkdir(mode=0o700, exist_ok=True)
        write_private(self.config.keys_path, data)
        return dict(secrets)

    def _make_gateway(self) -> SimulatedGateway:
        self.boots += 1
        gateway = SimulatedGateway(
            self.world,
            self.config,
            self.boots,
            self.random,
            self._listening,
            self.disk,
            self.upstreams,
            self._residency_s,
        )
        services = gateway.app.services
        services.admission.waiting_max = self._waiting_max
        services.upstreams.first_byte_s = services.upstreams.silence_s = PATIENCE_S
        return gateway

    # -- invariants ----------------------------------------------------------------------------------------------------

    def check_turn(self) -> None:
        """Check what holds at every turn."""
        if self.world.own_bytes > self._budget:
            raise Violated(f"workers hold {self.world.own_bytes >> 20} MiB, the budget is {self._budget}")
        if not self.loop.turns % CHECK_TURNS and not self.gateway.is_dead:
            self.gateway.check_turn(self._budget, self._concurrency)

    def _check_files(self) -> None:
        """Check that the key file has all changes, and that each whole line of the audit log can be read."""
        names = {key.name for key in KeyFile(self.config.keys_path).read()}
        if names != self.secrets.keys():
            raise Violated(f"the key file has {names}, and {self.secrets.keys()} are in force")
        log = audit_path(self.home)
        lines = log.read_bytes().splitlines() if log.exists() else []
        unreadable = 0
        for line in lines:
            try:
                msgspec.json.decode(line, type=AuditEntry)
            except msgspec.DecodeError:
                unreadable += 1
                if line.count(b'{"time":') > 1:
                    raise Violated(f"a line of the audit log continues one that was cut off: {line!r}") from None
        if unreadable > self.disk.torn:
            raise Violated(f"{unreadable} lines of the audit log cannot be read, {self.disk.torn} writes were cut off")

    def check_end(self) -> None:
        """Check that the world is empty after the last gateway has stopped."""
        self._check_files()
        if alive := self.world.alive():
            raise Violated(f"left running: {[(p.spec.name, p.spec.epoch) for p in alive]}")
        if self.gateway.wire.greetings > len(MODELS):
            raise Violated(f"{self.gateway.wire.greetings} greetings were not dropped")
        if files := [path.name for path in self.config.journal_dir.glob("*")]:
            raise Violated(f"journals left behind: {files}")
        if files := [path.name for path in (self.config.run_dir / "workers").glob("*.json")]:
            raise Violated(f"state files left behind: {files}")
        tasks = [task for task in asyncio.all_tasks(self.loop) if task is not asyncio.current_task()]
        if tasks:
            raise Violated(f"tasks left behind: {tasks}")
        if self.faults.records:
            raise Violated("the gateway logged an error of its own:\n" + "\n".join(self.faults.records))

    # -- the story -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        await self._next_gateway()
        count = self.random.choice((2, 6, 12, 25))
        plans = sorted(
            (draw_plan(self.random, i, [*self.config.models], [*KEYS], self.span_s) for i in range(count)),
            key=lambda plan: plan.at_s,
        )
        if not self._has_upstream:
            for plan in plans:
                plan.choices = self._limit_random.choice((1, 1, 1, 1, 1, 2, 3))
        requests = [asyncio.create_task(self._request(plan)) for plan in plans]
        backgrounds = [self._make_background(number) for number in range(self._background_count)]
        requests += [asyncio.create_task(each.run()) for each in backgrounds]
        if self._has_upstream:
            count = self._rare_random.randint(1, 10)
            plans = [
                draw_plan(self._rare_random, 300 + i, [UPSTREAM_MODEL], [*KEYS], self.span_s) for i in range(count)
            ]
            requests += [asyncio.create_task(self._request(plan)) for plan in plans]
        if self._has_edge:
            count = self._rare_random.randint(1, 4)
            requests += [asyncio.create_task(self._connect(number)) for number in range(count)]
        requests.append(asyncio.create_task(self._events()))
        watch = asyncio.create_task(self._watch())
        end = asyncio.create_task(self._wait_for(requests))
        await asyncio.wait([watch, end], return_when=asyncio.FIRST_COMPLETED)
        if watch.done():
            watch.result()
        end.result()
        watch.cancel()
        # Aborted sequences and leases of clients that have left end within a moment.
        await asyncio.sleep(2.0)
        for each in backgrounds:
            await each.check()
        await self._check_list()
        self.gateway.check_idle()
        self._check_books()
        async with asyncio.timeout(LIVENESS_S):
            await self.gateway.stop()
            for burial in self._burials:
                await burial
        self.check_end()

    async def _wait_for(self, parts: list[asyncio.Task[None]]) -> None:
        """Return once all requests, events and background responses have ended."""
        async with asyncio.timeout(self.span_s + LIVENESS_S):
            for part in parts:
                await part
            for part in self._later:
                await part
            # Responses whose clients do not know their ids end too.
            while not self._is_quiet():  # noqa: ASYNC110  # the product has no event for it
                await asyncio.sleep(1.0)
        self.world.is_calm = True
        if self.disk.database_faults is not None:
            self.disk.database_faults.rate = 0.0
        self.gateway.disk.changes_left = None

    def _is_quiet(self) -> bool:
        gateway = self.gateway
        is_stable = self._listening.is_set() and not self._succession.locked()
        return is_stable and not gateway.is_dead and not gateway.running_responses

    async def _request(self, plan: Plan) -> None:
        await asyncio.sleep(plan.at_s)
        await self._listening.wait()
        # The requests of "bob" may not leave this machine.
        is_allowed = self._may_use(plan.key, plan.model) and (plan.model != UPSTREAM_MODEL or plan.key == "alice")
        client = Client(self.world, plan, is_allowed=is_allowed)
        self.clients.append(client)
        if plan.leaves_after == 0:
            self.loop.call_later(self.random.random(), client.leave)
        gateway = self.gateway
        changes = self._key_changes
        task = gateway.run(client.run(gateway, self._had[plan.key]))
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
            self._check_key(plan.key, changes, client.outcome.status)
            gateway.books.received[plan.key] += client.outcome.tokens
            if (limit_s := gateway.config.server.request_timeout_s) and not self._has_upstream:
                client.check_time(limit_s + LATE_GRACE_S + LATE_S + self.world.rates.latency_s)

    async def _connect(self, number: int) -> None:
        """Send requests on one connection through the HTTP edge."""
        random, names = self._rare_random, [*self.config.models]
        count = random.choice((1, 2, 3, 8))
        plans = [draw_plan(random, 200 + 10 * number + i, names, [*KEYS], self.span_s) for i in range(count)]
        connection = draw_connection(random, 42000 + number)
        clients = [Client(self.world, plan, is_allowed=self._may_use(plan.key, plan.model)) for plan in plans]
        await asyncio.sleep(plans[0].at_s)
        await self._listening.wait()
        changes, secrets = self._key_changes, [self._had[plan.key] for plan in plans]
        client = PipeliningClient(self.world, random, connection, clients)
        gateway = self.gateway
        await client.run(gateway.http_edge(), secrets)
        for plan, each in zip(plans, clients, strict=True):
            gateway.books.received[plan.key] += each.outcome.tokens
            self._check_key(plan.key, changes, each.outcome.status)

    async def _events(self) -> None:
        """Give commands of operators and faults of the machine, some in each seed."""
        chosen = [self.random.choice(EVENTS) for _ in range(self.random.choice((0, 1, 3, 6)))]
        for name in chosen:
            await asyncio.sleep(self.random.random() * 2 * self.span_s / len(chosen))
            self.world.note(f"event {name}")
            await self._event(name)

    async def _event(self, name: str) -> None:
        await self._listening.wait()
        gateway, pool, random = self.gateway, self.gateway.pool, self.random
        model = random.choice([*self.config.models])
        match name:
            case "unload":
                gateway.run(_quietly(gateway, pool.unload(model)))
            case "restart":
                gateway.run(_quietly(gateway, pool.restart(model)))
            case "load":
                gateway.run(_quietly(gateway, pool.load(model)))
            case "reload":
                self._change_config()
                if added := [name for name in self.config.models if name not in gateway.config.models]:
                    self._later.append(asyncio.create_task(self._request(self._draw_later(added))))
                gateway.wanted = self.config
                await asyncio.wait([gateway.run(_quietly(gateway, _reload(gateway.reloader)))])
            case "die":
                self._kill()
            case "hand over":
                await self._succeed(lambda: self.gateway.hand_over())
            case "terminate":
                await self._succeed(self._terminate)
            case "key":
                self._change_key()
                # It applies from the next request on.
                await self._send(HttpCall("GET", "/v1/models"), "bob", 39998)
            case "disk full":
                self.disk.is_full = True
                self._relieve_disk(10.0)
            case "disk slow":
                self.disk.latency_s = random.choice((0.1, 1.0, 6.0))
                self._relieve_disk(20.0)
            case "power":
                await self._succeed_power_cut()
            case "die writing":
                gateway.disk.changes_left = random.randint(1, 8)
            case "jump":
                self.world.jump(random.choice((0.5, 20.0, 400.0)))
            case "pressure":
                self.world.machine.other = random.choice((4, 12, 16)) * GIB
                self.loop.call_later(random.random() * 20, self._relax)
            case _:
                if alive := self.world.alive():
                    process = random.choice(alive)
                    process.signal(signal.SIGSTOP)
                    self.loop.call_later(random.choice((1.0, 40.0)), process.signal, signal.SIGCONT)

    async def _succeed(self, end: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """End the gateway, which may be killed meanwhile, and start the next one."""
        async with self._succession:
            if not self.gateway.is_dead and not await self._finishes(end()):
                await self._bury()
            await self._next_gateway()

    async def _succeed_power_cut(self) -> None:
        """End the machine and all that runs on it. It starts again, without what was not synced."""
        async with self._succession:
            self.gateway.die()
            for process in self.world.alive():
                process.exit(-signal.SIGKILL)
            await self._bury(self._own_random)
            self._power_cut_at = self.loop.time()
            self._order_journals()
            self.disk.cut_power()
            self.faults.excused = UNREADABLE_AFTER_POWER_CUT
            self._check_files()
            await asyncio.sleep(self.random.random() * 5)
            self.world.machine.returning.clear()
            await self._next_gateway()

    async def _terminate(self) -> None:
        """Stop the gateway as an operator does, and check that its workers have gone."""
        await self.gateway.stop()
        if alive := self.world.alive():
            raise Violated(f"left running by a stop: {[process.label for process in alive]}")

    def _kill(self) -> None:
        if not self.world.is_calm:
            self.world.note("the gateway is killed")
            self.gateway.die()

    async def _watch(self) -> None:
        """Start the next gateway after each one that is killed."""
        while True:
            await self._deaths.wait()
            self._deaths.clear()
            async with self._succession:
                if self.gateway.is_dead:
                    await self._bury()
                    await asyncio.sleep(self.random.random() * 2)
                    if self.random.random() < 0.5:
                        self._change_config()
                    await self._next_gateway()
                    if self.random.random() < 0.3 and not self.world.is_calm:
                        # Workers that were not adopted may not have exited yet.
                        await asyncio.sleep(self.random.random() ** 4 * 2)
                        if not await self._finishes(self._terminate()):
                            await self._bury()
                        await self._next_gateway()

    async def _bury(self, lost: Random | None = None) -> None:
        self._listening.clear()
        if self.gateway.disk.was_killed_writing:
            self.faults.excused |= UNREADABLE_AFTER_KILL
        await self.gateway.kill(lost)
        assert self.gateway.burial is not None
        self._burials.append(self.gateway.burial)

    async def _next_gateway(self) -> None:
        """Start gateways until one has started."""
        while True:
            self._order_journals()
            self.gateway = self._make_gateway()
            self.gateway.died.add_done_callback(lambda _: self._deaths.set())
            if await self._finishes(self.gateway.start()):
                break
            await self._bury()
        self._listening.set()

    async def _finishes(self, step: Coroutine[Any, Any, None]) -> bool:
        """Run a step of the gateway's life. Return whether the gateway survives it."""
        task, died = asyncio.create_task(step), self.gateway.died
        await asyncio.wait([task, died], return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            task.cancel()
            await asyncio.wait([task])
            return False
        task.result()
        return True

    def _order_journals(self) -> None:
        """Date each journal by the number of its response, because gateways resume the oldest first.

        Its name is random, and the time of the machine differs in each run.
        """
        for path in self.config.journal_dir.glob("*.journal"):
            number = 0
            with contextlib.suppress(NotUnderstood):
                prompt = parsed(path.read_bytes()).request.generate.prompt
                assert isinstance(prompt, ChatPrompt)
                number = 1 + number_of(str(prompt.messages[-1]["content"]))
            os.utime(path, (number, number))

    def _make_background(self, number: int) -> BackgroundClient:
        models = [*self.config.models]
        plan = draw_background_plan(self._own_random, number, models, [*KEYS], self.span_s)
        may_use = self._may_use(plan.key, plan.model)
        return BackgroundClient(
            self.world, plan, self._own_random, self._send, self._trouble, self._kill, is_allowed=may_use
        )

    def _may_use(self, key: str, model: str) -> bool:
        return not self._is_restricted or key != "bob" or model == MODELS[0]

    async def _check_list(self) -> None:
        """Check that a key's list has the models that it may use, and no others."""
        for key in KEYS:
            call = HttpCall("GET", "/v1/models")
            await self._send(call, key, 39999)
            listed = [model["id"] for model in json.loads(call.body).get("data", ())]
            if self._may_use(key, UPSTREAM_MODEL):
                listed = [name for name in listed if name in self.config.models]
            allowed = [model for model in self.config.models if self._may_use(key, model)]
            if listed != allowed and key in self.secrets and call.status != 429:
                raise Violated(f"{key} may use {allowed}, and {listed} are listed: {bytes(call.body)!r}")

    async def _send(self, call: HttpCall, key: str, port: int) -> bool:
        """Send a request with a key to the gateway, once there is one. Return whether the key is in force."""
        await self._listening.wait()
        gateway = self.gateway
        changes = self._key_changes
        task = gateway.run(call.run(gateway, self._had[key], port))
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
            self._check_key(key, changes, call.status)
        if call.violation is not None:
            raise call.violation
        return key in self.secrets

    def _check_key(self, key: str, changes: int, status: int) -> None:
        """Check that a request was refused for its key if the key was not in force, and only then."""
        # Answers with status 429 may be those to refused keys.
        if changes == self._key_changes and status not in (0, 429) and (status == 401) is (key in self.secrets):
            raise Violated(f"the key {key} is{'' if key in self.secrets else ' not'} in force, and gets {status}")

    def _draw_later(self, models: list[str]) -> Plan:
        """Draw a request to models that were added."""
        plan = draw_plan(self._limit_random, 400 + len(self._later), models, [*KEYS], 1.0)
        plan.choices = 1 if self._has_upstream else self._limit_random.choice((1, 1, 2))
        return plan

    @property
    def _concurrency(self) -> dict[str, int]:
        return {name: limits.concurrency for name, limits in self._limits.items()}

    def _check_books(self) -> None:
        """Check what the last gateway recorded. Background responses that it has resumed had a minute of another."""
        rpm = {} if self._background_count else {name: limits.rpm for name, limits in self._limits.items()}
        # An upstream's usage is recorded to the model in whose place it answers, and may be any number.
        self.gateway.books.check(set() if self._has_upstream else {*MODELS}, rpm)

    def _trouble(self) -> Trouble:
        is_bad = self.disk.is_full or self.disk.latency_s > QUICK_S
        return Trouble(self._power_cut_at, self.loop.time() if is_bad else self._disk_at, self._database_at)

    def _note_database(self, what: str) -> None:
        self._database_at = self.loop.time()
        self.world.note(what)

    def _change_config(self) -> None:
        random, models = self.random, dict(self.config.models)
        # Requests to a model that was removed are refused. There is always one model.
        if self._limit_random.random() < 0.4:
            name = self._limit_random.choice(MODELS)
            if name not in models:
                models[name] = self._draw_model(self._limit_random, name)
            elif len(models) > 1:
                del models[name]
        name = random.choice([*models])
        change: dict[str, object] = random.choice(
            (
                {"context": random.choice((0, 4096, 8192))},
                {"ttl_s": random.choice((0.0, 5.0))},
                {"max_running": random.choice((1, 4))},
                {"preload": True},
            )
        )
        models[name] = msgspec.structs.replace(models[name], **change)
        self.config = msgspec.structs.replace(self.config, models=models)

    def _change_key(self) -> None:
        """Revoke, rotate or restrict the key "bob". The operator sees whether that has worked."""
        file = KeyFile(self.config.keys_path, disk=self._operators_disk)
        try:
            match self._own_random.choice(("revoke", "rotate", "create")):
                case "revoke":
                    file.revoke("bob")
                    self.world.revoked.add("bob")
                    self.secrets.pop("bob", None)
                case "rotate":
                    self._had["bob"] = self.secrets["bob"] = file.rotate("bob")[1]
                case _:
                    models = MODELS[:1] if self._is_restricted else ()
                    limits = self._limits.get("bob", KeyLimits())
                    self._had["bob"] = self.secrets["bob"] = file.create(_key("bob", models, limits))[1]
        except KeyRefused:
            pass
        except KeysUnusable as error:
            if not self.disk.is_full:
                raise Violated(f"the keys cannot be changed: {error}") from error
        self._key_changes += 1

    def _relieve_disk(self, most_s: float) -> None:
        def relieve() -> None:
            self.disk.is_full, self.disk.latency_s = False, QUICK_S
            self._disk_at = self.loop.time()

        self.loop.call_later(self.random.random() * most_s, relieve)

    def _relax(self) -> None:
        self.world.machine.other = 0


def draw_limits(random: Random) -> dict[str, KeyLimits]:
    """Draw the limits of a key, which one seed of six has."""
    if random.random() > 1 / 6:
        return {}
    limits = KeyLimits(
        rpm=random.choice((0, 0, 6, 60)), tpm=random.choice((0, 600, 6000)), concurrency=random.choice((0, 1, 3))
    )
    return {random.choice(KEYS): limits}


def _key(name: str, models: tuple[str, ...], limits: KeyLimits) -> Key:
    fields = {field: getattr(limits, field) for field in KeyLimits.__struct_fields__}
    # The requests of "bob" may not leave this machine.
    return Key(name=name, prefix="", salt="", hash="", models=models, may_leave=name == "alice", **fields)


@cache
def _secrets() -> dict[str, tuple[Key, str]]:
    """Make the keys without rights and limits, and their secrets. All seeds of a process have the same."""
    with tempfile.TemporaryDirectory() as folder:
        file = KeyFile(Path(folder) / "keys" / "keys.json")
        return {name: file.create(_key(name, (), KeyLimits())) for name in KEYS}


def _keys(is_restricted: bool, limits: dict[str, KeyLimits]) -> tuple[bytes, dict[str, str]]:
    """Return the content of a key file, and the secrets of its keys."""
    keys: list[Key] = []
    for name, (made, _) in _secrets().items():
        models = MODELS[:1] if is_restricted and name == "bob" else ()
        key = _key(name, models, limits.get(name, KeyLimits()))
        same = {field: getattr(made, field) for field in ("prefix", "salt", "hash", "cache_salt", "created")}
        keys.append(msgspec.structs.replace(key, **same))
    return encode_keys(keys, {}), {name: secret for name, (_, secret) in _secrets().items()}


async def _quietly(gateway: SimulatedGateway, command: Coroutine[Any, Any, None]) -> None:
    """Run an operator's command, which may be refused."""
    try:
        await command
    except (ModelUnavailable, Unavailable):
        pass
    except Exception:
        if not gateway.is_dead:
            raise


async def _reload(reloader: Reloader) -> None:
    await reloader.reload()


def play(seed: int) -> Result:
    """Play the story of one seed in a home of its own."""
    home = Path(tempfile.mkdtemp(prefix="mlxd-", dir="/dev/shm" if Path("/dev/shm").is_dir() else "/tmp"))
    loop = VirtualLoop(seed, is_shuffled=seed % 2 == 1)
    errors: list[str] = []
    loop.set_exception_handler(lambda _, context: errors.append(str(context)))
    faults, root = Faults(), logging.getLogger()
    root.addHandler(faults)
    asyncio.set_event_loop(loop)
    story = None
    failure: BaseException | None = None
    before = signal.signal(signal.SIGALRM, _on_alarm)
    # A wait in the clean-up ends too.
    signal.setitimer(signal.ITIMER_REAL, WALL_S, WALL_S)
    try:

        async def tell() -> None:
            nonlocal story
            story = Story(seed, home, loop, faults)
            faults.world = story.world
            await story.run()

        loop.run_until_complete(tell())
    except (Exception, Hung) as error:
        failure = error
    finally:
        if errors:
            # Whoever waits for what the callback has not done fails later.
            failure = Violated(f"an exception in a callback or a task: {errors}")
        root.removeHandler(faults)
        _close(loop)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        shutil.rmtree(home, ignore_errors=True)
    world = story.world if story is not None else None
    return Result(
        seed,
        world.digest if world is not None else "",
        world.trace if world is not None else [],
        world.faults if world is not None else {},
        loop.turns,
        loop.time(),
        failure,
    )


def _close(loop: VirtualLoop) -> None:
    loop.on_turn = lambda: None
    loop.set_exception_handler(lambda _, context: None)
    tasks = sorted((task for task in asyncio.all_tasks(loop) if isinstance(task, NumberedTask)), key=hash)
    for task in tasks:
        task.cancel()
    if tasks:
        with contextlib.suppress(BaseException):
            loop.run_until_complete(asyncio.wait(tasks, timeout=100))
    asyncio.set_event_loop(None)
    loop.close()

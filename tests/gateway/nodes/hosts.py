"""Hosts of a small office in one process: real brokers, agents and clients, and ranks that are processes that sleep."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from os import pipe
from pathlib import Path

import msgspec
import pytest

from gateway.config.settings import Config, MemoryConfig, ModelConfig, ServerConfig
from gateway.link.link import WorkerLink
from gateway.nodes.agent import Agent, AgentLimits
from gateway.nodes.agent_client import AgentClient
from gateway.nodes.this_host import ThisHost
from gateway.workers.memory.broker import Broker
from gateway.workers.memory.host import ThisMachine
from gateway.workers.supervisor.ports import WorkerPort
from gateway.workers.supervisor.spawn import Child, WorkerOutput
from gateway.workers.supervisor.state import WorkerLimits
from protocol.curve import KeyPair, make_pair
from protocol.spec import GroupSpec, RankSpec, WorkerSpec
from tests.support.machine import Recorder
from tests.support.pool import short_home
from tests.support.scale import patient

MIB = 1 << 20
BUDGET = 1000 * MIB
DEADLINE_S = 5
THERE = "127.0.0.2"
# All ends of a test are on one loop, which may stand still for a while. Where silence is what is tested it is shorter.
SILENCE_S = patient(5)
SHORT_S = patient(0.5)
# A rank in these tests: a process that lives until a signal, or one that ends by itself.
SLEEPS = "import time; print('INFO rank is up', flush=True); time.sleep(600)"
ENDS = "import sys; print('ERROR no such tensor', flush=True); sys.exit(66)"


def _has_second_loopback() -> bool:
    """Linux has all of 127.0.0.0/8, macOS one address of it."""
    with socket.socket() as probe:
        try:
            probe.bind((THERE, 0))
        except OSError:
            return False
    return True


needs_second_loopback = pytest.mark.skipif(not _has_second_loopback(), reason=f"ifconfig lo0 alias {THERE}")


class Ranks:
    """Starts ranks as processes of Python code, and keeps them for the test to look at."""

    def __init__(self) -> None:
        self.code = SLEEPS
        self.specs: list[WorkerSpec] = []
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, spec: WorkerSpec) -> WorkerPort:
        self.specs.append(spec)
        read_fd, write_fd = pipe()
        with open(write_fd, "wb") as out:
            popen = subprocess.Popen([sys.executable, "-I", "-S", "-c", self.code], stdout=out, stderr=out)
        self.started.append(popen)
        return Child(popen, WorkerOutput(read_fd, spec.name), lambda: None)

    def kill(self) -> None:
        for popen in self.started:
            popen.kill()
            popen.wait()


@dataclass(slots=True)
class Host:
    """One machine: its keys, its broker and its agent."""

    name: str
    keys: KeyPair
    broker: Broker
    ranks: Ranks
    agent: Agent
    this: ThisHost
    # Names of the nodes that its agent admits, by public key.
    known: dict[str, str]
    task: asyncio.Task[None]

    @property
    def held(self) -> int:
        """Bytes that its broker has granted."""
        return self.broker.granted

    async def stop_agent(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        if not self.task.cancelled():
            self.task.result()


@asynccontextmanager
async def host(home: Path, name: str, *, budget: int = BUDGET, silence_s: float = SILENCE_S) -> AsyncGenerator[Host]:
    keys = make_pair()
    limits = AgentLimits(silence_s=silence_s, look_s=0.02, term_s=0.05, abort_s=0.1)
    config = Config(
        home=home,
        server=ServerConfig(node=name),
        models={"demo": ModelConfig(name="demo", path="demo")},
        config_path=home / "mlxd.toml",
        memory=MemoryConfig(budget_bytes=budget),
    )
    link = WorkerLink(config.run_dir, Recorder())
    broker = Broker(config, {}, link, Recorder(), ThisMachine(), WorkerLimits(), time.monotonic)
    ranks, known = Ranks(), dict[str, str]()
    this = ThisHost(lambda: config, broker, ranks.start, ("ipc://down", "ipc://up"))
    agent = Agent("127.0.0.1:*", keys, lambda: known, this, limits)
    agent.open()
    made = Host(name, keys, broker, ranks, agent, this, known, asyncio.create_task(agent.run()))
    settling = asyncio.create_task(broker.run())
    await asyncio.sleep(0)  # a task that is cancelled before it begins closes nothing
    try:
        yield made
    finally:
        await made.stop_agent()
        settling.cancel()
        ranks.kill()


@asynccontextmanager
async def client(to: Host, own: KeyPair, name: str = "studio1") -> AsyncGenerator[AgentClient]:
    """A gateway's connection to a host, which knows it under `name`."""
    to.known[own.public] = name
    made = AgentClient(to.name, to.agent.endpoint, to.keys.public, own, silence_s=SILENCE_S, pulse_s=0.05)
    made.open()
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def pair(silence_s: float = SILENCE_S) -> AsyncGenerator[tuple[Host, AgentClient]]:
    """A host, and a gateway that may use it."""
    async with AsyncExitStack() as stack:
        home = stack.enter_context(short_home())
        far = await stack.enter_async_context(host(home, "studio2", silence_s=silence_s))
        yield far, await stack.enter_async_context(client(far, make_pair()))


def form(of: Host) -> str:
    """The form of the demo model on a host."""
    known = of.this.form("demo")
    assert known
    return known


def rank_spec(**fields: object) -> WorkerSpec:
    """A follower's specification, as its gateway makes it."""
    spec = WorkerSpec(
        name="big",
        path="/home/of/another",
        epoch=3,
        down="ipc://theirs",
        up="ipc://theirs",
        group=GroupSpec(("local", "studio2"), "pipeline", "ring"),
        rank=rank_of(),
    )
    return msgspec.structs.replace(spec, **fields)


def rank_of(**fields: object) -> RankSpec:
    rank = RankSpec(1, "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "0" * 64, "1" * 64, "2" * 64)
    return msgspec.structs.replace(rank, **fields)

"""A real pool with real worker processes, without HTTP."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import msgspec
import psutil

from gateway.config.settings import Config, ModelConfig, ServerConfig
from gateway.link.collector import Collector
from gateway.link.link import WorkerLink
from gateway.workers.memory.host import HostMemory
from gateway.workers.pool import Pool
from gateway.workers.supervisor.spawn import Command
from gateway.workers.supervisor.state import WorkerLimits
from gateway.workers.supervisor.worker import WorkerHandle
from protocol.from_worker import Delta, Finish
from protocol.to_worker import Generate, Sampling, TextPrompt
from tests.support.machine import Recorder
from tests.support.scale import patient
from tests.support.scripted_worker import scripted as scripted

DEADLINE_S = 30


def config(home: Path, models: Sequence[str] = ("m",), **fields: object) -> Config:
    return Config(
        home=home,
        server=ServerConfig(drain_s=2.0),
        models={name: msgspec.convert({"name": name, "path": "demo"} | fields, ModelConfig) for name in models},
        config_path=home / "mlxd.toml",
    )


@contextmanager
def short_home() -> Iterator[Path]:
    """A home whose socket paths fit; pytest's own folders are too deep."""
    home = Path(tempfile.mkdtemp(prefix="mlxd-", dir="/tmp"))
    (home / "run").mkdir(mode=0o700)
    try:
        yield home
    finally:
        shutil.rmtree(home)


class Running:
    """A started pool and its link. Stops both at the end, and checks that no process is left."""

    def __init__(
        self,
        config: Config,
        *options: str,
        command: Command | None = None,
        limits: WorkerLimits | None = None,
        machine: HostMemory | None = None,
    ) -> None:
        self.events = Recorder()
        self.link = WorkerLink(config.run_dir, self.events)
        self.pool = Pool(
            config, self.link, self.events, command=command or scripted(*options), limits=limits, machine=machine
        )
        self.pids: set[int] = set()

    async def __aenter__(self) -> Self:
        await self.pool.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.note_pids()
        await self.pool.stop(0.0)
        left = [pid for pid in self.pids if psutil.pid_exists(pid)]
        assert not left, f"worker processes left behind: {left}"

    def note_pids(self) -> None:
        self.pids |= {view.pid for view in self.pool.workers() if view.pid}

    async def ready(self, model: str = "m") -> WorkerHandle:
        async with asyncio.timeout(patient(DEADLINE_S)):
            worker = await self.pool.ensure_ready(model)
        self.note_pids()
        return worker

    def generate(self, worker: WorkerHandle, text: str = "", max_tokens: int = 5) -> Collector:
        return self.link.submit(worker, [self.request(text, max_tokens)])

    def request(self, text: str = "", max_tokens: int = 5) -> Generate:
        sampling = Sampling(temperature=0.0, ignore_eos=True)
        return Generate(self.link.next_rid(), TextPrompt(text), sampling, max_tokens=max_tokens)

    async def complete(self, model: str = "m", text: str = "", max_tokens: int = 5) -> list[Delta]:
        with self.pool.broker.lease(model):
            return await read_all(self.generate(await self.ready(model), text, max_tokens))


async def read_all(collector: Collector) -> list[Delta]:
    """Every delta to the end, within the deadline."""
    deltas: list[Delta] = []
    async with asyncio.timeout(patient(DEADLINE_S)):
        while not collector.is_done:
            deltas += await collector.read_deltas()
    return deltas


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def finish_of(deltas: Sequence[Delta]) -> Finish | None:
    assert [d.finish for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    return deltas[-1].finish


def tokens(count: int) -> str:
    """Text of a scripted worker's first `count` tokens."""
    return "".join(f"t{i} " for i in range(count))


async def until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Poll, with a deadline."""
    end = time.monotonic() + patient(deadline_s)
    while not condition():
        assert time.monotonic() < end, "the deadline passed"
        await asyncio.sleep(0.01)

"""Engines that are compared, each in processes of its own, started alike."""

import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, Protocol

import msgspec
import psutil

from benchmarks import blas
from benchmarks.bare import Answer, Order
from benchmarks.fetched import MLX_VLM, VLLM_MLX, Packages, Unavailable, imports
from benchmarks.measure import cpu_s, tree
from gateway.ctl.bench.closed_loop import (
    CHAT,
    COMPLETION,
    BenchConnection,
    BenchLoad,
    BenchRequest,
    Summary,
    Target,
    closed_loop,
    report,
    summarize_ms,
)

STOP_S: Final = 15.0
# A worker tells its counters at least this often.
COUNTERS_S: Final = 2.0
_COUNTERS: Final = ("mlxd_spec_decode_num_draft_tokens_total{", "mlxd_spec_decode_num_accepted_tokens_total{")
# Length of the end of the log that is shown if a server does not start.
LAST_BYTES: Final = 2000


class Sample(msgspec.Struct, frozen=True):
    """One measurement of one engine. `server_cpu_s` is the CPU time of the started process, and of all its children."""

    tokens_per_s: float
    wall_s: float
    tokens: int
    errors: int
    ttft_ms: Summary
    itl_ms: Summary
    server_cpu_s: tuple[float, float]
    client_cpu_s: float
    cached_tokens: int = 0
    texts: list[str] = []
    first_errors: list[str] = []


class Drafts(msgspec.Struct, frozen=True):
    """Drafted tokens that were verified, and those of them that were accepted."""

    tokens: int = 0
    accepted: int = 0


class Engine(Protocol):
    """Engine that is started once and measured many times."""

    name: str

    async def start(self) -> None: ...

    def computing(self) -> psutil.Process:
        """Return the process that has the model."""
        ...

    async def measure(self, jobs: Sequence[BenchRequest], concurrency: int) -> Sample: ...

    async def stop(self) -> None: ...


class Bare:
    """mlx-lm's batch loop in a child process."""

    name = "bare"

    def __init__(self, model: Path, load_timeout_s: float) -> None:
        self._model = model
        self._load_timeout_s = load_timeout_s
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "benchmarks.bare", str(self._model)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=blas.environment(),
            limit=1 << 30,
        )
        async with asyncio.timeout(self._load_timeout_s):
            await self._line()

    def computing(self) -> psutil.Process:
        assert self._process is not None
        return psutil.Process(self._process.pid)

    async def order(self, order: Order) -> Answer:
        """Send one order and wait for its answer. Raises Unavailable if the process has ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        return msgspec.json.decode(await self._line(), type=Answer)

    async def measure(self, jobs: Sequence[BenchRequest], concurrency: int) -> Sample:
        answer = await self.order(Order([job.prompt for job in jobs], [job.max_tokens for job in jobs], concurrency))
        pairs = list(zip(answer.inserted_s, answer.token_s, strict=True))
        return Sample(
            tokens_per_s=answer.tokens / answer.wall_s,
            wall_s=answer.wall_s,
            tokens=answer.tokens,
            errors=0,
            ttft_ms=summarize_ms([times[0] - inserted for inserted, times in pairs]),
            itl_ms=summarize_ms([b - a for _, times in pairs for a, b in pairwise(times)]),
            server_cpu_s=(answer.cpu_s, 0.0),
            client_cpu_s=0.0,
            texts=answer.texts,
        )

    async def stop(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                async with asyncio.timeout(STOP_S):
                    await self._process.wait()
            except TimeoutError:  # the process is in the middle of an order
                self._process.kill()
                await self._process.wait()

    async def _line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise Unavailable("the bare loop died; its message is above")
        return line


class Server(ABC):
    """HTTP server in a child process, with a folder of its own that is removed at the end."""

    name = ""
    module = ""
    # Packages that the server needs in addition to mlxd's environment.
    packages: Packages | None = None
    endpoint = COMPLETION

    def __init__(self, model: Path, load_timeout_s: float) -> None:
        self._environment = self.packages.environment() if self.packages else blas.environment()
        if not imports(self.module, self._environment):
            raise Unavailable(f"{self.name} is skipped: the module {self.module} is not importable here")
        self.model = model
        self.home = Path(tempfile.mkdtemp(prefix="mlxd-bench-", dir="/tmp"))
        self.port = free_port()
        self.target = Target("127.0.0.1", self.port)
        self._load_timeout_s = load_timeout_s
        self._process: asyncio.subprocess.Process | None = None

    @abstractmethod
    def command(self) -> list[str]:
        """Return the command line of the server."""

    @abstractmethod
    def model_name(self) -> str:
        """Return the model's name in requests."""

    def environment(self) -> dict[str, str]:
        return self._environment

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def computing(self) -> psutil.Process:
        return max(tree(self.pid), key=lambda process: process.memory_info().rss)

    @property
    def load(self) -> BenchLoad:
        return BenchLoad(self.target, self.model_name(), self.endpoint)

    async def start(self) -> None:
        """Start the server and wait for the answer to a first request. Raises Unavailable with the end of the server's
        log.
        """
        with (self.home / "server.log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.command(), stdout=log, stderr=log, env=self.environment(), cwd=self.home, start_new_session=True
            )
        deadline = time.monotonic() + self._load_timeout_s
        body = self.load.body(BenchRequest("Hello", 1))
        reply = None
        while time.monotonic() < deadline and self._process.returncode is None:
            connection = BenchConnection(self.target)
            reply = await connection.request(self.load.path, body, self._load_timeout_s)
            await connection.close()
            if reply.ok:
                return
            await asyncio.sleep(0.2)
        await self.stop(keep=True)
        why = f"last answer: {reply.error or reply.status} {reply.body[:300]!r}" if reply else "it ended at once"
        raise Unavailable(f"{self.name} did not start ({why}):\n{self.log_tail()}")

    async def measure(self, jobs: Sequence[BenchRequest], concurrency: int) -> Sample:
        processes = tree(self.pid)
        before = cpu_s(processes[:1]), cpu_s(processes[1:]), time.process_time()
        wall_s, replies = await closed_loop(self.load, jobs, concurrency)
        after = cpu_s(processes[:1]), cpu_s(processes[1:]), time.process_time()
        folded = report(concurrency, wall_s, replies)
        return Sample(
            tokens_per_s=folded.completion_tokens / wall_s,
            wall_s=wall_s,
            tokens=folded.completion_tokens,
            errors=folded.errors,
            ttft_ms=folded.ttft_ms,
            itl_ms=folded.itl_ms,
            server_cpu_s=(after[0] - before[0], after[1] - before[1]),
            client_cpu_s=after[2] - before[2],
            cached_tokens=folded.cached_tokens,
            texts=[reply.text for reply in replies],
            first_errors=folded.first_errors,
        )

    async def drafts(self) -> Drafts:
        """Return the drafts since the start; none from servers that do not count them."""
        return Drafts()

    async def stop(self, keep: bool = False) -> None:
        """Stop the server by SIGTERM, then SIGKILL; `keep` leaves its folder, so that the log can be read."""
        if self._process is not None and self._process.returncode is None:
            children = [psutil.Process(self._process.pid), *tree(self._process.pid)[1:]]
            self._process.terminate()
            try:
                async with asyncio.timeout(STOP_S):
                    await self._process.wait()
            except TimeoutError:
                print(f"{self.name} did not stop within {STOP_S:.0f} s of SIGTERM; killing it", file=sys.stderr)
                for child in children:
                    if child.is_running():
                        os.kill(child.pid, signal.SIGKILL)
                await self._process.wait()
        if not keep:
            shutil.rmtree(self.home, ignore_errors=True)

    def log_tail(self) -> str:
        return (self.home / "server.log").read_bytes()[-LAST_BYTES:].decode(errors="replace")


class Mlxd(Server):
    """The daemon with one model, as a user would start it."""

    name = "mlxd"
    module = "gateway.main"

    def __init__(
        self,
        model: Path,
        load_timeout_s: float,
        dtype: str = "float32",
        max_running: int = 16,
        speculate: str = "auto",
    ) -> None:
        super().__init__(model, load_timeout_s)
        (self.home / "mlxd.toml").write_text(
            f'[server]\nport = {self.port}\nlog_level = "warning"\n\n'
            f'[models.bench]\npath = "{model}"\ndtype = "{dtype}"\nmax_running = {max_running}\npreload = true\n'
            f'speculate = "{speculate}"\n'
        )

    def command(self) -> list[str]:
        return [sys.executable, "-P", "-m", "gateway.main"]

    def model_name(self) -> str:
        return "bench"

    def environment(self) -> dict[str, str]:
        return super().environment() | {"MLXD_HOME": str(self.home)}

    async def drafts(self) -> Drafts:
        """Read the counters once the worker has told its newest."""
        before, counted = None, Drafts()
        while counted != before:
            await asyncio.sleep(COUNTERS_S)
            before, counted = counted, await self._counted()
        return counted

    async def _counted(self) -> Drafts:
        connection = BenchConnection(self.target)
        reply = await connection.request("/metrics", timeout_s=STOP_S)
        await connection.close()
        lines = reply.body.decode().splitlines()
        sums = [sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)) for name in _COUNTERS]
        return Drafts(*map(int, sums))


class MlxLmServer(Server):
    """mlx-lm's own server with its defaults."""

    name = "mlx_lm.server"
    module = "mlx_lm.server"

    def command(self) -> list[str]:
        flags = ["--model", str(self.model), "--host", "127.0.0.1", "--port", str(self.port), "--log-level", "WARNING"]
        return [sys.executable, "-P", "-m", "mlx_lm", "server", *flags]

    def model_name(self) -> str:
        return str(self.model)


class VllmMlx(Server):
    """vllm-mlx with continuous batching; other settings are its defaults."""

    name = "vllm-mlx"
    module = "vllm_mlx.cli"
    packages = VLLM_MLX

    def command(self) -> list[str]:
        flags = ["--host", "127.0.0.1", "--port", str(self.port), "--continuous-batching"]
        return [sys.executable, "-P", "-m", "vllm_mlx.cli", "serve", str(self.model), *flags]

    def model_name(self) -> str:
        return str(self.model)


class MlxVlmServer(Server):
    """mlx-vlm's own server with its defaults. It has no completions endpoint: prompts are put into the model's
    template.
    """

    name = "mlx_vlm.server"
    module = "mlx_vlm.server"
    packages = MLX_VLM
    endpoint = CHAT

    def command(self) -> list[str]:
        flags = ["--model", str(self.model), "--host", "127.0.0.1", "--port", str(self.port)]
        return [sys.executable, "-P", "-m", "mlx_vlm.server", *flags]

    def model_name(self) -> str:
        return str(self.model)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

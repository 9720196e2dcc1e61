"""The daemon under load and churn for a long time: what grows, what is lost, what is left behind.

    python -m benchmarks.soak                                   # 30 minutes, 16 clients
    python -m benchmarks.soak --minutes 5 --json soak.json

Three models share a budget for two, so they swap. Clients stream and do not stream, in every dialect, and some leave in
the middle. Meanwhile the configuration is reloaded, models are restarted, and a worker is killed now and then. What the
processes hold is sampled; a slope is a least-squares fit over the second half of the samples. The exit status is 1 when
a request was lost, something grew, or a process outlived the daemon.
"""

import argparse
import asyncio
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx2
import msgspec
import psutil

from gateway.ctl.bench.closed_loop import run, table

MODELS: Final = ("a", "b", "c")
SHARE: Final = "640MiB"
BUDGET: Final = "1500MiB"
START_S: Final = 60.0
STOP_S: Final = 60.0
REQUEST_S: Final = 300.0
SAMPLE_S: Final = 5.0
RELOAD_S: Final = 15.0
RESTART_S: Final = 47.0
KILL_S: Final = 101.0
LEAVING: Final = 0.15
MIB: Final = 1 << 20
WORDS: Final = ["memory", "model", "stream", "cache", "prompt", "answer", "river", "stone", "window", "garden"]
# Maximum growth that counts as none: per hour, and of files in all.
LIMITS: Final = {"daemon MiB": 60.0, "daemon fds": 20.0, "daemon threads": 4.0, "worker MiB": 200.0, "files": 60.0}


class Sample(msgspec.Struct, frozen=True):
    """Memory of the processes at one moment; `worker` is the largest of the workers."""

    at_s: float
    daemon_bytes: int
    daemon_fds: int
    daemon_threads: int
    workers: int
    worker_bytes: int
    footprint_bytes: int
    files: int


class Result(msgspec.Struct, frozen=True):
    minutes: float
    outcomes: dict[str, int]
    churn: dict[str, int]
    slopes_per_hour: dict[str, float]
    largest: Sample
    errors: list[str]
    orphans: int


@dataclass(slots=True)
class Soak:
    """One run. Owned by `main`."""

    home: Path
    concurrency: int
    seconds: float
    outcomes: Counter[str] = field(default_factory=Counter[str])
    churn: Counter[str] = field(default_factory=Counter[str])
    errors: list[str] = field(default_factory=list[str])
    samples: list[Sample] = field(default_factory=list[Sample])
    started: float = field(default_factory=time.monotonic)
    url: str = ""
    daemon: psutil.Process = field(default_factory=psutil.Process)

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self.started > self.seconds

    async def run(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "gateway.main"),
            env=os.environ | {"MLXD_HOME": str(self.home)},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        self.daemon = psutil.Process(process.pid)
        try:
            async with self._admin() as admin:
                self.url = await self._started(admin)
                self.started = time.monotonic()
                async with asyncio.TaskGroup() as tasks:
                    for number in range(self.concurrency):
                        tasks.create_task(self._client(random.Random(number)))
                    tasks.create_task(self._sample())
                    tasks.create_task(self._reload(admin))
                    tasks.create_task(self._restart(admin))
                    tasks.create_task(self._kill(admin))
        finally:
            process.terminate()
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                self.errors.append("the daemon did not stop")
                process.kill()

    def _admin(self) -> httpx2.AsyncClient:
        transport = httpx2.AsyncHTTPTransport(uds=str(self.home / "run" / "admin.sock"))
        return httpx2.AsyncClient(transport=transport, base_url="http://mlxd", timeout=REQUEST_S)

    async def _started(self, admin: httpx2.AsyncClient) -> str:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            with suppress(httpx2.HTTPError):
                return (await admin.get("/v1/status")).json()["url"]
            await asyncio.sleep(0.2)
        raise SystemExit("the daemon did not start")

    # -- clients -----------------------------------------------------------------------------------------------------

    async def _client(self, rng: random.Random) -> None:
        async with httpx2.AsyncClient(base_url=self.url, timeout=REQUEST_S) as client:
            while not self.is_over:
                path, body = question(rng)
                try:
                    self.outcomes[await self._ask(client, rng, path, body)] += 1
                except httpx2.HTTPError as error:
                    self.outcomes["lost"] += 1
                    self._note(f"{path}: {type(error).__name__}: {error}")

    async def _ask(self, client: httpx2.AsyncClient, rng: random.Random, path: str, body: dict[str, object]) -> str:
        leaves_after = rng.randrange(1, 30) if rng.random() < LEAVING else 0
        async with client.stream("POST", path, json=body) as response:
            last, lines = "", 0
            async for line in response.aiter_lines():
                last, lines = line or last, lines + 1
                if lines == leaves_after:
                    return "left"
            if response.status_code in (429, 503):
                await asyncio.sleep(min(5.0, float(response.headers.get("retry-after", "1"))))
                return "refused"
            is_whole = response.status_code == 200 and '"error":{' not in last
            if not is_whole:
                self._note(f"{path}: {response.status_code} {last[:200]}")
            return "answered" if is_whole else "lost"

    def _note(self, error: str) -> None:
        if len(self.errors) < 20:
            self.errors.append(error)

    # -- churn -------------------------------------------------------------------------------------------------------

    async def _every(self, seconds: float) -> bool:
        """Wait; return whether there is time for another turn."""
        await asyncio.sleep(min(seconds, max(0.0, self.started + self.seconds - time.monotonic())))
        return not self.is_over

    async def _reload(self, admin: httpx2.AsyncClient) -> None:
        turn = 0
        while await self._every(RELOAD_S):
            turn += 1
            (self.home / "mlxd.toml").write_text(configuration(turn))
            reply = await admin.post("/v1/config/reload")
            self.churn["reloads" if reply.status_code == 200 else "reloads refused"] += 1
            if reply.status_code != 200:
                self._note(f"reload: {reply.text[:200]}")

    async def _restart(self, admin: httpx2.AsyncClient) -> None:
        rng = random.Random(1)
        while await self._every(RESTART_S):
            verb = rng.choice(("restart", "unload"))
            await admin.post(f"/v1/models/{verb}", json={"model": rng.choice(MODELS)})
            self.churn[verb] += 1

    async def _kill(self, admin: httpx2.AsyncClient) -> None:
        rng = random.Random(2)
        while await self._every(KILL_S):
            models = (await admin.get("/v1/status")).json()["models"]
            pids = [model["pid"] for model in models if model["state"] == "ready"]
            if pids:
                os.kill(rng.choice(pids), signal.SIGKILL)
                self.churn["kill -9"] += 1

    # -- looking -----------------------------------------------------------------------------------------------------

    async def _sample(self) -> None:
        while await self._every(SAMPLE_S):
            with suppress(psutil.NoSuchProcess):
                self.samples.append(self._look())

    def _look(self) -> Sample:
        workers = self.daemon.children()
        sizes = [0]
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                sizes.append(worker.memory_full_info().uss)
        with self.daemon.oneshot():
            own = self.daemon.memory_full_info().uss
            return Sample(
                at_s=time.monotonic() - self.started,
                daemon_bytes=own,
                daemon_fds=self.daemon.num_fds(),
                daemon_threads=self.daemon.num_threads(),
                workers=len(workers),
                worker_bytes=max(sizes),
                footprint_bytes=sum(sizes),
                files=sum(len(files) for _, _, files in os.walk(self.home)),
            )

    def result(self) -> Result:
        half = [sample for sample in self.samples if sample.at_s > self.seconds / 2]
        columns = {
            "daemon MiB": [sample.daemon_bytes / MIB for sample in half],
            "daemon fds": [float(sample.daemon_fds) for sample in half],
            "daemon threads": [float(sample.daemon_threads) for sample in half],
            "worker MiB": [sample.worker_bytes / MIB for sample in half],
            "files": [float(sample.files) for sample in half],
        }
        hours = [sample.at_s / 3600 for sample in half]
        largest = max(self.samples, key=lambda sample: sample.footprint_bytes)
        return Result(
            self.seconds / 60,
            dict(self.outcomes),
            dict(self.churn),
            {name: slope(hours, values) for name, values in columns.items()},
            largest,
            self.errors,
            len(survivors(self.home)),
        )


def question(rng: random.Random) -> tuple[str, dict[str, object]]:
    """Make a request in one of the dialects; as in real use, conversations share beginnings."""
    model, is_stream = rng.choice(MODELS), rng.random() < 0.6
    system = f"You are helper {rng.randrange(6)}. " + " ".join(WORDS * rng.randrange(1, 12))
    text = f"Tell me about {' and '.join(rng.sample(WORDS, 2))}."
    size = rng.randrange(8, 64)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    match rng.randrange(4):
        case 0:
            return "/v1/messages", {
                "model": model, "system": system, "messages": messages[1:], "max_tokens": size, "stream": is_stream,
            }  # fmt: skip
        case 1:
            return "/v1/responses", {
                "model": model, "instructions": system, "input": text, "max_output_tokens": max(16, size),
                "stream": is_stream,
            }  # fmt: skip
        case 2:
            return "/v1/completions", {
                "model": model, "prompt": system + text, "max_tokens": size, "stream": is_stream,
            }  # fmt: skip
        case _:
            return "/v1/chat/completions", {
                "model": model, "messages": messages, "max_tokens": size, "stream": is_stream, "temperature": 0.7,
            }  # fmt: skip


def configuration(turn: int) -> str:
    """Return a configuration with another sampling default every turn, and a setting that restarts a worker every
    fourth turn.
    """
    lines = ["[server]", "port = 0", "[memory]", f'budget = "{BUDGET}"']
    for number, name in enumerate(MODELS):
        rows = 15 if number == turn // 4 % len(MODELS) and turn % 8 >= 4 else 16
        lines += [f"[models.{name}]", 'path = "demo"', f'memory = "{SHARE}"', f"max_running = {rows}"]
        lines += [f"sampling = {{ temperature = {0.5 + turn % 5 / 10} }}"]
    return "\n".join(lines) + "\n"


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Growth per unit of x."""
    return statistics.linear_regression(xs, ys).slope if len(xs) > 2 else 0.0


def survivors(home: Path) -> list[psutil.Process]:
    """Return the processes that still use this home folder."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("MLXD_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def as_table(result: Result) -> str:
    largest = result.largest
    rows = [[name, f"{value:+.1f} per hour"] for name, value in result.slopes_per_hour.items()]
    rows += [[name, str(count)] for name, count in (*result.outcomes.items(), *result.churn.items())]
    rows += [
        ["largest footprint of all workers", f"{largest.footprint_bytes / MIB:.0f} MiB of {BUDGET}"],
        ["orphans after the stop", str(result.orphans)],
    ]
    return "\n".join([table(("what", "seen"), rows), *result.errors])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--json", type=Path, help="write everything to this file")
    args = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="mlxd-soak-", dir="/tmp"))
    (home / "mlxd.toml").write_text(configuration(0))
    soak = Soak(home, args.concurrency, args.minutes * 60)
    run(soak.run())
    result = soak.result()
    print(as_table(result))
    if args.json:
        everything = {"result": result, "samples": soak.samples}
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(everything)))
    grown = [name for name, limit in LIMITS.items() if result.slopes_per_hour[name] > limit]
    if grown or result.outcomes.get("lost") or result.orphans:
        sys.exit(f"grew: {', '.join(grown) or 'nothing'}; the log is in {home}/logs")
    shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()

"""CPU of the gateway for a streamed token, without viewers of the page and with some, by turns in one process.

    python -m benchmarks.viewers                        # 64 streams, 0 and 10 viewers, 6 turns of 8 s each

The gateway and the synthetic worker are those of `benchmarks.gateway`. Viewers are open feeds that this process reads.
On Linux the CPU time is the scheduler's own, to the nanosecond; elsewhere it is in ticks of 10 ms.
"""

import argparse
import asyncio
import statistics
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import httpx2
import msgspec
import psutil

from benchmarks.compare import machine
from benchmarks.gateway import PACE_MS, SETTLE_S, PacedGateway
from benchmarks.measure import cpu_s, until
from gateway.ctl.bench.closed_loop import CHAT, BenchConnection, BenchLoad, BenchRequest


class Turn(msgspec.Struct, frozen=True):
    """One window of steady streaming."""

    viewers: int
    tokens: int
    cpu_us_per_token: float
    feed_bytes_per_s: float


class Viewers:
    """Open feeds with one login session. `resize` opens and closes them, so there is no context manager."""

    def __init__(self, gateway: PacedGateway) -> None:
        self._gateway = gateway
        self._tasks: list[asyncio.Task[None]] = []
        self._held = AsyncExitStack()
        self.read_bytes = 0

    async def log_in(self) -> None:
        """Log in once for all feeds."""
        transport = httpx2.AsyncHTTPTransport(uds=str(self._gateway.home / "run" / "admin.sock"))
        async with httpx2.AsyncClient(transport=transport, base_url="http://mlxd") as admin:
            code = (await admin.post("/v1/ui/code", json={})).json()["code"]
        base = f"http://127.0.0.1:{self._gateway.port}"
        limits = httpx2.Limits(max_connections=None)
        self._client = await self._held.enter_async_context(
            httpx2.AsyncClient(base_url=base, limits=limits, timeout=60)
        )
        answer = await self._client.post("/ui/api/session", json={"code": code})
        self._headers = {"authorization": f"Bearer {answer.json()['token']}"}

    async def resize(self, count: int) -> None:
        """Open or close feeds until there are `count`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = [asyncio.create_task(self._view()) for _ in range(count)]

    async def close(self) -> None:
        await self.resize(0)
        await self._held.aclose()

    async def _view(self) -> None:
        async with self._client.stream("GET", "/ui/api/feed", headers=self._headers) as answer:
            answer.raise_for_status()
            async for chunk in answer.aiter_raw():
                self.read_bytes += len(chunk)


async def measure(streams: int, viewers: int, turns: int, seconds: float) -> list[Turn]:
    """Measure windows without and with viewers, one after the other. Raises `Unavailable`."""
    step_ms = PACE_MS.get(streams, 25.0)
    gateway = PacedGateway(step_ms)
    await gateway.start()
    feeds = Viewers(gateway)
    connections = [BenchConnection(gateway.target) for _ in range(streams)]
    load = BenchLoad(gateway.target, gateway.model_name(), CHAT)
    length_s = turns * 2 * (seconds + SETTLE_S) + 30
    body = load.body(BenchRequest("Hello", int(length_s / step_ms * 1000)))
    made: list[Turn] = []
    try:
        await feeds.log_in()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one.request(load.path, body)) for one in connections]
            running = list(zip(connections, tasks, strict=True))
            await until(lambda: all(one.reply.times or task.done() for one, task in running))
            for turn in range(turns * 2):
                # The order A, B, B, A balances drift between both.
                count = viewers if turn % 4 in (1, 2) else 0
                await feeds.resize(count)
                await asyncio.sleep(SETTLE_S)
                made.append(await _window(gateway.pid, connections, feeds, count, seconds))
            for one in connections:
                await one.close()
        await feeds.close()
    finally:
        await gateway.stop()
    return made


async def _window(pid: int, connections: list[BenchConnection], feeds: Viewers, count: int, seconds: float) -> Turn:
    tokens, cpu, read, start = _tokens(connections), precise_cpu_s(pid), feeds.read_bytes, time.perf_counter()
    await asyncio.sleep(seconds)
    tokens, cpu = _tokens(connections) - tokens, precise_cpu_s(pid) - cpu
    feed_bytes = (feeds.read_bytes - read) / (time.perf_counter() - start)
    return Turn(count, tokens, round(cpu / tokens * 1e6, 3), round(feed_bytes, 1))


def _tokens(connections: list[BenchConnection]) -> int:
    return sum(len(one.reply.texts) for one in connections)


def precise_cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its threads so far."""
    threads = list(Path(f"/proc/{pid}/task").glob("*/schedstat"))
    if not threads:
        return cpu_s([psutil.Process(pid)])
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def as_text(made: list[Turn], streams: int, viewers: int) -> str:
    """Format each turn, and the medians with their ratio."""
    lines = [f"{streams} streams", "viewers  tokens  µs/token  feed KiB/s"]
    for turn in made:
        feed = turn.feed_bytes_per_s / 1024
        lines.append(f"{turn.viewers:>7}  {turn.tokens:>6}  {turn.cpu_us_per_token:>8.2f}  {feed:>10.1f}")
    without, having = ([turn.cpu_us_per_token for turn in made if turn.viewers == count] for count in (0, viewers))
    pairs = [with_ / bare for bare, with_ in zip(without, having, strict=True)]
    lines.append(
        f"median {statistics.median(without):.2f} without, {statistics.median(having):.2f} with {viewers}; "
        f"with ÷ without {statistics.median(pairs):.3f} (pairs {min(pairs):.3f} to {max(pairs):.3f})"
    )
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every turn")
    options = parser.parse_args()
    print(machine(), file=sys.stderr)
    made = asyncio.run(measure(options.streams, options.viewers, options.turns, options.seconds))
    print(as_text(made, options.streams, options.viewers))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1))


if __name__ == "__main__":
    main()

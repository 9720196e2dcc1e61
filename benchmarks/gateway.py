"""CPU that the gateway spends on one streamed token.

    python -m benchmarks.gateway                        # 1, 8, 32 and 64 streams
    python -m benchmarks.gateway --streams 64 --seconds 20

The real gateway runs with a synthetic worker in place of a model: every step gives each stream one token, at the pace
of a real one. The clients are in this process. Once all streams run, the gateway's CPU time is read before and after a
steady window. `added` is the time from the worker's send to the client's receipt; `events/token` below 1 would mean
that tokens were merged because a client was slow.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path
from typing import Final

import msgspec
import psutil

from benchmarks.compare import machine
from benchmarks.engines import Server, Unavailable
from benchmarks.measure import cpu_s, until
from benchmarks.serve import numbers
from gateway.ctl.bench.closed_loop import (
    CHAT,
    COMPLETION,
    BenchConnection,
    BenchLoad,
    BenchRequest,
    Summary,
    run,
    summarize_ms,
    table,
)

# Step times of a busy machine, by the number of streams.
PACE_MS: Final = {1: 10.0, 8: 12.5, 32: 20.0, 64: 25.0}
START_S: Final = 60.0
SETTLE_S: Final = 1.0


class Cost(msgspec.Struct, frozen=True):
    """One window of steady streaming."""

    streams: int
    step_ms: float
    endpoint: str
    seconds: float
    tokens: int
    cpu_us_per_token: float
    kernel_us_per_token: float
    cpu_percent: float
    client_cpu_us_per_token: float
    events_per_token: float
    added_ms: Summary


class PacedGateway(Server):
    """The gateway with the synthetic worker."""

    name = "gateway"
    module = "gateway.main"

    def __init__(self, step_ms: float) -> None:
        super().__init__(Path("/"), START_S)
        self._step_ms = step_ms
        (self.home / "mlxd.toml").write_text(
            f'[server]\nport = {self.port}\nlog_level = "warning"\n\n'
            '[models.paced]\npath = "paced"\nmax_running = 256\npreload = true\n'
        )

    def command(self) -> list[str]:
        return [sys.executable, "-P", "-m", "benchmarks.paced_gateway", str(self.home), "--step-ms", str(self._step_ms)]

    def model_name(self) -> str:
        return "paced"


async def measure(streams: int, step_ms: float, seconds: float, endpoint: str) -> Cost:
    """Measure one window, with a gateway started for it alone. Raises Unavailable."""
    gateway = PacedGateway(step_ms)
    await gateway.start()
    connections = [BenchConnection(gateway.target) for _ in range(streams)]
    load = BenchLoad(gateway.target, gateway.model_name(), endpoint)
    body = load.body(BenchRequest("Hello", int((seconds + SETTLE_S + 10) / step_ms * 1000)))
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one.request(load.path, body)) for one in connections]
            running = list(zip(connections, tasks, strict=True))
            await until(lambda: all(one.reply.times or task.done() for one, task in running))
            await asyncio.sleep(SETTLE_S)
            cost = await _window(psutil.Process(gateway.pid), connections, step_ms, seconds, endpoint)
            if any(task.done() for task in tasks):
                raise Unavailable(f"a stream ended early: {connections[0].reply.error or connections[0].reply.body}")
            for one in connections:
                await one.close()
    finally:
        await gateway.stop()
    return cost


async def _window(
    process: psutil.Process, connections: list[BenchConnection], step_ms: float, seconds: float, endpoint: str
) -> Cost:
    first = [len(one.reply.texts) for one in connections]
    kernel = process.cpu_times().system
    cpu, own, start = cpu_s([process]), time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    cpu, own, wall = cpu_s([process]) - cpu, time.process_time() - own, time.perf_counter() - start
    kernel = process.cpu_times().system - kernel
    late: list[float] = []
    tokens = 0
    for one, begin in zip(connections, first, strict=True):
        # perf_counter and the worker's monotonic clock are the same clock on Linux and macOS.
        for text, arrived in zip(one.reply.texts[begin:], one.reply.times[begin:], strict=True):
            stamps = text.split()
            tokens += len(stamps)
            late.append(arrived - int(stamps[-1]) / 1e9)
    if not tokens:
        raise Unavailable("no token arrived in the window")
    return Cost(
        streams=len(connections),
        step_ms=step_ms,
        endpoint=endpoint,
        seconds=round(wall, 3),
        tokens=tokens,
        cpu_us_per_token=round(cpu / tokens * 1e6, 2),
        kernel_us_per_token=round(kernel / tokens * 1e6, 2),
        cpu_percent=round(cpu / wall * 100, 2),
        client_cpu_us_per_token=round(own / tokens * 1e6, 2),
        events_per_token=round(len(late) / tokens, 3),
        added_ms=summarize_ms(late),
    )


def as_table(costs: list[Cost]) -> str:
    header = (
        "streams",
        "step",
        "endpoint",
        "µs/token",
        "in kernel",
        "% of a core",
        "added p50",
        "p99 ms",
        "events/token",
        "client µs/token",
    )
    rows = [
        (
            str(cost.streams),
            f"{cost.step_ms:g} ms",
            cost.endpoint,
            f"{cost.cpu_us_per_token:.1f}",
            f"{cost.kernel_us_per_token:.1f}",
            f"{cost.cpu_percent:.2f}",
            f"{cost.added_ms.p50:.2f}",
            f"{cost.added_ms.p99:.2f}",
            f"{cost.events_per_token:.2f}",
            f"{cost.client_cpu_us_per_token:.1f}",
        )
        for cost in costs
    ]
    return table(header, rows)


async def measure_all(args: argparse.Namespace) -> list[Cost]:
    return [
        await measure(streams, args.step_ms or PACE_MS.get(streams, 25.0), args.seconds, endpoint)
        for endpoint in args.endpoint
        for streams in args.streams
    ]


def main() -> None:
    args = _arguments()
    try:
        costs = run(measure_all(args))
    except Unavailable as why:
        sys.exit(str(why))
    print(machine()["cpu"])
    print(as_table(costs))
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode({"machine": machine(), "costs": costs})))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gateway", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=numbers, default=sorted(PACE_MS))
    parser.add_argument("--step-ms", type=float, default=0.0, help="default: by the number of streams")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of the window")
    parser.add_argument("--endpoint", type=lambda text: text.split(","), default=[CHAT], help=f"{CHAT},{COMPLETION}")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()

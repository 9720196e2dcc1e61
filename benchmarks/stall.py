"""Delay that a long prompt causes to running streams, and to a short request that arrives after it.

    python -m benchmarks.stall                       # mlxd, 5m model
    python -m benchmarks.stall --bare-chunk 2048     # and the bare batch loop with that prefill chunk

Four streams run. Their inter-token time is taken while nothing else happens, then from the moment a long prompt arrives
until its first token. Only that window counts: over a whole run a stall drowns in thousands of ordinary gaps.
Then the same long prompt arrives at an idle server and a short request right after it; its time to first token is
compared with that of the same request alone.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec

from benchmarks import blas, models
from benchmarks.bare import Order
from benchmarks.compare import LOAD_TIMEOUT_S, machine
from benchmarks.engines import Bare, Mlxd, MlxLmServer, Server, Unavailable
from benchmarks.measure import until
from benchmarks.words import TokenPrompts, load_tokenizer
from gateway.ctl.bench.closed_loop import (
    BenchConnection,
    BenchLoad,
    BenchRequest,
    Summary,
    percentile,
    run,
    summarize_ms,
    table,
)

PATH: Final = "/v1/completions"
STREAMS: Final = 4
# Number of tokens that each stream gets before the measurement, and between its two windows.
SETTLE: Final = 16
SERVERS: Final[dict[str, type[Server]]] = {Mlxd.name: Mlxd, MlxLmServer.name: MlxLmServer}


class Stall(msgspec.Struct, frozen=True):
    """`alone` and `during` are inter-token times of the running streams. `ratio` is that of their p99."""

    engine: str
    alone: Summary
    during: Summary
    ratio: float
    long_ttft_ms: Summary
    short_alone_ms: Summary | None = None
    short_behind_ms: Summary | None = None


def gaps_between(times: Sequence[float], start: float, end: float) -> list[float]:
    """Return the gaps of one stream that touch the window: a stall is one long gap that exceeds it at both ends."""
    return [b - a for a, b in pairwise(times) if b > start and a < end]


def main() -> None:
    args = _arguments()
    folder = models.build(args.geometry, args.dtype)
    print(f"{machine()['cpu']} · BLAS: {blas.describe()}", flush=True)
    results = run(measure(args, folder))
    what = f"{STREAMS} streams, then a prompt of {args.long_tokens} tokens, {args.repeat} times"
    print(f"\n{args.geometry} {args.dtype}: {what}; ms")
    print(as_table(results))
    if args.json:
        result = {"machine": machine(), "geometry": args.geometry, "long_tokens": args.long_tokens, "results": results}
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(result)))


async def measure(args: argparse.Namespace, folder: Path) -> list[Stall]:
    """Measure each engine in turn; engines that cannot run are reported."""
    results: list[Stall] = []
    for name in args.engines:
        try:
            results.append(await measure_server(args, SERVERS[name], folder))
        except Unavailable as why:
            print(why, file=sys.stderr)
    for chunk in args.bare_chunk:
        results.append(await measure_bare(args, folder, chunk))  # noqa: PERF401 (one after the other)
    return results


async def measure_server(args: argparse.Namespace, kind: type[Server], folder: Path) -> Stall:
    server = kind(folder, LOAD_TIMEOUT_S)
    await server.start()
    try:
        prompts = _prompts(folder, args.seed)
        alone: list[float] = []
        during: list[float] = []
        long_ttft: list[float] = []
        await _disturb(server.load, prompts, args)  # warm-up
        for _ in range(args.repeat):
            before, inside, ttft = await _disturb(server.load, prompts, args)
            alone += before
            during += inside
            long_ttft.append(ttft)
        short_alone = [await _short(server.load, prompts) for _ in range(args.repeat)]
        short_behind = [await _short_behind(server.load, prompts, args.long_tokens) for _ in range(args.repeat)]
    finally:
        await server.stop()
    folded = _fold(kind.name, alone, during, long_ttft)
    return msgspec.structs.replace(
        folded, short_alone_ms=summarize_ms(short_alone), short_behind_ms=summarize_ms(short_behind)
    )


async def measure_bare(args: argparse.Namespace, folder: Path, chunk: int) -> Stall:
    bare = Bare(folder, LOAD_TIMEOUT_S)
    await bare.start()
    prompts = _prompts(folder, args.seed)
    alone: list[float] = []
    during: list[float] = []
    long_ttft: list[float] = []
    for turn in range(args.repeat + 1):
        order = Order(
            prompts.many([64] * STREAMS),
            max_tokens=[args.output_tokens] * STREAMS,
            concurrency=STREAMS + 1,
            prefill_chunk=chunk,
            late=prompts.make(args.long_tokens),
            late_after=STREAMS * args.output_tokens // 2,
        )
        answer = await bare.order(order)
        start, end = answer.inserted_s[STREAMS], answer.token_s[STREAMS][0]
        if turn:  # the first turn warms up
            for times in answer.token_s[:STREAMS]:
                alone += gaps_between(times, times[SETTLE], start)[:-1]
                during += gaps_between(times, start, end)
            long_ttft.append(end - start)
    await bare.stop()
    return _fold(f"bare, chunk {chunk}", alone, during, long_ttft)


async def _disturb(
    load: BenchLoad, prompts: TokenPrompts, args: argparse.Namespace
) -> tuple[list[float], list[float], float]:
    """Return the gaps alone, the gaps in the window, and the long prompt's time to first token."""
    connections = [BenchConnection(load.target) for _ in range(STREAMS + 1)]
    bodies = [load.body(BenchRequest(prompts.make(64), args.output_tokens)) for _ in range(STREAMS)]
    long_body = load.body(BenchRequest(prompts.make(args.long_tokens), 1))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one.request(PATH, body)) for one, body in zip(connections, bodies, strict=False)]
        running = list(zip(connections, tasks, strict=False))
        half = args.output_tokens // 2
        await until(lambda: all(len(one.reply.times) >= half or task.done() for one, task in running))
        long = await connections[STREAMS].request(PATH, long_body)
    for connection in connections:
        await connection.close()
    replies = [task.result() for task in tasks]
    for reply in (*replies, long):
        if not reply.ok or not reply.times:
            raise Unavailable(f"a request failed: HTTP {reply.status} {reply.error or reply.body[:300]!r}")
    start, end = long.sent, long.times[0]
    if any(reply.times[-1] < end for reply in replies):
        raise Unavailable("a stream ended before the long prompt was done; give more --output-tokens")
    alone = [gap for reply in replies for gap in gaps_between(reply.times, reply.times[SETTLE], start)[:-1]]
    during = [gap for reply in replies for gap in gaps_between(reply.times, start, end)]
    return alone, during, end - start


async def _short(load: BenchLoad, prompts: TokenPrompts) -> float:
    """Return the seconds to the first token of a short request."""
    connection = BenchConnection(load.target)
    reply = await connection.request(PATH, load.body(BenchRequest(prompts.make(20), 1)))
    await connection.close()
    if not reply.ok or not reply.times:
        raise Unavailable(f"a short request failed: HTTP {reply.status} {reply.error}")
    return reply.times[0] - reply.sent


async def _short_behind(load: BenchLoad, prompts: TokenPrompts, long_tokens: int) -> float:
    connection = BenchConnection(load.target)
    long_body = load.body(BenchRequest(prompts.make(long_tokens), 1))
    long = asyncio.ensure_future(connection.request(PATH, long_body))
    await asyncio.sleep(0.05)  # long enough for the server to have begun the long prompt
    seconds = await _short(load, prompts)
    await long
    await connection.close()
    return seconds


def _fold(engine: str, alone: list[float], during: list[float], long_ttft: list[float]) -> Stall:
    ratio = percentile(during, 99) / percentile(alone, 99)
    return Stall(engine, summarize_ms(alone), summarize_ms(during), round(ratio, 2), summarize_ms(long_ttft))


def _prompts(folder: Path, seed: int) -> TokenPrompts:
    return TokenPrompts(load_tokenizer(folder), seed)


def as_table(results: Sequence[Stall]) -> str:
    header = (
        "engine",
        "alone p50",
        "p99",
        "during p50",
        "p99",
        "max",
        "p99 ratio",
        "long TTFT",
        "short alone",
        "short behind",
    )
    rows: list[list[str]] = []
    for one in results:
        marks = (one.alone.p50, one.alone.p99, one.during.p50, one.during.p99, one.during.max)
        shorts = [f"{part.p50:.1f}" if part else "" for part in (one.short_alone_ms, one.short_behind_ms)]
        rows.append(
            [one.engine, *(f"{mark:.1f}" for mark in marks), f"{one.ratio:.2f}", f"{one.long_ttft_ms.p50:.0f}", *shorts]
        )
    return table(header, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="stall", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--geometry", default="5m", choices=sorted(models.GEOMETRIES))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--engines", type=lambda text: [part for part in text.split(",") if part], default=[Mlxd.name])
    parser.add_argument(
        "--bare-chunk", type=int, action="append", default=[], help="also the bare loop with this prefill chunk"
    )
    parser.add_argument("--long-tokens", type=int, default=1500)
    parser.add_argument(
        "--output-tokens", type=int, default=500, help="of each running stream; the prompt arrives half-way"
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    for name in args.engines:
        if name not in SERVERS:
            parser.error(f"no engine {name}; there are {', '.join(SERVERS)}")
    return args


if __name__ == "__main__":
    main()

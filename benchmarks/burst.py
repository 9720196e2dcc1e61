"""A thousand clients that connect in the same instant: how many are answered, and how.

    python -m benchmarks.burst                                       # starts mlxd with the 5m model
    python -m benchmarks.burst --url http://127.0.0.1:8484 --model demo

All sockets connect at once, then each sends one short streaming request. What counts: every client gets a 200, or a 429
or 503 with Retry-After; no connection is refused, reset or cut.
"""

import argparse
import asyncio
import resource
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

from benchmarks import models
from benchmarks.compare import LOAD_TIMEOUT_S
from benchmarks.engines import Mlxd, Unavailable
from benchmarks.serve import first_model, parse_url
from gateway.ctl.bench.closed_loop import BenchConnection, BenchLoad, BenchRequest, Reply, Summary, run, summarize_ms


class Burst(msgspec.Struct, frozen=True):
    """Result of one burst. `outcomes` counts clients by status or, without a complete answer, by the error."""

    clients: int
    outcomes: dict[str, int]
    without_retry_after: int
    wall_s: float
    answered_ms: Summary


def main() -> None:
    args = _arguments()
    _raise_file_limit(args.clients + 200)
    try:
        result = run(against_url(args) if args.url else against_own(args))
    except Unavailable as why:
        sys.exit(str(why))
    print(f"{result.clients} clients, {result.wall_s:.1f} s until the last answer")
    for outcome, count in sorted(result.outcomes.items()):
        print(f"  {outcome}: {count}")
    print(f"  refusals without Retry-After: {result.without_retry_after}")
    print(f"  answered after ms: p50 {result.answered_ms.p50:.0f}, p99 {result.answered_ms.p99:.0f}")
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    bad = result.without_retry_after + sum(
        n for name, n in result.outcomes.items() if name not in ("200", "429", "503")
    )
    sys.exit(1 if bad else 0)


async def against_own(args: argparse.Namespace) -> Burst:
    server = Mlxd(models.build("5m"), LOAD_TIMEOUT_S)
    await server.start()
    try:
        return await burst(server.load, args.clients, args.output_tokens)
    finally:
        await server.stop()


async def against_url(args: argparse.Namespace) -> Burst:
    target = parse_url(args.url, args.api_key)
    return await burst(BenchLoad(target, args.model or await first_model(target)), args.clients, args.output_tokens)


async def burst(load: BenchLoad, clients: int, output_tokens: int) -> Burst:
    """Send one request from each of `clients` connections at the same time."""
    bodies = [load.body(BenchRequest(f"client {at} says", output_tokens)) for at in range(clients)]
    connections = [BenchConnection(load.target) for _ in range(clients)]
    start = time.perf_counter()
    replies = await asyncio.gather(
        *(one.request("/v1/completions", body, 300.0) for one, body in zip(connections, bodies, strict=True))
    )
    wall_s = time.perf_counter() - start
    for connection in connections:
        await connection.close()
    refused = [reply for reply in replies if reply.status in (429, 503)]
    return Burst(
        clients=clients,
        outcomes=dict(Counter(_outcome(reply) for reply in replies)),
        without_retry_after=sum("retry-after" not in reply.headers for reply in refused),
        wall_s=round(wall_s, 3),
        answered_ms=summarize_ms([reply.ended - reply.sent for reply in replies if reply.status]),
    )


def _outcome(reply: Reply) -> str:
    return f"{reply.status or 'no answer'}: {reply.error}" if reply.error else str(reply.status)


def _raise_file_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="burst", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="", help="a running server; without it mlxd is started")
    parser.add_argument("--model", default="")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--output-tokens", type=int, default=4)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()

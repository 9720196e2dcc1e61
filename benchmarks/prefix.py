"""What a known beginning of a prompt is worth: time to first token cold, from memory, and from disk after a restart.

    python -m benchmarks.prefix                                  # mlxd and mlx_lm.server, 50m, 1k, 4k and 16k tokens
    python -m benchmarks.prefix --tokens 1024,4096 --engines mlxd
    python -m benchmarks.prefix --look-up                        # only the look-up of 100k tokens, no server

For each length: a prompt nobody has seen (cold), the same again (memory), requests at once that share it as a prefix
which nobody has seen (together), and the first one again after the server was stopped and started (restart). Every
answer to the same prompt must be the same text.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from benchmarks import blas, models
from benchmarks.client import Connection, Reply, run
from benchmarks.compare import LOAD_TIMEOUT_S, machine
from benchmarks.engines import Mlxd, MlxLmServer, Server, Unavailable
from benchmarks.load import Job
from benchmarks.measure import table
from benchmarks.words import Prompts, load_tokenizer

PATH: Final = "/v1/completions"
TOKENS: Final = (1024, 4096, 16384)
OUTPUT_TOKENS: Final = 8
SUFFIX_TOKENS: Final = 24
LOOK_UP_TOKENS: Final = 100_000
REPEAT: Final = 5


class Cached(Mlxd):
    """mlxd with a disk cache."""

    def __init__(self, model: Path, load_timeout_s: float) -> None:
        super().__init__(model, load_timeout_s)
        with (self.home / "mlxd.toml").open("a") as config:
            config.write('cache = { ram = "4GiB", disk = "8GiB" }\n')


SERVERS: Final[dict[str, type[Server]]] = {Mlxd.name: Cached, MlxLmServer.name: MlxLmServer}


class Prefix(msgspec.Struct, frozen=True):
    """Seconds to the first token. `together` is until the last of `copies` requests has its first. None: not measured.

    `cached` is what `usage` said in memory and after the restart; `same` whether all answers to one prompt agreed.
    """

    engine: str
    tokens: int
    cold_s: float
    memory_s: float
    restart_s: float | None
    copies: int
    together_s: float
    cached: tuple[int, int]
    same: bool


class LookUp(msgspec.Struct, frozen=True):
    """Seconds for one look-up of a prompt that leaves a known one half way."""

    tokens: int
    mlxd_s: float
    mlx_lm_s: float


def main() -> None:
    args = _arguments()
    print(f"{machine()['cpu']} · BLAS: {blas.describe()}", flush=True)
    look_up = measure_look_up()
    print(
        f"look-up of {look_up.tokens} tokens that diverge half way: mlxd {look_up.mlxd_s * 1e3:.2f} ms, "
        f"mlx-lm's LRUPromptCache {look_up.mlx_lm_s * 1e3:.0f} ms",
        flush=True,
    )
    if args.look_up:
        return
    folder = models.build(args.geometry, args.dtype)
    results: list[Prefix] = run(measure(args, folder))
    print(f"\n{args.geometry} {args.dtype}, TTFT in seconds; {args.copies} requests at once share a new prefix")
    print(as_table(results))
    if args.json:
        result = {"machine": machine(), "geometry": args.geometry, "look_up": look_up, "results": results}
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(result)))


async def measure(args: argparse.Namespace, folder: Path) -> list[Prefix]:
    """Each engine in turn; those that cannot run say so."""
    results: list[Prefix] = []
    for name in args.engines:
        try:
            results += await measure_server(args, SERVERS[name](folder, LOAD_TIMEOUT_S), folder)
        except Unavailable as why:
            print(why, file=sys.stderr)
            if SERVERS[name] is Cached:
                print("mlxd is measured without a disk cache", file=sys.stderr)
                results += await measure_server(args, Mlxd(folder, LOAD_TIMEOUT_S), folder)
    return results


async def measure_server(args: argparse.Namespace, server: Server, folder: Path) -> list[Prefix]:
    prompts = Prompts(load_tokenizer(folder), args.seed)
    texts = {tokens: prompts.make(tokens) for tokens in args.tokens}
    first: dict[int, tuple[Reply, list[Reply]]] = {}
    together: dict[int, float] = {}
    await server.start()
    try:
        await ask(server, prompts.make(64))
        for tokens, text in texts.items():
            cold = await ask(server, text)
            first[tokens] = cold, [await ask(server, text) for _ in range(args.repeat)]
            together[tokens] = await ask_together(server, prompts, tokens, args.copies)
        await server.stop(keep=True)
        await server.start()
        await ask(server, prompts.make(64))
        again = {tokens: await ask(server, text) for tokens, text in texts.items()}
    finally:
        await server.stop()
    return [
        Prefix(
            engine=server.name,
            tokens=tokens,
            cold_s=ttft(cold),
            memory_s=statistics.median(ttft(reply) for reply in warm),
            restart_s=ttft(again[tokens]),
            copies=args.copies,
            together_s=together[tokens],
            cached=(warm[0].cached_tokens, again[tokens].cached_tokens),
            same=len({reply.text for reply in (cold, *warm, again[tokens])}) == 1,
        )
        for tokens, (cold, warm) in first.items()
    ]


async def ask(server: Server, text: str) -> Reply:
    connection = Connection(server.target)
    reply = await connection.request(PATH, server.load.body(Job(text, OUTPUT_TOKENS)))
    await connection.close()
    if not reply.ok or not reply.times:
        raise Unavailable(f"a request failed: HTTP {reply.status} {reply.error or reply.body[:300]!r}")
    return reply


async def ask_together(server: Server, prompts: Prompts, tokens: int, copies: int) -> float:
    """Seconds until all of them have their first token."""
    shared = prompts.make(tokens)
    replies = await asyncio.gather(*(ask(server, f"{shared} {prompts.make(SUFFIX_TOKENS)}") for _ in range(copies)))
    return max(reply.times[0] for reply in replies) - min(reply.sent for reply in replies)


def ttft(reply: Reply) -> float:
    return reply.times[0] - reply.sent


def measure_look_up(tokens: int = LOOK_UP_TOKENS) -> LookUp:
    """In this process, on the CPU; the KV is a dummy."""
    import mlx.core as mx
    import numpy as np
    from mlx_lm.models.cache import KVCache, LRUPromptCache

    from worker.kv import Layout
    from worker.prefix_cache import PrefixCache

    ids = [number * 7919 % 30_000 for number in range(tokens)]
    diverging = [*ids[: tokens // 2], *(30_000 + number for number in ids[tokens // 2 :])]
    caches = [KVCache.from_state((mx.zeros((1, 1, tokens, 1)), mx.zeros((1, 1, tokens, 1)), tokens))]
    ours = PrefixCache(Layout.of(lambda: [KVCache()]), 1 << 30)
    ours.store(np.array(ids, dtype=np.int32), caches)
    theirs = LRUPromptCache()
    theirs.insert_cache("model", ids, caches)
    wanted = np.array(diverging, dtype=np.int32)
    spent: list[float] = []
    for _ in range(REPEAT):
        started = time.perf_counter()
        assert ours.longest(wanted) == tokens // 2
        spent.append(time.perf_counter() - started)
    started = time.perf_counter()
    theirs.fetch_nearest_cache("model", diverging)
    return LookUp(tokens, statistics.median(spent), time.perf_counter() - started)


def as_table(results: Sequence[Prefix]) -> str:
    header = (
        "engine",
        "tokens",
        "cold",
        "memory",
        "÷ cold",
        "restart",
        "÷ cold",
        "cached",
        "together",
        "÷ cold",
        "same",
    )
    rows = [
        (
            result.engine,
            str(result.tokens),
            f"{result.cold_s:.2f}",
            f"{result.memory_s:.3f}",
            _fraction(result.memory_s, result.cold_s),
            "-" if result.restart_s is None else f"{result.restart_s:.3f}",
            "-" if result.restart_s is None else _fraction(result.restart_s, result.cold_s),
            "/".join(map(str, result.cached)),
            f"{result.together_s:.2f}",
            f"{result.together_s / result.cold_s:.2f}",
            "yes" if result.same else "NO",
        )
        for result in results
    ]
    return table(header, rows)


def _fraction(part: float, whole: float) -> str:
    return f"1/{whole / part:.0f}" if part < whole / 2 else f"{part / whole:.2f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="50m", choices=sorted(models.GEOMETRIES))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--tokens", default=TOKENS, type=lambda text: tuple(int(part) for part in text.split(",")))
    parser.add_argument("--engines", default=tuple(SERVERS), type=lambda text: tuple(text.split(",")))
    parser.add_argument("--copies", default=8, type=int, help="requests at once that share a prefix")
    parser.add_argument("--repeat", default=REPEAT, type=int, help="requests from memory; their median counts")
    parser.add_argument("--seed", default=1, type=int)
    parser.add_argument("--look-up", action="store_true", help="only the look-up")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if unknown := set(args.engines) - set(SERVERS):
        parser.error(f"unknown engines: {', '.join(sorted(unknown))}")
    return args


if __name__ == "__main__":
    main()

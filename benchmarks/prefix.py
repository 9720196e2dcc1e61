"""Savings by a cached prefix of a prompt: time to first token cold, from memory, from disk, after a restart.

    python -m benchmarks.prefix                                  # 50m; 1k, 4k and 16k tokens, over HTTP
    python -m benchmarks.prefix --tokens 1024,4096 --engines mlxd
    python -m benchmarks.prefix --look-up                        # only the look-up of 100k tokens, no model

For each length: a prompt nobody has seen (cold), the same again (memory), again after the worker was replaced, so that
nothing is left in memory (disk), and once more after the daemon was stopped and started (restart). Requests at once
that share a new prefix are measured up to `--together-tokens` only: a server that computes it for each takes long.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from benchmarks import blas, models
from benchmarks.compare import LOAD_TIMEOUT_S, machine
from benchmarks.engines import Mlxd, MlxLmServer, Server, Unavailable
from benchmarks.words import TokenPrompts, load_tokenizer
from gateway.ctl.bench.closed_loop import BenchConnection, BenchRequest, Reply, run, table

PATH: Final = "/v1/completions"
TOKENS: Final = (1024, 4096, 16384)
TOGETHER_TOKENS: Final = 1024
OUTPUT_TOKENS: Final = 8
SUFFIX_TOKENS: Final = 24
LOOK_UP_TOKENS: Final = 100_000
REPEAT: Final = 5
# A cold prompt of 16k tokens takes minutes on a CPU, and more beside other load.
ANSWER_S: Final = 3600.0


class Cached(Mlxd):
    """mlxd with a disk cache."""

    def __init__(self, model: Path, load_timeout_s: float) -> None:
        super().__init__(model, load_timeout_s)
        with (self.home / "mlxd.toml").open("a") as config:
            config.write('cache = { ram = "4GiB", disk = "8GiB" }\n')

    def forget(self) -> None:
        """Replace the worker: its cache in memory is lost, its cache on disk remains."""
        command = (Path(sys.executable).with_name("mlxctl"), "restart", self.model_name())
        subprocess.run(command, env=self.environment(), stdout=subprocess.DEVNULL, check=True, timeout=ANSWER_S)


SERVERS: Final[dict[str, Callable[[Path], Server]]] = {
    Cached.name: lambda model: Cached(model, LOAD_TIMEOUT_S),
    MlxLmServer.name: lambda model: MlxLmServer(model, LOAD_TIMEOUT_S),
}


class Answer(msgspec.Struct, frozen=True):
    """Answer to one prompt. `ttft_s` counts from the start of the first prompt of the same batch."""

    ttft_s: float
    text: str
    cached: int


class Prefix(msgspec.Struct, frozen=True):
    """Seconds to the first token; None: not measured. `together_s` is until the last of `copies` requests has its.

    `cached` is the tokens said to be cached in memory, from disk, and after the restart; `same`: all answers agreed.
    """

    engine: str
    tokens: int
    cold_s: float
    memory_s: float
    disk_s: float | None
    restart_s: float | None
    copies: int
    together_s: float | None
    cached: tuple[int, int, int]
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
    """Measure each engine in turn; engines that cannot run are reported."""
    results: list[Prefix] = []
    for name in args.engines:
        try:
            results += await measure_one(args, SERVERS[name](folder), folder)
        except Unavailable as why:
            print(why, file=sys.stderr)
    return results


async def measure_one(args: argparse.Namespace, server: Server, folder: Path) -> list[Prefix]:
    """Measure one engine; an engine without disk cache is not asked again after its memory is gone."""
    prompts = TokenPrompts(load_tokenizer(folder), args.seed)
    texts = {tokens: prompts.make(tokens) for tokens in args.tokens}
    seen: dict[int, list[Answer]] = {}
    disk: dict[int, Answer] = {}
    again: dict[int, Answer] = {}
    together: dict[int, float] = {}
    await server.start()
    try:
        await ask(server, [prompts.make(64)])
        for tokens, text in texts.items():
            seen[tokens] = [(await ask(server, [text]))[0] for _ in range(1 + args.repeat)]
            print(f"{server.name}, {tokens} tokens: cold in {seen[tokens][0].ttft_s:.1f} s", file=sys.stderr)
            if tokens <= args.together_tokens:
                together[tokens] = await share(server, prompts, tokens, args.copies)
        if isinstance(server, Cached):
            server.forget()
            disk = await ask_each(server, prompts, texts)
            await server.stop(keep=True)
            await server.start()
            again = await ask_each(server, prompts, texts)
    finally:
        await server.stop()
    return [
        _fold(server.name, tokens, seen[tokens], disk.get(tokens), again.get(tokens), together.get(tokens), args.copies)
        for tokens in args.tokens
    ]


async def ask(server: Server, prompts: Sequence[str]) -> list[Answer]:
    """Send prompts at once."""

    async def one(prompt: str) -> Reply:
        connection = BenchConnection(server.target)
        reply = await connection.request(PATH, server.load.body(BenchRequest(prompt, OUTPUT_TOKENS)), ANSWER_S)
        await connection.close()
        if not reply.ok or not reply.times:
            raise Unavailable(f"a request failed: HTTP {reply.status} {reply.error or reply.body[:300]!r}")
        return reply

    replies = await asyncio.gather(*(one(prompt) for prompt in prompts))
    sent = min(reply.sent for reply in replies)
    return [Answer(reply.times[0] - sent, reply.text, reply.cached_tokens) for reply in replies]


async def ask_each(server: Server, prompts: TokenPrompts, texts: dict[int, str]) -> dict[int, Answer]:
    """Return the answers of a new worker to each prompt, after a prompt that is in no cache."""
    await ask(server, [prompts.make(64)])
    return {tokens: (await ask(server, [text]))[0] for tokens, text in texts.items()}


async def share(server: Server, prompts: TokenPrompts, tokens: int, copies: int) -> float:
    """Return the seconds until the last of several requests that share a new prefix has its first token."""
    shared = prompts.make(tokens)
    answers = await ask(server, [f"{shared} {prompts.make(SUFFIX_TOKENS)}" for _ in range(copies)])
    return max(answer.ttft_s for answer in answers)


def _fold(
    engine: str,
    tokens: int,
    seen: list[Answer],
    disk: Answer | None,
    again: Answer | None,
    together_s: float | None,
    copies: int,
) -> Prefix:
    cold, *warm = seen
    later = [answer for answer in (disk, again) if answer is not None]
    return Prefix(
        engine=engine,
        tokens=tokens,
        cold_s=cold.ttft_s,
        memory_s=statistics.median(answer.ttft_s for answer in warm),
        disk_s=disk.ttft_s if disk else None,
        restart_s=again.ttft_s if again else None,
        copies=copies,
        together_s=together_s,
        cached=(warm[0].cached, disk.cached if disk else 0, again.cached if again else 0),
        same=len({answer.text for answer in (*seen, *later)}) == 1,
    )


def measure_look_up(tokens: int = LOOK_UP_TOKENS) -> LookUp:
    """Measure look-ups in this process, on the CPU; the KV is a dummy."""
    import mlx.core as mx
    import numpy as np
    from mlx_lm.models.cache import KVCache, LRUPromptCache

    from worker.kv.spans_and_checkpoints import KvLayout
    from worker.prefix_cache.cache_and_eviction import PrefixCache

    ids = [number * 7919 % 30_000 for number in range(tokens)]
    diverging = [*ids[: tokens // 2], *(30_000 + number for number in ids[tokens // 2 :])]
    caches = [KVCache.from_state((mx.zeros((1, 1, tokens, 1)), mx.zeros((1, 1, tokens, 1)), tokens))]
    ours = PrefixCache(KvLayout.of(lambda: [KVCache()]), 1 << 30)
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
    times = ("memory", "÷ cold", "disk", "÷ cold", "restart", "÷ cold")
    header = ("engine", "tokens", "cold", *times, "cached", "together", "÷ cold", "same text")
    rows: list[list[str]] = []
    for result in results:
        row = [result.engine, str(result.tokens), f"{result.cold_s:.2f}"]
        for seconds in (result.memory_s, result.disk_s, result.restart_s):
            row += ["-", "-"] if seconds is None else [f"{seconds:.3f}", _fraction(seconds, result.cold_s)]
        row.append("/".join(map(str, result.cached)))
        together_s = result.together_s
        row += ["-", "-"] if together_s is None else [f"{together_s:.2f}", f"{together_s / result.cold_s:.2f}"]
        row.append("yes" if result.same else "NO")
        rows.append(row)
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
    parser.add_argument("--together-tokens", default=TOGETHER_TOKENS, type=int, help="the longest prefix shared so")
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

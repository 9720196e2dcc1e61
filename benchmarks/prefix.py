"""What a known beginning of a prompt is worth: time to first token cold, from memory, from disk, after a restart.

    python -m benchmarks.prefix                                  # 50m; 1k, 4k and 16k tokens
    python -m benchmarks.prefix --tokens 1024,4096 --engines mlxd,mlx_lm.server
    python -m benchmarks.prefix --look-up                        # only the look-up of 100k tokens, no model

For each length: a prompt nobody has seen (cold), the same again (memory), again after memory was emptied (disk),
requests at once that share a new prefix (together), and the first one again after a stop and a start (restart).
`worker` is the engine of mlxd with its disk cache and nothing around it; the others answer over HTTP.
"""

import argparse
import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from benchmarks import blas, models
from benchmarks.client import Connection, Reply, run
from benchmarks.compare import LOAD_TIMEOUT_S, machine
from benchmarks.engines import Mlxd, MlxLmServer, Server, Unavailable
from benchmarks.load import Job
from benchmarks.measure import table
from benchmarks.prefix_worker import Answer, Order
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


class Subject(Protocol):
    """What is measured. `ask` sends prompts at once; `forget` drops what is in memory, if that can be asked for."""

    name: str

    async def start(self) -> None: ...

    async def ask(self, prompts: Sequence[str]) -> list[Answer]: ...

    async def forget(self) -> bool: ...

    async def stop(self, is_last: bool) -> None: ...


class Http:
    """A server."""

    def __init__(self, server: Server) -> None:
        self.name = server.name
        self._server = server

    async def start(self) -> None:
        await self._server.start()

    async def ask(self, prompts: Sequence[str]) -> list[Answer]:
        replies = await asyncio.gather(*(self._reply(prompt) for prompt in prompts))
        sent = min(reply.sent for reply in replies)
        return [Answer(reply.times[0] - sent, reply.text, reply.cached_tokens) for reply in replies]

    async def forget(self) -> bool:
        return False

    async def stop(self, is_last: bool) -> None:
        await self._server.stop(keep=not is_last)

    async def _reply(self, prompt: str) -> Reply:
        connection = Connection(self._server.target)
        reply = await connection.request(PATH, self._server.load.body(Job(prompt, OUTPUT_TOKENS)))
        await connection.close()
        if not reply.ok or not reply.times:
            raise Unavailable(f"a request failed: HTTP {reply.status} {reply.error or reply.body[:300]!r}")
        return reply


class Worker:
    """A worker's engine alone, with a disk cache."""

    name = "worker"

    def __init__(self, model: Path) -> None:
        self._model = model
        self._disk = tempfile.mkdtemp(prefix="mlxd-bench-", dir="/tmp")
        self._process: asyncio.subprocess.Process | None = None
        self._forgets = False

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "benchmarks.prefix_worker", str(self._model), self._disk),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=blas.environment(),
            limit=1 << 30,
        )
        await self._line()

    async def ask(self, prompts: Sequence[str]) -> list[Answer]:
        assert self._process is not None
        assert self._process.stdin is not None
        order = Order(list(prompts), OUTPUT_TOKENS, self._forgets)
        self._forgets = False
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        return msgspec.json.decode(await self._line(), type=list[Answer])

    async def forget(self) -> bool:
        self._forgets = True
        return True

    async def stop(self, is_last: bool) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        if is_last:
            shutil.rmtree(self._disk)

    async def _line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise Unavailable("the worker died; its message is above")
        return line


SUBJECTS: Final[dict[str, Callable[[Path], Subject]]] = {
    "worker": Worker,
    "mlxd": lambda model: Http(Cached(model, LOAD_TIMEOUT_S)),
    "mlx_lm.server": lambda model: Http(MlxLmServer(model, LOAD_TIMEOUT_S)),
}


class Prefix(msgspec.Struct, frozen=True):
    """Seconds to the first token; None: not measured. `together_s` is until the last of `copies` requests has its.

    `cached` is the tokens said to be cached in memory, from disk, and after the restart; `same`: all answers agreed.
    """

    engine: str
    tokens: int
    cold_s: float
    memory_s: float
    disk_s: float | None
    restart_s: float
    copies: int
    together_s: float
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
    """Each engine in turn; those that cannot run say so."""
    results: list[Prefix] = []
    for name in args.engines:
        try:
            results += await measure_one(args, SUBJECTS[name](folder), folder)
        except Unavailable as why:
            print(why, file=sys.stderr)
            if name == Mlxd.name:
                print("mlxd is measured without a disk cache", file=sys.stderr)
                results += await measure_one(args, Http(Mlxd(folder, LOAD_TIMEOUT_S)), folder)
    return results


async def measure_one(args: argparse.Namespace, subject: Subject, folder: Path) -> list[Prefix]:
    prompts = Prompts(load_tokenizer(folder), args.seed)
    texts = {tokens: prompts.make(tokens) for tokens in args.tokens}
    seen: dict[int, list[Answer]] = {tokens: [] for tokens in args.tokens}
    from_disk: dict[int, Answer | None] = {}
    together: dict[int, float] = {}
    await subject.start()
    await subject.ask([prompts.make(64)])
    for tokens, text in texts.items():
        for _ in range(1 + args.repeat):
            seen[tokens] += await subject.ask([text])
        from_disk[tokens] = (await subject.ask([text]))[0] if await subject.forget() else None
        shared = prompts.make(tokens)
        answers = await subject.ask([f"{shared} {prompts.make(SUFFIX_TOKENS)}" for _ in range(args.copies)])
        together[tokens] = max(answer.ttft_s for answer in answers)
    await subject.stop(is_last=False)
    await subject.start()
    await subject.ask([prompts.make(64)])
    again = {tokens: (await subject.ask([text]))[0] for tokens, text in texts.items()}
    await subject.stop(is_last=True)
    return [
        _fold(subject.name, tokens, seen[tokens], from_disk[tokens], again[tokens], together[tokens], args.copies)
        for tokens in args.tokens
    ]


def _fold(
    engine: str, tokens: int, seen: list[Answer], disk: Answer | None, again: Answer, together_s: float, copies: int
) -> Prefix:
    cold, *warm = seen
    everything = [*seen, again, *([disk] if disk else [])]
    return Prefix(
        engine=engine,
        tokens=tokens,
        cold_s=cold.ttft_s,
        memory_s=statistics.median(answer.ttft_s for answer in warm),
        disk_s=disk.ttft_s if disk else None,
        restart_s=again.ttft_s,
        copies=copies,
        together_s=together_s,
        cached=(warm[0].cached, disk.cached if disk else 0, again.cached),
        same=len({answer.text for answer in everything}) == 1,
    )


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
    times = ("memory", "÷ cold", "disk", "÷ cold", "restart", "÷ cold")
    header = ("engine", "tokens", "cold", *times, "cached", "together", "÷ cold", "same text")
    rows: list[list[str]] = []
    for result in results:
        row = [result.engine, str(result.tokens), f"{result.cold_s:.2f}"]
        for seconds in (result.memory_s, result.disk_s, result.restart_s):
            row += ["-", "-"] if seconds is None else [f"{seconds:.3f}", _fraction(seconds, result.cold_s)]
        row += ["/".join(map(str, result.cached)), f"{result.together_s:.2f}"]
        row += [f"{result.together_s / result.cold_s:.2f}", "yes" if result.same else "NO"]
        rows.append(row)
    return table(header, rows)


def _fraction(part: float, whole: float) -> str:
    return f"1/{whole / part:.0f}" if part < whole / 2 else f"{part / whole:.2f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="50m", choices=sorted(models.GEOMETRIES))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--tokens", default=TOKENS, type=lambda text: tuple(int(part) for part in text.split(",")))
    parser.add_argument("--engines", default=tuple(SUBJECTS), type=lambda text: tuple(text.split(",")))
    parser.add_argument("--copies", default=8, type=int, help="requests at once that share a prefix")
    parser.add_argument("--repeat", default=REPEAT, type=int, help="requests from memory; their median counts")
    parser.add_argument("--seed", default=1, type=int)
    parser.add_argument("--look-up", action="store_true", help="only the look-up")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if unknown := set(args.engines) - set(SUBJECTS):
        parser.error(f"unknown engines: {', '.join(sorted(unknown))}")
    return args


if __name__ == "__main__":
    main()

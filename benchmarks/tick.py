"""One forward pass a tick, before and after by turns: a long prompt beside streams, short requests.

    python -m benchmarks.tick qwen3-8b --dtype bfloat16
    python -m benchmarks.tick 5m --steps 4 --long 100 --requests 1 --clients 2 --turns 1

Weights are random and stay in memory. *Before* runs chunks of prompts in forward passes of their own, as
`--separate` does alone.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from benchmarks import models
from benchmarks.serve import numbers
from gateway.ctl.bench.closed_loop import percentile, table

if TYPE_CHECKING:
    from worker.engine.row import Row, Token

BEFORE: Final = "before"
AFTER: Final = "after"
# Number of steps before a measurement; they compile.
WARM: Final = 8
STREAMS: Final = 4
PROMPT: Final = 70
OUTPUT: Final = 64


def main() -> None:
    args = _arguments()
    model, vocab = random_model(args.geometry, args.dtype)
    print(f"tick · {args.geometry} {args.dtype}, attention by {checked(model, vocab)}", flush=True)
    for name in args.what:
        began = time.perf_counter()
        {"stall": stall, "short": short}[name](model, vocab, args)
        print(f"({name}: {time.perf_counter() - began:.0f} s)\n", flush=True)


def stall(model: Any, vocab: int, args: argparse.Namespace) -> None:
    """Measure inter-token times of streams alone, and while a long prompt runs."""
    lines: list[tuple[str, ...]] = []
    gaps: dict[tuple[str, str], list[float]] = {}
    first: dict[str, list[float]] = {BEFORE: [], AFTER: []}
    for turn in range(args.turns + 1):
        for way in _ways(args):
            alone, during, ttft = _stalled(model, vocab, args.long, way, args.steps)
            if turn:  # the first turn compiles
                gaps.setdefault((way, "alone"), []).extend(alone)
                gaps.setdefault((way, "during"), []).extend(during)
                first[way].append(ttft)
    for way in _ways(args):
        alone, during = gaps[way, "alone"], gaps[way, "during"]
        marks = (percentile(alone, 50), percentile(alone, 99), percentile(during, 50), percentile(during, 99))
        ratio = f"{marks[3] / marks[1]:.2f}"
        lines.append((way, *(f"{1e3 * mark:.1f}" for mark in marks), ratio, f"{statistics.median(first[way]):.3f}"))
    print(table(("", "alone p50", "p99", "during p50", "p99", "p99 ratio", "long TTFT s"), lines))


def short(model: Any, vocab: int, args: argparse.Namespace) -> None:
    """Measure tokens per second of short requests that come and go."""
    lines: list[tuple[str, ...]] = []
    for clients in args.clients:
        rates: dict[str, list[tuple[float, float]]] = {BEFORE: [], AFTER: []}
        for turn in range(args.turns + 1):
            for way in _ways(args):
                rate = _closed_loop(model, vocab, clients, args.requests if turn else 2, way)
                if turn:
                    rates[way].append(rate)
        wall, cpu = ({way: statistics.median(each[at] for each in rates[way]) for way in _ways(args)} for at in (0, 1))
        ratios = [f"{each[AFTER] / each[BEFORE]:.2f}" if len(each) > 1 else "" for each in (wall, cpu)]
        lines.append((str(clients), *(f"{rate:.0f}" for rate in wall.values()), *ratios))
    print(table(("clients", *(f"{way}, tokens/s" for way in _ways(args)), "× wall", "× CPU"), lines))


def _ways(args: argparse.Namespace) -> list[str]:
    return [BEFORE] if args.separate else [BEFORE, AFTER]


class Loop:
    """Batch with its chunking policy, ticked as the engine does."""

    def __init__(self, model: Any, way: str) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        from worker.engine.batch import Batch
        from worker.engine.scheduling.pacing import ChunkPolicy
        from worker.kv.spans_and_checkpoints import KvLayout
        from worker.prefix_cache.cache_and_eviction import PrefixCache

        self.batch = Batch(model, (), PrefixCache(KvLayout.of(lambda: make_prompt_cache(model)), 0))
        self._policy = ChunkPolicy(512, can_fuse=way == AFTER)

    def tick(self) -> "list[Token]":
        batch = self.batch
        chunk = self._policy.chunk(batch.prefilling, batch.decoding, batch.longest_prefill)
        tick = batch.step(chunk.tokens, is_fused=chunk.is_fused)
        for timed in tick.timed:
            self._policy.observe(timed)
        return tick.tokens

    def teach(self, prompts: Sequence[int], vocab: int) -> None:
        """Let the policy measure, as in an engine that has served for a while."""
        rows = [row_of(at, PROMPT, 4096, vocab) for at in range(STREAMS)]
        for row in rows:
            self.batch.insert(row)
        for length in prompts:
            for _ in range(WARM):
                self.tick()
            row = row_of(STREAMS, length, 2, vocab)
            self.batch.insert(row)
            while row.sequence is not None:
                self.tick()
        for row in rows:
            self.batch.remove(row)


def _stalled(model: Any, vocab: int, long: int, way: str, count: int) -> tuple[list[float], list[float], float]:
    loop = Loop(model, way)
    loop.teach((long, long), vocab)
    for at in range(STREAMS):
        loop.batch.insert(row_of(at, 64 + 7 * at, 4096, vocab))
    while loop.batch.prefilling:
        loop.tick()
    alone = _step_times(loop.tick, 3 * count)
    late = row_of(STREAMS, long, 2, vocab)
    began = before = time.perf_counter()
    loop.batch.insert(late)
    during: list[float] = []
    is_there = False
    while not is_there:
        is_there = any(token.row is late for token in loop.tick())
        now = time.perf_counter()
        during.append(now - before)
        before = now
    loop.batch.abandon()
    return alone, during, before - began


def _closed_loop(model: Any, vocab: int, clients: int, requests: int, way: str) -> tuple[float, float]:
    """Return tokens per second of wall and of CPU time. Each client sends a new request when it is answered."""
    loop, rng = Loop(model, way), random.Random(0)
    left = [requests] * clients
    for at in range(clients):  # the first requests have many lengths, so that rows come and go one by one
        loop.batch.insert(row_of(at, PROMPT - rng.randrange(20), 1 + rng.randrange(OUTPUT), vocab))
    tokens, began = 0, (time.perf_counter(), time.process_time())
    while loop.batch:
        for token in loop.tick():
            tokens += 1
            client = token.row.rid % clients
            if token.ended is not None and left[client]:
                left[client] -= 1
                loop.batch.insert(row_of(token.row.rid + clients, PROMPT - rng.randrange(20), OUTPUT, vocab))
    loop.batch.close()
    return tokens / (time.perf_counter() - began[0]), tokens / (time.process_time() - began[1])


def row_of(rid: int, prompt: int, output: int, vocab: int) -> "Row":
    from protocol.to_worker import Sampling
    from worker.engine.row import Row, RowStats, RowText
    from worker.output.stops import StopScanner

    class NoText:
        def add(self, _token: int) -> str:
            return ""

        def finish(self) -> str:
            return ""

    rng = random.Random(rid)
    return Row(
        rid=rid,
        prompt=[rng.randrange(vocab) for _ in range(prompt)],
        sampling=Sampling(temperature=0.0, ignore_eos=True),
        max_tokens=output,
        text=RowText(NoText(), StopScanner(())),
        stats=RowStats(0.0),
    )


def _step_times(step: Callable[[], object], count: int) -> list[float]:
    """Return the seconds from the end of one step to the end of the next."""
    for _ in range(WARM):
        step()
    times = [time.perf_counter()]
    for _ in range(count):
        step()
        times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def checked(model: Any, vocab: int, bits: int = 0) -> str:
    """Quantize the model's KV to `bits` bits if not 0, and check the model as a load does. Returns what computes its
    attention."""
    from worker.engine import load_checks
    from worker.engine.load_checks import quantize_kv
    from worker.kv.quantized import set_kv_form

    ids = [(20 + 7 * at) % vocab for at in range(load_checks.SAMPLE_TOKENS)]
    set_kv_form(model, None)
    if bits:
        quantize_kv(model, {"num_attention_heads": model.args.num_attention_heads}, bits, ids, in_group=False)
    return load_checks.choose(model, ids, "auto").attention


def random_model(name: str, dtype: str) -> tuple[Any, int]:
    """Make a model of random weights."""
    import mlx.core as mx
    from mlx_lm.models import qwen3

    from worker.model import packing

    geometry = models.GEOMETRIES[name]
    mx.random.seed(0)
    model: Any = qwen3.Model(qwen3.ModelArgs.from_dict(models.config(geometry, dtype, 0)))
    model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())
    packing.prepare(model)
    return model, geometry.vocab


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.tick", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("geometry", nargs="?", default="50m", choices=[*models.GEOMETRIES])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--what", type=lambda text: text.split(","), default=["stall", "short"])
    parser.add_argument("--long", type=int, default=4000, help="tokens of the long prompt")
    parser.add_argument("--clients", type=numbers, default=[8, 32])
    parser.add_argument("--requests", type=int, default=5, help="of each client, after its first")
    parser.add_argument("--steps", type=int, default=30, help="of one measurement")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--separate", action="store_true", help="only as before: no chunk is fused into a step")
    return parser.parse_args()


if __name__ == "__main__":
    main()

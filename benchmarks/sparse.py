"""Time to the first token of a sparse prefill beside a plain one, by turns, with random weights in memory."""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.tick import random_model, row_of
from gateway.ctl.bench.closed_loop import table

if TYPE_CHECKING:
    from worker.sparse_prefill import ImportanceReader, SelectedTokens

CHUNK = 512


def sparse(args: argparse.Namespace) -> None:
    """Measure prompts of each length in seconds: plain, and sparse, where the draft model's pass and the rest count
    apart.
    """
    from worker.sparse_prefill import ImportanceReader, SelectedTokens, count_kept

    model, vocab = random_model(args.geometry, args.dtype)
    reader = ImportanceReader(_loaded(args.draft, args.dtype))
    lines: list[tuple[str, ...]] = []
    for length in args.lengths:
        whole = SelectedTokens([(0, length)])
        assert _first(model, vocab, length, None) == _first(model, vocab, length, whole), "all kept is the plain answer"
        taken: dict[str, list[tuple[float, float]]] = {"plain": [], "read": [], "run": []}
        kept = _choose(reader, vocab, length, args.keep)
        for turn in range(args.turns + 1):
            times = {
                "plain": _timed(lambda length=length: _first(model, vocab, length, None)),
                "read": _timed(lambda length=length: _choose(reader, vocab, length, args.keep)),
                "run": _timed(lambda length=length, kept=kept: _first(model, vocab, length, kept)),
            }
            for name, pair in times.items():
                if turn:  # the first turn compiles
                    taken[name].append(pair)
        wall, cpu = (
            {name: statistics.median(pair[at] for pair in each) for name, each in taken.items()} for at in (0, 1)
        )
        ratios = [f"{each['plain'] / (each['read'] + each['run']):.2f}" for each in (wall, cpu)]
        seconds = [f"{wall[name]:.3f}" for name in ("plain", "read", "run")]
        lines.append((str(length), str(count_kept(length, args.keep)), str(len(kept.runs)), *seconds, *ratios))
        print(table(("prompt", "kept", "runs", "plain s", "read s", "run s", "× wall", "× CPU"), lines), flush=True)


def _timed(action: Callable[[], Any]) -> tuple[float, float]:
    began = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - began[0], time.process_time() - began[1]


def _choose(reader: "ImportanceReader", vocab: int, length: int, keep: float) -> "SelectedTokens":
    import numpy as np

    from worker.sparse_prefill import choose

    reading = reader.read(np.array(row_of(1, length, 1, vocab).prompt, dtype=np.int32))
    while not reading.is_complete:
        reading.step()
    return choose(reading.importance, keep)


def _first(model: Any, vocab: int, length: int, kept: "SelectedTokens | None") -> int:
    """Return the first token of a prompt in a batch of its own."""
    from mlx_lm.models.cache import make_prompt_cache

    from worker.engine.batch import Batch
    from worker.kv.spans_and_checkpoints import KvLayout
    from worker.prefix_cache.cache_and_eviction import PrefixCache

    batch = Batch(model, (), PrefixCache(KvLayout.of(lambda: make_prompt_cache(model)), 0))
    row = row_of(1, length, 1, vocab)
    row.keep, row.kept = 1.0 if kept is not None else 0.0, kept
    batch.insert(row)
    tokens: list[int] = []
    while not tokens:
        tokens = [token.id for token in batch.step(CHUNK, is_fused=False).tokens]
    batch.close()
    return tokens[0]


def _loaded(geometry: str, dtype: str) -> Any:
    from worker.model.loader import LoadedModel

    model, vocab = random_model(geometry, dtype)
    return LoadedModel(model, None, Path(geometry), "qwen3", vocab, 1 << 20, (), 0)

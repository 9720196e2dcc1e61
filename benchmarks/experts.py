"""Experts on disk: a step and a prompt beside all experts in memory, by the part of them that the cache holds.

    python -m benchmarks.experts
    python -m benchmarks.experts --layers 4 --parts 1,0.5 --tokens 8

One process, one model of random weights, by turns. Its files are in the page cache of the system, so that what is
measured is the least that experts on disk cost: reading the router's choice, and copying what is missing. Random
routers choose all experts alike, which is the worst case for a cache.
"""

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.tick import BEFORE, Loop, row_of
from gateway.ctl.bench.closed_loop import table

CONFIG: Final = {
    "model_type": "qwen3_moe", "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "num_experts": 64, "num_experts_per_tok": 4, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "moe_intermediate_size": 256, "rms_norm_eps": 1e-6, "vocab_size": 4096, "rope_theta": 1e6,
    "tie_word_embeddings": True, "max_position_embeddings": 4096, "norm_topk_prob": True,
}  # fmt: skip
PROMPT: Final = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--parts", type=lambda text: [float(part) for part in text.split(",")], default=[1, 0.5, 0.25, 0]
    )
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, target = _written(Path(folder), args.layers)
        _compare(source, target, args)


def _compare(source: Path, target: Path, args: argparse.Namespace) -> None:
    from mlx_lm.utils import load_model

    from protocol.model_files import read_index
    from worker.model.experts import attach

    index = read_index(target)
    print(f"{index.total_bytes / 1e6:.0f} MB of experts, {args.layers} layers of 64, of which a token uses 4")
    models: dict[str, tuple[Any, Any]] = {"in memory": (load_model(source)[0], None)}
    for part in args.parts:
        model, _ = load_model(target, lazy=True, strict=False)
        models[f"{part:.0%} of them"] = model, attach(model, target, index, int(part * index.total_bytes))
    taken: dict[str, list[tuple[float, ...]]] = {name: [] for name in models}
    tokens: dict[str, list[int]] = {}
    for turn in range(args.turns + 1):
        for name, (model, counts) in models.items():
            before = (counts.expert_misses, counts.expert_read_bytes) if counts is not None else (0, 0)
            times, ids = _run(model, args.tokens, turn)
            after = (counts.expert_misses, counts.expert_read_bytes) if counts is not None else (0, 0)
            assert tokens.setdefault(str(turn), ids) == ids, "the tokens of all are equal"
            if turn:  # the first turn fills the caches
                taken[name].append((*times, *(late - soon for late, soon in zip(after, before, strict=True))))
    lines: list[tuple[str, ...]] = []
    for name, (_, counts) in models.items():
        prompt, step, cpu, misses, read = (statistics.median(each[at] for each in taken[name]) for at in range(5))
        held = "" if counts is None else f"{counts.expert_cache_bytes / 1e6:.0f}"
        figures = (f"{1e3 * prompt:.0f}", f"{1e3 * step:.1f}", f"{1e3 * cpu:.1f}", f"{misses:.0f}", f"{read / 1e6:.0f}")
        lines.append((name, held, *figures))
    header = ("experts", "MB held", f"prompt of {PROMPT}, ms", "ms a token", "CPU ms a token", "misses", "MB read")
    print(table(header, lines))


def _run(model: Any, count: int, seed: int) -> tuple[tuple[float, float, float], list[int]]:
    """Return the seconds of a prompt, and the wall and CPU seconds of each token after it."""
    loop = Loop(model, BEFORE)
    row = row_of(seed, PROMPT, count + 1, 4096)
    began = time.perf_counter()
    loop.batch.insert(row)
    ids: list[int] = []
    while not ids:
        ids += [token.id for token in loop.tick()]
    first, cpu = time.perf_counter(), _cpu_s()
    while loop.batch:
        ids += [token.id for token in loop.tick()]
    steps = len(ids) - 1
    times = first - began, (time.perf_counter() - first) / steps, (_cpu_s() - cpu) / steps
    loop.batch.close()
    return times, ids


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _written(folder: Path, layers: int) -> tuple[Path, Path]:
    """Write a model of random weights, and the same model repacked; return both folders."""
    import mlx.core as mx
    from mlx_lm.models import qwen3_moe
    from mlx_lm.utils import save_config, save_model

    from worker.tools.repack import repack

    mx.random.seed(0)
    config = CONFIG | {"num_hidden_layers": layers}
    model: Any = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(config))
    source, target = folder / "whole", folder / "disk"
    source.mkdir()
    save_model(source, model)
    save_config(config, config_path=source / "config.json")
    repack(source, target, trust_remote_code=False, progress=lambda _text: None)
    return source, target


if __name__ == "__main__":
    main()

"""Quantized KV beside KV as the model computes it, by turns: bytes a token, steps and chunks, answers.

    python -m benchmarks.kv_bits                                       # a small geometry, and the demo model's answers
    python -m benchmarks.kv_bits qwen3-8b --dtype bfloat16 --what bytes,steps,chunks --rows 1,4 --steps 20

Weights and KV are random, but for `answers`: those are the demo model's, of held-out samples of its recipe. On a
CPU times are CPU time. `8, numbers` dequantizes for each step, as the worker does where no kernel reads codes.
"""

import argparse
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from benchmarks import models
from benchmarks.serve import numbers
from benchmarks.tick import random_model
from gateway.ctl.bench.closed_loop import table

if TYPE_CHECKING:
    from deploy.demo_model.corpus.samples import Sample
    from worker.kv.quantized import KvForm
    from worker.kv.ragged import RaggedKVCache

# Each entry: name of a KV format, its bits, and whether attention kernels read its codes.
FORMS: Final = (("as computed", 0, False), ("8 bits", 8, True), ("8, numbers", 8, False), ("4 bits", 4, True),
                ("4, numbers", 4, False))  # fmt: skip
WARM: Final = 4
CHUNK: Final = 512
ROWS_AT_ONCE: Final = 16
ANSWER_TOKENS: Final = 400


def main() -> None:
    args = _arguments()
    print(f"kv_bits · {args.geometry} {args.dtype}", flush=True)
    if {"bytes", "steps", "chunks"} & set(args.what):
        model, vocab = random_model(args.geometry, args.dtype)
        for name in [name for name in args.what if name != "answers"]:
            began = time.perf_counter()
            {"bytes": sizes, "steps": steps, "chunks": chunks}[name](model, vocab, args)
            print(f"({name}: {time.perf_counter() - began:.0f} s)\n", flush=True)
    if "answers" in args.what:
        answers(args.samples)


def sizes(model: Any, vocab: int, _args: argparse.Namespace) -> None:
    """Print the bytes of KV per token of one row, and the formats that a load would choose on this machine."""
    from worker.engine.load_checks import choose_form

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for bits in (8, 4):
        ids = [(20 + 7 * at) % vocab for at in range(15)]
        form = choose_form(model, {"num_attention_heads": model.args.num_attention_heads}, bits, ids)
        print(f"{bits} bits: steps {'read codes' if form.reads_codes else 'dequantize'}", flush=True)
    taken: dict[str, int] = {}
    for name, bits, _ in FORMS:
        if ", " not in name:
            taken[name] = sum(cache.nbytes for cache in _caches(model, _form(model, bits, True), 1, 1024)) // 1024
    whole = taken["as computed"]
    lines = [(name, str(each), f"{each / whole:.1%}") for name, each in taken.items()]
    print(table(("KV", "bytes a token", ""), lines), flush=True)


def steps(model: Any, vocab: int, args: argparse.Namespace) -> None:
    """Measure a step of one token per row, in milliseconds."""
    _compare(model, vocab, args, 1)


def chunks(model: Any, vocab: int, args: argparse.Namespace) -> None:
    """Measure a chunk of a prompt after a context of given length, in milliseconds."""
    _compare(model, vocab, args, CHUNK)


def _compare(model: Any, vocab: int, args: argparse.Namespace, width: int) -> None:
    lines: list[tuple[str, ...]] = []
    for rows in args.rows if width == 1 else [1]:
        for context in args.context:
            medians: dict[str, str] = {}
            for name, bits, reads_codes in FORMS:
                if width > 1 and name.endswith("numbers"):
                    continue
                try:
                    held = _caches(model, _form(model, bits, reads_codes), rows, context)
                    times = _times(_step(model, vocab, held, rows, width), args.steps if width == 1 else 3, args.clock)
                    medians[name] = f"{1e3 * statistics.median(times):.2f}"
                except RuntimeError as error:
                    medians[name] = "-"
                    print(f"{name}: {str(error)[:110]}", flush=True)
            shown = [medians.get(name, "") for name, _, _ in FORMS]
            lines.append((str(rows), str(context), *shown))
            print(f"  {' '.join(lines[-1])}", flush=True)
    title = "a step" if width == 1 else f"{width} tokens of a prompt"
    print(f"ms of {title}\n" + table(("rows", "context", *(name for name, _, _ in FORMS)), lines), flush=True)


def _form(model: Any, bits: int, reads_codes: bool) -> "KvForm | None":
    from protocol.checkpoint import group_of
    from worker.kv.quantized import KvForm

    return KvForm(bits, group_of(model.args.head_dim) or 32, reads_codes) if bits else None


def _caches(model: Any, form: "KvForm | None", rows: int, context: int) -> "list[RaggedKVCache]":
    """Make rows of random KV, all of the same length, in the format of a batch."""
    import mlx.core as mx

    from worker.kv.quantized import QuantizedKV
    from worker.kv.ragged import Lengths, RaggedKVCache

    mx.clear_cache()
    heads, dim = model.args.num_key_value_heads, model.args.head_dim
    dtype, lengths = model.layers[0].input_layernorm.weight.dtype, Lengths((0,) * rows)
    caches: list[RaggedKVCache] = []
    for _ in model.layers:
        cache = RaggedKVCache(lengths) if form is None else QuantizedKV(form, lengths)
        keys = mx.random.normal((rows, heads, context, dim), dtype=dtype)
        cache.update_and_fetch(keys, keys)
        mx.eval(cache.state)
        caches.append(cache)
    return caches


def _step(model: Any, vocab: int, caches: "list[RaggedKVCache]", rows: int, width: int) -> Callable[[], None]:
    import mlx.core as mx

    tokens = mx.random.randint(0, vocab, (rows, width))

    def step() -> None:
        hidden = model.model(tokens, cache=caches)
        mx.eval(model.lm_head(hidden[:, -1]) if "lm_head" in model else hidden, [cache.state for cache in caches])
        for cache in caches:
            cache.rewind((width,) * rows)

    return step


def _times(step: Callable[[], None], count: int, clock: Callable[[], float]) -> list[float]:
    for _ in range(min(WARM, count)):
        step()
    times: list[float] = []
    for _ in range(count):
        began = clock()
        step()
        times.append(clock() - began)
    return times


# -- answers ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Said:
    """Collector of the ids of one answer."""

    ids: list[int] = field(default_factory=list[int])


def answers(count: int) -> None:
    """Compare answers of the demo model with and without quantized KV, and count the right ones."""
    from deploy.demo_model.corpus.generate import CATEGORIES, SEED, held_out_samples

    samples = [sample for category in CATEGORIES for sample in held_out_samples(category, count, SEED)]
    said = {bits: _answers(samples, bits) for bits in (0, 8, 4)}
    lines: list[tuple[str, ...]] = []
    for bits, (ids, right) in said.items():
        same = sum(one == other for one, other in zip(ids, said[0][0], strict=True))
        total = sum(map(len, said[0][0]))
        equal = sum(_common(one, other) for one, other in zip(ids, said[0][0], strict=True))
        lines.append((f"{bits} bits" if bits else "as computed", f"{right / len(samples):.1%}",
                      f"{same / len(samples):.1%}", f"{equal / total:.1%}"))  # fmt: skip
    print(f"answers of the demo model, {len(samples)} held-out samples\n" + table(
        ("KV", "right", "answers all equal", "tokens before the first that differs"), lines), flush=True)  # fmt: skip


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _answers(samples: "Sequence[Sample]", bits: int) -> tuple[list[list[int]], int]:
    """Return the ids of each answer, and the number of right answers."""
    from deploy.demo_model.tokenizer import Renderer
    from protocol.spec import WorkerSpec
    from tests.support.demo_answers import is_right, parse
    from worker.start.checked_model import load_checked

    spec = WorkerSpec(name="demo", path="demo", epoch=1, down="", up="", kv_bits=bits)
    loaded = load_checked(spec, lambda _stage, _done, _total: None)
    renderer, tokenizer = Renderer(), loaded.tokenizer
    prompts = [tokenizer.encode(renderer.prompt(sample), add_special_tokens=False) for sample in samples]
    said = _generate(loaded, prompts)
    right = 0
    for sample, ids in zip(samples, said, strict=True):
        stopped = bool(ids) and ids[-1] in loaded.eos_ids
        raw = tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=False)
        right += is_right(sample, parse(raw, stopped=stopped))
    return said, right


def _generate(loaded: Any, prompts: Sequence[list[int]]) -> list[list[int]]:
    from protocol.to_worker import Sampling
    from worker.engine.batch import Batch
    from worker.engine.row import Row, RowStats, RowText
    from worker.kv.quantized import make_caches
    from worker.kv.spans_and_checkpoints import KvLayout
    from worker.output.stops import StopScanner
    from worker.prefix_cache.cache_and_eviction import PrefixCache

    class NoText:
        def add(self, _token: int) -> str:
            return ""

        def finish(self) -> str:
            return ""

    layout = KvLayout.of(lambda: make_caches(loaded.model))
    batch = Batch(loaded.model, loaded.eos_ids, PrefixCache(layout, 0), loaded.plan.mode)
    said = [_Said() for _ in prompts]
    waiting = list(range(len(prompts)))
    while waiting or len(batch):
        while waiting and len(batch) < ROWS_AT_ONCE:
            rid = waiting.pop(0)
            text = RowText(NoText(), StopScanner(()))
            batch.insert(Row(rid, prompts[rid], Sampling(temperature=0.0), ANSWER_TOKENS, text, RowStats(0.0)))
        for token in batch.step(CHUNK).tokens:
            said[token.row.rid].ids.append(token.id)
    batch.close()
    return [each.ids for each in said]


def _clock() -> Callable[[], float]:
    from worker.model import memory

    return time.perf_counter if memory.has_gpu() else time.process_time


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.kv_bits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("geometry", nargs="?", default="5m", choices=[*models.GEOMETRIES])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--what", type=lambda text: text.split(","), default=["bytes", "steps", "answers"])
    parser.add_argument("--rows", type=numbers, default=[1, 4])
    parser.add_argument("--context", type=numbers, default=[2048, 16384, 65536])
    parser.add_argument("--steps", type=int, default=8, help="of one measurement")
    parser.add_argument("--samples", type=int, default=20, help="of each category, for answers")
    args = parser.parse_args()
    args.clock = _clock()
    return args


if __name__ == "__main__":
    main()

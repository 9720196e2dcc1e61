"""Several tokens a step: what a block costs, and what drafts win. Tokens are asserted in every run.

    python -m benchmarks.speculation costs qwen3-8b --dtype bfloat16     # a forward pass by rows, context and width
    python -m benchmarks.speculation oracle 50m                          # drafts that are right with a known chance
    python -m benchmarks.speculation text                                # the demo model: a copy, and small talk
    python -m benchmarks.speculation edits                               # this repository's commits, by lookup alone
    python -m benchmarks.speculation sparse qwen3-8b --draft qwen3-0.6b   # time to first token of a sparse prefill

`oracle` gives the ceiling: real forward passes, stated odds. `text` is the engine as it serves, its gate included.
`edits` runs no model: the text is known, and counted are the steps that lookup would have taken.
"""

import argparse
import dataclasses
import difflib
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from benchmarks import blas, models
from benchmarks.serve import numbers
from benchmarks.sparse import sparse
from gateway.ctl.bench.closed_loop import table

if TYPE_CHECKING:
    from worker.engine.row import Row
    from worker.model.loader import LoadedModel
    from worker.prompt.intake import Intake

SHAPES: Final = ((1, 500), (1, 8000), (8, 500), (8, 4000), (32, 500))
WIDTHS: Final = (1, 2, 4, 8, 16, 32)
ODDS: Final = (0.0, 0.5, 0.8, 1.0)
DRAFTS: Final = (1, 3, 7, 15)
PROMPT: Final = 64
COPIED: Final = (
    "The river was low that summer, and the people of the town walked across it on stones to the market. They bought "
    "bread and apples, and talked about the rain that would not come. In the evening the children played by the water."
)
TEXTS: Final = {"copy": f"Repeat the following text exactly: {COPIED}", "talk": "Tell me about yourself."}


def main() -> None:
    args = _arguments()
    if blas.has_openblas() and "LD_PRELOAD" not in os.environ:
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.speculation", *sys.argv[1:]], blas.environment())
    print(f"{args.what} · {args.geometry} {args.dtype} · BLAS: {blas.describe()}")
    run: dict[str, Callable[[argparse.Namespace], None]] = {
        "costs": costs, "oracle": oracle, "text": text, "edits": edits, "sparse": sparse,
    }  # fmt: skip
    run[args.what](args)


def costs(args: argparse.Namespace) -> None:
    """Measure one forward pass in milliseconds; the caches take turns."""
    import mlx.core as mx
    from mlx_lm.models.cache import BatchKVCache, KVCache

    from worker.kv.ragged import Lengths, RaggedKVCache

    loaded = _load(args)
    model: Any = loaded.model
    heads, dim = model.args.num_key_value_heads, model.args.head_dim

    def caches(kind: str, rows: int, context: int) -> list[Any]:
        made: list[Any] = []
        lengths = Lengths([0] * rows)
        for _ in model.layers:
            cache = {"KVCache": KVCache, "BatchKVCache": lambda: BatchKVCache([0] * rows)}.get(
                kind, lambda: RaggedKVCache(lengths)
            )()
            keys = mx.random.normal((rows, heads, context, dim)).astype(model.layers[0].self_attn.k_proj.weight.dtype)
            cache.update_and_fetch(keys, keys)
            mx.eval(cache.keys, cache.values)
            made.append(cache)
        if kind == "unequal":
            for cache in made:
                cache.rewind(tuple(row * (context // 2) // rows for row in range(rows)))
        return made

    kinds = ("KVCache", "BatchKVCache", "equal", "unequal")
    lines: list[tuple[str, ...]] = []
    for rows, context in SHAPES:
        held = {kind: caches(kind, rows, context) for kind in kinds}
        for width in WIDTHS:
            tokens = mx.random.randint(0, loaded.vocab_size, (rows, width))
            taken: dict[str, list[float]] = {kind: [] for kind in kinds}
            for turn in range(args.turns + 2):
                for kind, layers in held.items():
                    began = time.perf_counter()
                    mx.eval(mx.argmax(model(tokens, cache=layers), axis=-1))
                    seconds = time.perf_counter() - began
                    for cache in layers:
                        cache.rewind((width,) * rows) if isinstance(cache, RaggedKVCache) else cache.trim(width)
                    if turn > 1:
                        taken[kind].append(seconds)
            medians = (f"{1e3 * statistics.median(each):.2f}" for each in taken.values())
            lines.append((str(rows), str(context), str(width), *medians))
    print(table(("rows", "context", "width", *kinds), lines))


def oracle(args: argparse.Namespace) -> None:
    """Measure tokens per second with drafts ÷ without, by rows, length of the drafts and their odds."""
    from worker.prompt.intake import Intake

    loaded = _load(args)
    intake = Intake(loaded)
    if args.dtype in ("bfloat16", "float16"):
        loaded = dataclasses.replace(loaded, model=_Steered(loaded.model, loaded.vocab_size))
    lines: list[tuple[str, ...]] = []
    for rows in args.rows:
        expected, plain = _generated(loaded, intake, rows, args.tokens, None)
        for length in args.drafted:
            for odds in args.odds:
                drafter = _Oracle(expected, length, odds)
                again, seconds = _generated(loaded, intake, rows, args.tokens, drafter)
                assert again == expected, "drafts must change no token"
                _, plain_again = _generated(loaded, intake, rows, args.tokens, None)
                ratios = ((plain[at] + plain_again[at]) / 2 / seconds[at] for at in (0, 1))
                lines.append((str(rows), str(length), f"{odds}", *(f"{ratio:.2f}" for ratio in ratios)))
                print(" ".join(lines[-1]), flush=True)
    print(table(("rows", "drafted", "right", "× wall", "× CPU"), lines))


class _Steered:
    """A model whose next token follows from the one before: in half precision a GPU's kernels round differently for
    each shape, and random weights often have two tokens that are nearly as likely.
    """

    def __init__(self, model: Any, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size

    def __call__(self, tokens: Any, cache: Any = None) -> Any:
        import mlx.core as mx

        logits = self._model(tokens, cache=cache)
        best = (tokens[:, : logits.shape[1], None].astype(mx.uint32) * 7919 + 13) % self._vocab_size
        return mx.put_along_axis(logits, best, mx.array(1e4, dtype=logits.dtype), axis=-1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Oracle:
    """Drafter of drafts of one length, each token right with the same chance."""

    def __new__(cls, expected: Sequence[Sequence[int]], length: int, odds: float) -> Any:
        from worker.speculation.drafter import Drafter

        class Oracle(Drafter):
            widest = length + 1

            def __init__(self) -> None:
                # Rows in the order in which they were added, and the number of generated tokens of each.
                self._rows: list[Any] = []
                self._generated: list[int] = []
                self._rng = random.Random(0)

            def add(self, row: Any, *_: object) -> None:
                self._rows.append(row)
                self._generated.append(0)

            def note(self, row: Any, tokens: Sequence[int]) -> None:
                self._generated[self._rows.index(row)] += len(tokens)

            def is_ready(self, *_: object) -> bool:
                return True

            def drafts(self, rows: Sequence[Any], _newest: Sequence[int], most: Sequence[int]) -> list[list[int]]:
                return [self._draft(self._rows.index(row), limit) for row, limit in zip(rows, most, strict=True)]

            def _draft(self, at: int, limit: int) -> list[int]:
                begin = self._generated[at] + 1
                right = expected[at % len(expected)][begin : begin + min(limit, length)]
                return [token if self._rng.random() < odds else token + 1 for token in right]

        return Oracle()


def _generated(
    loaded: "LoadedModel", intake: "Intake", rows: int, tokens: int, drafter: Any
) -> tuple[list[list[int]], tuple[float, float]]:
    """Return the rows' output, and the wall and CPU seconds after the first token."""
    from mlx_lm.models.cache import make_prompt_cache

    from protocol.to_worker import Generate, Sampling, TokensPrompt
    from worker.engine.batch import Batch
    from worker.kv.spans_and_checkpoints import KvLayout
    from worker.prefix_cache.cache_and_eviction import PrefixCache

    batch = Batch(
        loaded.model,
        loaded.eos_ids,
        PrefixCache(KvLayout.of(lambda: make_prompt_cache(loaded.model)), 0),
        drafter=drafter,
    )
    greedy = Sampling(temperature=0.0, ignore_eos=True)
    made: list[Row] = []
    for rid in range(rows):
        prompt = TokensPrompt(tuple(1000 + rid * 7 + at for at in range(PROMPT)))
        made.append(intake.row(Generate(rid, prompt, greedy, max_tokens=tokens), 0.0))
        batch.insert(made[-1])
    while batch.prefilling:
        batch.step(512)
    began = time.perf_counter(), time.process_time()
    while batch:
        for token in batch.step(512).tokens:
            token.row.output.append(token.id)
    seconds = time.perf_counter() - began[0], time.process_time() - began[1]
    batch.close()
    return [row.output for row in made], seconds


def text(args: argparse.Namespace) -> None:
    """Compare the demo model as it serves, with its head, with `speculate` off and auto by turns."""
    from worker.speculation.policy import Speculator
    from worker.start.checked_model import load_checked
    from worker.tools.verify.verifier import EngineSession

    args.geometry, args.dtype = "demo", "auto"
    loaded = load_checked(structs.replace(_spec("demo", "auto"), speculate="auto"), lambda *_: None)
    lines = list[tuple[str, ...]]()
    for name, prompt in TEXTS.items():
        for rows in args.rows:
            taken: dict[bool, list[float]] = {False: [], True: []}
            said: list[Any] = []
            speculator = Speculator(loaded.proposer)
            for _ in range(args.turns):
                for is_on in (False, True):
                    ids, seconds = _chats(loaded, EngineSession, prompt, rows, speculator if is_on else None)
                    said.append(ids)
                    taken[is_on].append(seconds)
            assert all(ids == said[0] for ids in said), "drafts must change no token"
            right = sum(each.accepted for each in speculator.counts.values())
            drafted = sum(each.tokens for each in speculator.counts.values())
            ratio = statistics.median(off / on for off, on in zip(taken[False], taken[True], strict=True))
            lines.append((name, str(rows), f"{ratio:.2f}", f"{right} of {drafted}"))
    print(table(("text", "streams", "× CPU time a token", "drafted tokens right"), lines))


def _chats(loaded: "LoadedModel", session: Any, prompt: str, rows: int, drafter: Any) -> tuple[list[list[int]], float]:
    """Outputs of as many equal chats, each with a salt of its own, and the CPU time from load to end."""
    from protocol.to_worker import ChatPrompt, Generate, Sampling
    from worker.prompt.intake import Intake

    chats = [
        Generate(
            rid,
            ChatPrompt([{"role": "user", "content": prompt}]),
            Sampling(temperature=0.0),
            max_tokens=120,
            cache_salt=f"{time.perf_counter_ns()}-{rid}",
        )
        for rid in range(1, rows + 1)
    ]
    one = session(loaded, Intake(loaded), _spec("demo", "auto"), drafter)
    began = time.process_time()
    outputs = one.run([chats])
    return [output.ids for output in outputs], time.process_time() - began


def edits(args: argparse.Namespace) -> None:
    """Tokens a step on files rewritten and edited by this repository's commits, with drafts of a width each."""
    args.geometry, args.dtype = "demo", "auto"
    tokenizer = _load(args).tokenizer
    lines: list[tuple[str, ...]] = []
    for name, cases in _commits(args.commits).items():
        encoded = [(tokenizer.encode(old), tokenizer.encode(new)) for old, new in cases]
        for width in (4, 8, 16):
            counts = [_steps(prompt, output, width) for prompt, output in encoded]
            tokens, steps, drafted, right = (sum(each) for each in zip(*counts, strict=True))
            share = f"{100 * right / max(1, drafted):.0f} %"
            lines.append((name, str(len(cases)), str(width), f"{tokens / max(1, steps):.2f}", share))
    print(table(("text", "cases", "width", "tokens a step", "drafted tokens right"), lines))


def _steps(prompt: list[int], output: list[int], width: int) -> tuple[int, int, int, int]:
    """Return the numbers of tokens, of steps, of drafted tokens and of right ones."""
    import numpy as np

    from worker.speculation.text_sources import IndexedTokens, Lookup

    none = IndexedTokens(np.empty(0, dtype=np.int32))
    row = Lookup(np.array(prompt, dtype=np.int32), ())
    row.index(len(prompt))
    at = steps = drafted = right = 0
    while at < len(output):
        row.extend(output[at : at + 1])
        guess = row.guess(width - 1, none)
        draft = guess.tokens if guess is not None else []
        rest = output[at + 1 : at + 1 + len(draft)]
        agreed = next((n for n, (one, other) in enumerate(zip(draft, rest, strict=False)) if one != other), len(rest))
        row.extend(rest[:agreed])
        at, steps, drafted, right = at + 1 + agreed, steps + 1, drafted + len(draft), right + agreed
    return len(output), steps, drafted, right


def _commits(most: int) -> dict[str, list[tuple[str, str]]]:
    """(text before, text written) of Python files of the newest commits, whole and as search-and-replace blocks."""
    cases: dict[str, list[tuple[str, str]]] = {"whole file": [], "search and replace": [], "new file": []}
    for commit in _git("log", "--format=%H", "-400").split():
        for line in _git("diff-tree", "--no-commit-id", "--name-status", "-r", commit).splitlines():
            kind, path = line.split("\t")[:2]
            new = _git("show", f"{commit}:{path}") if path.endswith(".py") and kind in "AM" else ""
            if not 500 < len(new) < 14_000:
                continue
            if kind == "A":
                cases["new file"].append((f"Write {path}", new))
                continue
            old = _git("show", f"{commit}^:{path}")
            cases["whole file"].append((old, new))
            cases["search and replace"].append((old, _blocks(old, new)))
        if all(len(each) >= most for each in cases.values()):
            break
    return {name: each[:most] for name, each in cases.items()}


def _blocks(old: str, new: str) -> str:
    before, after = old.splitlines(True), new.splitlines(True)
    blocks: list[str] = []
    for group in difflib.SequenceMatcher(None, before, after, autojunk=False).get_grouped_opcodes(3):
        search = "".join(before[group[0][1] : group[-1][2]])
        blocks.append(f"<<<<<<< SEARCH\n{search}=======\n{''.join(after[group[0][3] : group[-1][4]])}>>>>>>> REPLACE\n")
    return "\n".join(blocks)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=blas.ROOT, capture_output=True, text=True, check=False).stdout


def _spec(path: str, dtype: str) -> Any:
    from protocol.spec import WorkerSpec

    return WorkerSpec(name="bench", path=path, epoch=1, down="", up="", dtype=dtype, cache_bytes=0, speculate="off")


def _load(args: argparse.Namespace) -> "LoadedModel":
    from worker.start.checked_model import load_checked

    path = "demo" if args.geometry == "demo" else str(models.build(args.geometry, args.dtype))
    return load_checked(_spec(path, args.dtype), lambda *_: None)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.speculation", description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("costs", "oracle", "text", "edits", "sparse"))
    parser.add_argument("geometry", nargs="?", default="50m", choices=[*models.GEOMETRIES, "demo"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=numbers, default=[1, 4, 8], help="at once (default: 1,4,8)")
    parser.add_argument("--tokens", type=int, default=64, help="of each row (default: 64)")
    parser.add_argument("--drafted", type=numbers, default=[*DRAFTS], help="lengths of the oracle's drafts")
    parser.add_argument(
        "--odds", type=lambda text: [*map(float, text.split(","))], default=[*ODDS], help="of each token"
    )
    parser.add_argument("--turns", type=int, default=5, help="of each measurement (default: 5)")
    parser.add_argument("--commits", type=int, default=25, help="cases of each kind of edit (default: 25)")
    parser.add_argument("--draft", default="5m", choices=models.GEOMETRIES, help="of sparse prefill (default: 5m)")
    parser.add_argument("--keep", type=float, default=0.25, help="part of a prompt that is kept (default: 0.25)")
    parser.add_argument("--lengths", type=numbers, default=[2048, 4096], help="of prompts (default: 2048,4096)")
    return parser.parse_args()


if __name__ == "__main__":
    main()

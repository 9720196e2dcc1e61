"""`make soak`: is every architecture that mlx-lm has served exactly, in the mode that the self-check gives it?

Builds each as a tiny random model and runs all checks of `worker.tools.verify` on it. Prints the table of
docs/models.md; `--write` puts it there. Not a part of `make test`: it takes a quarter of an hour.
"""

import argparse
import importlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Final

import mlx.core as mx
import msgspec
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import MODEL_REMAPPING, load_tokenizer

from tests.support.engine import spec
from tests.support.models import VOCAB, tiny_tokenizer
from worker.engine.load_checks import SAMPLE_TOKENS, choose
from worker.errors import LoadFailed
from worker.kv.spans_and_checkpoints import leaves
from worker.model.loader import LoadedModel
from worker.tools.verify.verifier import Verifier

CONFIGURATIONS: Final = Path(__file__).parent / "support" / "architectures.json"
PAGE: Final = Path(__file__).parents[1] / "docs" / "models.md"
CONTEXT: Final = 4096
TOKENS: Final = 8
WORDS: Final = 32
# Of one architecture: the slowest takes a minute on a busy machine.
TIMEOUT_S: Final = 600
# In float32 on a CPU, what rounding explains.
DRIFT: Final = 5e-3
# Architectures with kernels that mlx-lm has for Metal only: elsewhere, a refusal at load is right.
METAL_ONLY: Final = frozenset({"bitnet"})
_BEGIN: Final = "<!-- make soak: begin -->"
_END: Final = "<!-- make soak: end -->"
_RESULTS: Final = "caches | batch mode | checks that do not apply | checks that fail | drift | self-check"
_NONE: Final = "–"


class Row(msgspec.Struct, frozen=True):
    """Results of one architecture; `failed` says why there are none."""

    name: str
    caches: str = ""
    mode: str = ""
    # Names of the checks that do not apply, and of those that fail.
    skipped: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    drift: float = 0.0
    # CPU time, which other programs on the machine do not change.
    check_ms: float = 0.0
    failed: str = ""

    @property
    def is_good(self) -> bool:
        if self.failed:
            return self.name in METAL_ONLY and not mx.metal.is_available()
        return not self.wrong and self.drift <= DRIFT

    @property
    def kind(self) -> tuple[str, ...]:
        """Cells of the table that architectures with the same results share."""
        return self.caches, self.mode, ", ".join(self.skipped) or _NONE, ", ".join(self.wrong) or _NONE

    def line(self) -> str:
        """Line of the terminal's table."""
        if self.failed:
            return f"| {self.name} | {self.failed} ||||||"
        return f"| {' | '.join((self.name, *self.kind, f'{self.drift:.0e}', f'{self.check_ms:.0f} ms'))} |"


def page_lines(rows: Sequence[Row]) -> list[str]:
    """Lines of the page: a table whose rows are the architectures with the same results, and the failures."""
    groups: defaultdict[tuple[tuple[str, ...], bool], list[Row]] = defaultdict(list)
    for row in rows:
        if not row.failed:
            groups[row.kind, row.is_good].append(row)
    head = f"| {_RESULTS} | architectures |"
    lines = [head, re.sub(r"[^|]+", "---", head)]
    for (kind, _), same in sorted(groups.items(), key=lambda group: -len(group[1])):
        times = sorted(row.check_ms for row in same)
        time_ms = f"{times[0]:.0f} ms" if len(same) == 1 else f"{times[0]:.0f}–{times[-1]:.0f} ms"
        names = "; ".join(row.name for row in same)
        lines.append(f"| {' | '.join((*kind, f'{max(row.drift for row in same):.0e}', time_ms, names))} |")
    failed = [f"- `{row.name}`: {row.failed}" for row in rows if row.failed]
    return [*lines, "", *failed] if failed else lines


def examine(name: str) -> Row:
    """All checks of one architecture."""
    config = json.loads(CONFIGURATIONS.read_bytes())[name]
    kind = str(config["model_type"])
    module = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(kind, kind)}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    # Random initialisation is nearly flat: larger matrices give logits that greedy decoding can tell apart.
    model.apply(lambda array: array * 1.5 if array.ndim > 1 else array)
    mx.eval(model.parameters())
    caches = sorted({type(leaf).__name__.removesuffix("Cache") for leaf in leaves(make_prompt_cache(model))})
    started = time.process_time()
    try:
        plan = choose(model, [20 + 7 * at for at in range(SAMPLE_TOKENS)], "auto")
    except LoadFailed as error:
        return Row(name, failed=error.failure.message)
    check_ms = (time.process_time() - started) * 1e3
    with tempfile.TemporaryDirectory(prefix="mlxd-soak-") as folder:
        tiny_tokenizer().save_pretrained(folder)
        # The disk cache names its files by the model's files.
        mx.save_safetensors(str(Path(folder) / "model.safetensors"), dict(tree_flatten(model.parameters())))
        (Path(folder) / "config.json").write_bytes(msgspec.json.encode(config))
        tokenizer = load_tokenizer(Path(folder), {}, eos_token_ids=2)
        loaded = LoadedModel(model, tokenizer, Path(folder), kind, VOCAB, CONTEXT, (2,), 0, plan)
        checks = list(Verifier(loaded, spec(Path(folder)), TOKENS, WORDS).checks())
    skipped = tuple(check.name for check in checks if check.is_skipped)
    wrong = tuple(check.name for check in checks if not check.is_good)
    mode = str(plan.mode) if plan.reuses_prefixes else f"{plan.mode}, no prefixes"
    return Row(name, ", ".join(caches), mode, skipped, wrong, max(check.drift for check in checks), check_ms)


def examine_apart(name: str) -> Row:
    """In a process of its own: a fault in native code is a row of the table."""
    command = [sys.executable, "-P", "-m", "tests.soak", "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=Row)
    except (subprocess.TimeoutExpired, IndexError, msgspec.DecodeError):
        return Row(name, failed="its process ended, or took too long")


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 if any architecture that runs on this machine is not served exactly."""
    parser = argparse.ArgumentParser(prog="make soak", description="Check every architecture of mlx-lm.")
    parser.add_argument("names", nargs="*", help="only these; see tests/support/architectures.json")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        logging.disable()
        print(msgspec.json.encode(examine(options.one)).decode())
        return 0
    names = options.names or list(json.loads(CONFIGURATIONS.read_bytes()))
    rows: list[Row] = []
    print(f"| architecture | {_RESULTS} |", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(examine_apart, names):
            print(row.line(), flush=True)
            rows.append(row)
    if options.write:
        _write(rows)
    return 0 if all(row.is_good for row in rows) else 1


def _write(rows: Sequence[Row]) -> None:
    made = f"Made by `make soak` with mlx {version('mlx')} and mlx-lm {version('mlx-lm')} on a CPU, in float32."
    table = "\n".join([_BEGIN, made, "", *page_lines(rows), _END])
    page = PAGE.read_text()
    PAGE.write_text(page[: page.index(_BEGIN)] + table + page[page.index(_END) + len(_END) :])


if __name__ == "__main__":
    sys.exit(main())

"""Measures the demo model on held-out samples, and prints a table with one row per category.

`python -m deploy.demo_model.evaluate` measures the shipped weights with mlx-lm; `--url http://127.0.0.1:8484/v1`
measures a running mlxd; `--backend torch` uses transformers in large batches, for the machine that trains.
"""

import argparse
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from deploy.demo_model.corpus.generate import CATEGORIES, SEED, held_out_samples
from deploy.demo_model.corpus.samples import Sample

from . import unseen
from .backends import Answer, Reply, mlx, openai, torch_batches

SHIPPED: Final = Path(__file__).parents[3] / "worker" / "demo_model"
# Minimum share of correct held-out samples, by category.
WANTED: Final = {
    "small talk": 0.95,
    "facts": 0.95,
    "transforms": 0.95,
    "tool call": 0.90,
    "two tool calls": 0.85,
    "no tool call": 0.95,
    "tool results": 0.90,
    "json": 0.90,
    "multi-turn": 0.90,
    "thinking": 0.90,
    "stops": 0.99,
    "clean": 0.99,
}
_MARKS: Final = re.compile(r"<\|im_start\|>|<\|im_end\|>|<\|endoftext\|>|</?think>|</?tool_call>|</?tool_response>")


def is_right(sample: Sample, reply: Reply) -> bool:
    expected = sample.messages[-1]
    wanted_calls = [call["function"] for call in expected.get("tool_calls") or ()]
    if sample.thinking != bool(reply.thought):
        return False
    if wanted_calls or reply.calls:
        return reply.calls == wanted_calls and _same_types(reply.calls, wanted_calls)
    text, answer = reply.text.strip(), str(expected["content"]).strip()
    match sample.check:
        case "contains":
            return all(_plain(key) in _plain(text) for key in sample.keys)
        case "json":
            try:
                return _typed(json.loads(text)) == _typed(json.loads(answer))
            except ValueError:
                return False
        case "calls":
            return True
        case "exact":
            return text == answer or (
                sample.skill not in ("repeat", "uppercase", "lowercase") and _plain(text) == _plain(answer)
            )


def _same_types(left: Any, right: Any) -> bool:
    return _typed(left) == _typed(right)


def _typed(value: Any) -> Any:
    """Return a value that compares equal only to an equal JSON value: plain Python has `True == 1`. 1 and 1.0 stay
    equal."""
    if isinstance(value, dict):
        return {k: _typed(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_typed(v) for v in value]
    return (isinstance(value, bool), isinstance(value, str), value)


def _plain(text: str) -> str:
    return text.lower().rstrip(".!").strip()


def measure(answer: Answer, make: Callable[[str], list[Sample]], show: int = 0) -> dict[str, tuple[int, int]]:
    """Return the numbers of correct and of all samples by category; `stops` and `clean` count samples of all
    categories."""
    table: dict[str, tuple[int, int]] = {}
    skills: dict[str, tuple[int, int]] = {}
    stops = clean = total = 0
    for category in CATEGORIES:
        samples = make(category)
        if not samples:
            continue
        replies = answer(samples)
        right = [is_right(s, r) for s, r in zip(samples, replies, strict=True)]
        table[category] = (sum(right), len(samples))
        stops += sum(r.stopped for r in replies)
        clean += sum(not _MARKS.search(r.text) for r in replies)
        total += len(samples)
        for sample, good in zip(samples, right, strict=True):
            good_so_far, seen = skills.get(key := f"{category}/{sample.skill}", (0, 0))
            skills[key] = (good_so_far + good, seen + 1)
        for sample, reply in [(s, r) for s, r, good in zip(samples, replies, right, strict=True) if not good][:show]:
            last = sample.messages[-1]
            shown = {
                "tools": [t["function"] for t in sample.tools or ()],
                "user": [m.get("content") or m.get("tool_calls") for m in sample.messages[:-1]][-5:],
            }
            wanted = [call["function"] for call in last.get("tool_calls") or ()]
            print(
                f"WRONG {category}/{sample.skill}: {json.dumps(shown, ensure_ascii=False)[-900:]}",
                f"   wanted {last.get('content')!r} {wanted}",
                f"   got    {reply.text!r} {reply.calls} thought {reply.thought!r}",
                sep="\n",
                flush=True,
            )
    if show:
        print("\n".join(f"{key:40} {good}/{seen}" for key, (good, seen) in skills.items()))
    return table | {"stops": (stops, total), "clean": (clean, total)}


def markdown(table: dict[str, tuple[int, int]]) -> str:
    lines = ["| held-out category | right | of | share | wanted |", "|---|---|---|---|---|"]
    lines += [
        f"| {name} | {good} | {seen} | {good / seen:.1%} | {WANTED[name]:.0%} |" for name, (good, seen) in table.items()
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.demo_model.evaluate", description=__doc__)
    parser.add_argument("--model", type=Path, default=SHIPPED, help="folder of the model")
    parser.add_argument("--backend", choices=("mlx", "torch"), default="mlx")
    parser.add_argument("--url", default="", help="measure a running server instead")
    parser.add_argument("--name", default="demo", help="the model's name on the server")
    parser.add_argument("--key", default="", help="API key for the server")
    parser.add_argument("--concurrency", type=int, default=8, help="requests that a server is sent at a time")
    parser.add_argument("--count", type=int, default=100, help="samples a category")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print, a category")
    options = parser.parse_args()
    answer = (
        openai(options.url, options.name, options.key, options.concurrency)
        if options.url
        else mlx(options.model)
        if options.backend == "mlx"
        else torch_batches(options.model)
    )
    began = time.monotonic()
    print(
        markdown(
            measure(answer, lambda category: held_out_samples(category, options.count, options.seed), options.show)
        )
    )
    print("\nWritten by hand:\n")
    print(markdown(measure(answer, unseen.samples, options.show)))
    print(f"{time.monotonic() - began:.0f} s")

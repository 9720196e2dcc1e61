"""Decisions beside the same choices asked by chat with a grammar, on the demo model, by turns.

    python -m benchmarks.decisions                        # 20 questions of 4 options about 600 tokens of input
    python -m benchmarks.decisions --questions 100 --rounds 5

Decisions are one request with all questions. By chat, each question is a request with the same input and the options as
`structured_outputs.choice`, sent all at once; the prefix cache and the batch help as they can. Each round has an input
of its own for each way, so that nothing is cached from before.
"""

import argparse
import asyncio
import random
import statistics
import time
from pathlib import Path
from typing import Any, Final

import httpx2

from benchmarks import blas
from benchmarks.compare import LOAD_TIMEOUT_S
from benchmarks.engines import Mlxd
from benchmarks.measure import cpu_s, tree
from gateway.ctl.bench.closed_loop import run, table

TIMEOUT_S: Final = 1800.0
OPTIONS: Final = ("billing", "support", "sales", "legal")
WORDS: Final = ("invoice", "refund", "order", "late", "twice", "angry", "thanks", "please", "today", "bank")


def main() -> None:
    run(_measure(_arguments()))


async def _measure(args: argparse.Namespace) -> None:
    server = Mlxd(Path("demo"), LOAD_TIMEOUT_S)
    seconds: dict[str, list[tuple[float, float]]] = {"decisions": [], "chat with a grammar": []}
    try:
        await server.start()
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=TIMEOUT_S) as client:
            await _decide(client, server.model_name(), "warm up", 1)
            await _chat(client, server.model_name(), "warm up", 1)
            for number in range(args.rounds):
                for way, ask in (("decisions", _decide), ("chat with a grammar", _chat)):
                    source = random.Random(f"{way} {number}")
                    text = " ".join(source.choice(WORDS) for _ in range(args.words))
                    processes = tree(server.pid)
                    began, used = time.perf_counter(), cpu_s(processes)
                    await ask(client, server.model_name(), text, args.questions)
                    seconds[way].append((time.perf_counter() - began, cpu_s(processes) - used))
    finally:
        await server.stop()
    print(f"{args.questions} questions of {len(OPTIONS)} options, {args.words} words · BLAS: {blas.describe()}")
    walls = {way: [wall for wall, _ in each] for way, each in seconds.items()}
    costs = {way: [cost for _, cost in each] for way, each in seconds.items()}
    ours, theirs = walls
    rows = [
        (
            way,
            f"{statistics.median(walls[way]):.2f}",
            f"{args.questions / statistics.median(walls[way]):.1f}",
            f"{statistics.median(costs[way]):.2f}",
        )
        for way in seconds
    ]
    print(table(("asked by", "seconds", "questions/s", "CPU s"), rows))
    ratios = [b / a for a, b in zip(walls[ours], walls[theirs], strict=True)]
    cpu = [b / a for a, b in zip(costs[ours], costs[theirs], strict=True)]
    print(f"{theirs} ÷ {ours}: time {statistics.median(ratios):.2f}, CPU {statistics.median(cpu):.2f}")


async def _decide(client: httpx2.AsyncClient, model: str, text: str, count: int) -> None:
    questions = [
        {"type": "choice", "instructions": _question(at), "choices": [{"value": option} for option in OPTIONS]}
        for at in range(count)
    ]
    answer = await client.post("/v1/decisions", json={"model": model, "input": text, "questions": questions})
    assert len(answer.raise_for_status().json()["answers"]) == count


async def _chat(client: httpx2.AsyncClient, model: str, text: str, count: int) -> None:
    listed = "\n".join(f"{letter}. {option}" for letter, option in zip("ABCD", sorted(OPTIONS), strict=True))

    async def one(at: int) -> None:
        asked = f"{text}\n\n{_question(at)}\n{listed}\nAnswer with the letter of the best option, and nothing else."
        request: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": asked}],
            "structured_outputs": {"choice": ["A", "B", "C", "D"]},
            "temperature": 0,
            "reasoning_effort": "none",
        }
        answer = await client.post("/v1/chat/completions", json=request)
        assert answer.raise_for_status().json()["choices"][0]["message"]["content"] in ("A", "B", "C", "D")

    await asyncio.gather(*(one(at) for at in range(count)))


def _question(at: int) -> str:
    return f"Question {at}: which team should answer customer {at * 37 % 101}?"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--words", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()

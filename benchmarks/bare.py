"""mlx-lm's BatchGenerator in a bare closed loop: what the machine can do with no server around it.

A child process of the comparisons: one JSON order a line on stdin, one JSON answer a line on stdout. The model is
loaded once, each order gets a new generator with mlx-lm's defaults unless it names a chunk.
"""

import argparse
import sys
import time
from collections import deque
from typing import Any

import msgspec


class Order(msgspec.Struct, frozen=True):
    """Run `prompts` through a batch of `concurrency` rows. `late` is inserted when that many tokens are out.

    `prefill_chunk` 0 means mlx-lm's default.
    """

    prompts: list[str]
    max_tokens: int
    concurrency: int
    prefill_chunk: int = 0
    late: str = ""
    late_after: int = 0
    late_max_tokens: int = 1


class Answer(msgspec.Struct, frozen=True):
    """Times are seconds since the first insert; `token_s` holds those of each prompt, then of `late`.

    `inserted_s` is when each of them was inserted. `texts` are decoded after the clock has stopped.
    """

    wall_s: float
    cpu_s: float
    tokens: int
    inserted_s: list[float]
    token_s: list[list[float]]
    texts: list[str]


class Loop:
    """One generator and the rows in it."""

    def __init__(self, model: Any, stops: list[list[int]], order: Order) -> None:
        from mlx_lm.generate import BatchGenerator

        chunk = {"prefill_step_size": order.prefill_chunk} if order.prefill_chunk else {}
        self._generator = BatchGenerator(model, stop_tokens=stops, completion_batch_size=order.concurrency, **chunk)
        self._rows: dict[int, int] = {}
        self._start = 0.0
        self.inserted_s: list[float] = []
        self.token_s: list[list[float]] = []
        self.tokens: list[list[int]] = []
        self.total = 0

    def run(self, order: Order, prompts: list[list[int]], late: list[int] | None) -> float:
        """Until everything is generated; the wall time."""
        todo = deque(prompts)
        self._start = time.perf_counter()
        for _ in range(min(order.concurrency, len(todo))):
            self._insert(todo.popleft(), order.max_tokens)
        while self._rows:
            for _ in range(self._tick()):
                if todo:
                    self._insert(todo.popleft(), order.max_tokens)
            if late is not None and self.total >= order.late_after:
                self._insert(late, order.late_max_tokens)
                late = None
        return time.perf_counter() - self._start

    def close(self) -> None:
        self._generator.close()

    def _insert(self, prompt: list[int], max_tokens: int) -> None:
        (uid,) = self._generator.insert([prompt], [max_tokens])
        self._rows[uid] = len(self.tokens)
        self.inserted_s.append(time.perf_counter() - self._start)
        self.token_s.append([])
        self.tokens.append([])

    def _tick(self) -> int:
        """One step of the generator; how many rows it finished."""
        _, responses = self._generator.next()
        now = time.perf_counter() - self._start
        finished = 0
        for response in responses:
            row = self._rows[response.uid]
            self.token_s[row].append(now)
            self.tokens[row].append(response.token)
            if response.finish_reason is not None:
                del self._rows[response.uid]
                finished += 1
        self.total += len(responses)
        return finished


def obey(model: Any, tokenizer: Any, order: Order) -> Answer:
    """Carry out one order."""
    loop = Loop(model, [[token] for token in tokenizer.eos_token_ids], order)
    prompts = [tokenizer.encode(prompt) for prompt in order.prompts]
    late = tokenizer.encode(order.late) if order.late else None
    cpu = time.process_time()
    wall_s = loop.run(order, prompts, late)
    cpu_s = time.process_time() - cpu
    loop.close()
    texts = [tokenizer.decode(tokens) for tokens in loop.tokens]
    return Answer(wall_s, cpu_s, loop.total, loop.inserted_s, loop.token_s, texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder")
    args = parser.parse_args()
    import mlx_lm

    model, tokenizer = mlx_lm.load(args.model)[:2]
    decoder = msgspec.json.Decoder(Order)
    print("ready", flush=True)
    for line in sys.stdin:
        answer = obey(model, tokenizer, decoder.decode(line))
        print(msgspec.json.encode(answer).decode(), flush=True)


if __name__ == "__main__":
    main()

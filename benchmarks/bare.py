"""mlx-lm's BatchGenerator in a bare closed loop: what the machine can do with no server around it.

A child process of the comparisons: one JSON order a line on stdin, one JSON answer a line on stdout. The model is
loaded once, each order gets a new generator with mlx-lm's defaults unless it names a chunk.
"""

import argparse
import sys
import time
from collections import deque
from itertools import accumulate
from typing import Any, Final

import msgspec

# No limit; JSON has no infinity.
NEVER_S: Final = 1e9


class Order(msgspec.Struct, frozen=True):
    """Run `prompts` through a batch of `concurrency` rows; `max_tokens` is the number of output tokens of each.

    `turns` are the lengths of sessions, which are runs of prompts that come one after the other; none means that each
    prompt is a session. A row that ends takes its session's next prompt, else the next session. With `due_s`, a
    session begins at its second, whatever else runs. After `limit_s` everything is stopped. `late` is inserted when
    that many tokens are out. `prefill_chunk` 0 means mlx-lm's default.
    """

    prompts: list[str]
    max_tokens: list[int]
    concurrency: int
    turns: list[int] = []
    due_s: list[float] = []
    limit_s: float = NEVER_S
    prefill_chunk: int = 0
    late: str = ""
    late_after: int = 0
    late_max_tokens: int = 1


class Answer(msgspec.Struct, frozen=True):
    """Times are seconds since the start; `token_s` holds those of each prompt, then of `late`.

    `inserted_s` is when each of them was inserted, or when it was due. `finished` tells those that had all of their
    tokens before the limit. `texts` are decoded after the clock has stopped, without the token that ended them.
    """

    wall_s: float
    cpu_s: float
    tokens: int
    prompt_tokens: list[int]
    inserted_s: list[float]
    token_s: list[list[float]]
    finished: list[bool]
    texts: list[str]


class Loop:
    """One generator and the rows in it."""

    def __init__(self, model: Any, stops: list[list[int]], order: Order, prompts: list[list[int]]) -> None:
        from mlx_lm.generate import BatchGenerator

        chunk = {"prefill_step_size": order.prefill_chunk} if order.prefill_chunk else {}
        self._generator = BatchGenerator(model, stop_tokens=stops, completion_batch_size=order.concurrency, **chunk)
        self._order = order
        self._prompts = prompts
        self._max_tokens = [*order.max_tokens, order.late_max_tokens]
        # Prompts of sessions that have not begun, and of sessions that run the rest, by the row that is in the batch.
        ends = list(accumulate(order.turns or [1] * len(order.prompts)))
        self._waiting = deque(deque(range(first, end)) for first, end in zip([0, *ends], ends, strict=False))
        self._due = deque(order.due_s)
        self._rows: dict[int, tuple[int, deque[int]]] = {}
        self._start = 0.0
        self.inserted_s = [0.0] * len(prompts)
        self.token_s: list[list[float]] = [[] for _ in prompts]
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.finished = [False] * len(prompts)
        self.total = 0

    def run(self) -> float:
        """Run until everything is generated or the limit is reached; return the wall time in seconds."""
        order = self._order
        has_late = bool(order.late)
        self._start = time.perf_counter()
        if not order.due_s:
            for _ in range(min(order.concurrency, len(self._waiting))):
                self._begin()
        while self._rows or self._due:
            if self._now() > order.limit_s:
                break
            self._begin_due()
            self._tick()
            if has_late and self.total >= order.late_after:
                self._insert(len(self._prompts) - 1, deque())
                has_late = False
        return self._now()

    def close(self) -> None:
        self._generator.close()

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _begin(self) -> None:
        """Insert the first prompt of the next session."""
        session = self._waiting.popleft()
        self._insert(session.popleft(), session)

    def _begin_due(self) -> None:
        """Begin the sessions whose time has come; sleep until the next one where nothing runs."""
        if self._due and not self._rows:
            time.sleep(max(0.0, min(self._due[0], self._order.limit_s) - self._now()))
        while self._due and self._due[0] <= self._now():
            first = self._waiting[0][0]
            self._begin()
            self.inserted_s[first] = self._due.popleft()

    def _insert(self, at: int, rest: deque[int]) -> None:
        (uid,) = self._generator.insert([self._prompts[at]], [self._max_tokens[at]])
        self._rows[uid] = at, rest
        self.inserted_s[at] = self._now()

    def _tick(self) -> None:
        """Run one step of the generator, and replace a row that ended by the next prompt."""
        if not self._rows:
            return
        _, responses = self._generator.next()
        now = self._now()
        for response in responses:
            at, rest = self._rows[response.uid]
            self.token_s[at].append(now)
            self.tokens[at].append(response.token)
            if response.finish_reason is None:
                continue
            self.finished[at] = True
            del self._rows[response.uid]
            if rest:
                self._insert(rest.popleft(), rest)
            elif self._waiting and not self._order.due_s:
                self._begin()
        self.total += len(responses)


def obey(model: Any, tokenizer: Any, order: Order) -> Answer:
    """Carry out one order of the parent process."""
    prompts = [tokenizer.encode(prompt) for prompt in (*order.prompts, *filter(None, [order.late]))]
    stops = set(tokenizer.eos_token_ids)
    loop = Loop(model, [[token] for token in stops], order, prompts)
    cpu = time.process_time()
    wall_s = loop.run()
    cpu_s = time.process_time() - cpu
    loop.close()
    texts = [tokenizer.decode([token for token in tokens if token not in stops]) for tokens in loop.tokens]
    lengths = [len(prompt) for prompt in prompts]
    return Answer(wall_s, cpu_s, loop.total, lengths, loop.inserted_s, loop.token_s, loop.finished, texts)


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

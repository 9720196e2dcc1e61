"""Modelled machine on which a chunk policy runs traffic: no clock, and no model."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from worker.engine.scheduling.pacing import ChunkPolicy, PassTime
from worker.model.pass_costs import WIDTHS
from worker.speculation.policy import best_width

# Chance that a token of a draft is right.
RIGHT = 0.95
ODDS = [RIGHT ** (at + 1) for at in range(WIDTHS[-1] - 1)]


def plain_s(rows: float) -> float:
    """A step without drafts, as measured with 5 million parameters on two cores."""
    return (12 + 4.0 * rows) / 1e3


def block_s(rows: float, width: int) -> float:
    return (12 + 2.2 * rows * width) / 1e3


def chunk_s(tokens: int) -> float:
    return (3 + 1.3 * tokens) / 1e3 if tokens else 0.0


@dataclass(slots=True)
class Client:
    """A request: tokens of its prompt that are left and that it generates, and when it came and last got something."""

    came: float
    prompt: int
    output: int
    left: int
    done: int = 0
    last: float = 0.0


@dataclass(slots=True)
class Seen:
    """What clients saw, in seconds, and what the policy decided."""

    ttft: list[float] = field(default_factory=list[float])
    # Between two events of a stream, and that by the tokens of the event.
    gaps: list[float] = field(default_factory=list[float])
    token_gaps: list[float] = field(default_factory=list[float])
    seconds: float = 0.0
    tokens: int = 0
    mixed: int = 0


def at(values: list[float], part: float) -> float:
    """The value below which this part of all lies."""
    return sorted(values)[int(len(values) * part)]


class Machine:
    """Runs rows as the engine does, and tells the policy of each pass what the engine would."""

    def __init__(self, *, drafts: bool, seed: int = 3, noise: float = 0.0) -> None:
        self.policy = ChunkPolicy(512)
        self.drafts = drafts
        self.now = 0.0
        self.rows: list[Client] = []
        self.seen = Seen()
        self._random = random.Random(seed)
        self._noise = noise

    def serve(self, jobs: Iterator[tuple[int, int]], clients: int) -> Seen:
        """Clients in a closed loop, until there are no jobs (prompt, output) left."""
        for _ in range(clients):
            self.ask(*next(jobs))
        while self.rows:
            for _ in self.tick():
                if (job := next(jobs, None)) is not None:
                    self.ask(*job)
        return self.seen

    def ask(self, prompt: int, output: int) -> Client:
        self.rows.append(Client(self.now, prompt, output, prompt))
        return self.rows[-1]

    def tick(self) -> list[Client]:
        """One tick; returns those that have ended."""
        prompts, streams = [row for row in self.rows if row.left], [row for row in self.rows if not row.left]
        longest = max((row.prompt for row in prompts), default=0)
        context = max((row.prompt - row.left for row in prompts), default=300)
        chunk = self.policy.chunk(len(prompts), len(streams), longest, context)
        parts = [min(chunk.tokens, row.left) for row in prompts]
        can_draft = self.drafts and bool(streams)
        width = best_width(self.policy.costs, len(streams), [ODDS] * len(streams))[0] if can_draft else 1
        step_s = 0.0
        if streams:
            step_s = plain_s(len(streams)) if width == 1 else block_s(len(streams), width)
        seconds = (step_s + chunk_s(sum(parts))) * (1 + self._noise * self._random.random())
        self.now += seconds
        tokens = sum(self._generate(row, width) for row in streams)
        if streams and not (parts and chunk.is_fused):
            self.policy.observe(PassTime(step_s, len(streams), width, tokens))
        if parts:
            fused = len(streams) if chunk.is_fused else 0
            self.policy.observe(PassTime(seconds if fused else seconds - step_s, fused, width, tokens, sum(parts)))
        for row, part in zip(prompts, parts, strict=True):
            row.left -= part
        self.seen.seconds, self.seen.tokens = self.now, self.seen.tokens + tokens
        self.seen.mixed += bool(prompts and streams)
        ended = [row for row in streams if row.done >= row.output]
        self.rows = [row for row in self.rows if row not in ended]
        return ended

    def _generate(self, row: Client, width: int) -> int:
        tokens = 1 + sum(self._random.random() < RIGHT for _ in range(width - 1))
        tokens = min(tokens, row.output - row.done)
        if row.done:
            self.seen.gaps.append(self.now - row.last)
            self.seen.token_gaps += [(self.now - row.last) / tokens] * tokens
        else:
            self.seen.ttft.append(self.now - row.came)
        row.done += tokens
        row.last = self.now
        return tokens


def traffic(count: int, seed: int = 3) -> Iterator[tuple[int, int]]:
    """Prompts of 40 to 800 tokens, of which 20 to 200 follow."""
    rng = random.Random(seed)
    return iter([(rng.randint(40, 800), rng.randint(20, 200)) for _ in range(count)])

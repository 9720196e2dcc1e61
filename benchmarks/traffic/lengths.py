"""Lengths of requests, drawn from stated distributions, and the times at which they arrive. A seed gives one list.

    list          in, tokens                              out, tokens
    uniform       40 to 1,200                             30 to 300
    chat          median 30, tail up to 8,000             median 200, up to 1,500        (ShareGPT)
    conversation  mean 1,155, up to 8,000                 mean 211, up to 1,500          (Azure 2023)
    code          mean 2,048, up to 8,000                 mean 28, up to 500             (Azure 2023)
    edit          150 to 900                              as many: a file, written again
    agent         a prefix of 2,000 to 60,000, which      50 to 400
                  10 to 40 turns share; a turn adds
                  50 to 1,000

Tails are lognormal. Files that are edited, an agent's prefix, and what a turn adds to it are log-uniform.
"""

import math
import random
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec


class Turn(msgspec.Struct, frozen=True):
    """One request: tokens that its prompt has more than the turn before, and tokens that are generated at most."""

    added: int
    max_tokens: int


# Turns that follow each other: each prompt begins with the one before it.
Session: TypeAlias = tuple[Turn, ...]

# Standard deviations of the logarithm of the lognormal distributions.
CHAT_IN_SIGMA: Final = 1.5
CHAT_OUT_SIGMA: Final = 0.9
AZURE_SIGMA: Final = 0.8
LONGEST_IN: Final = 8_000
LONGEST_OUT: Final = 1_500
LONGEST_CODE_OUT: Final = 500


def sessions(name: str, seed: int, requests: int, at_least: int, scale: float, room: int) -> list[Session]:
    """Sessions until there are so many requests, and no fewer than `at_least` sessions.

    A longer list begins with a shorter one. `scale` multiplies each length. Turns end where a session would outgrow
    `room`, which is what the model can hold. Raises KeyError for an unknown name.
    """
    draw = LISTS[name]
    chance = random.Random(f"{name} {seed}")
    drawn: list[Session] = []
    count = 0
    while count < requests or len(drawn) < at_least:
        drawn.append(_fitted(draw(chance), scale, room))
        count += len(drawn[-1])
    return drawn


def arrivals(seed: int, count: int, per_s: float) -> list[float]:
    """Return the seconds at which sessions begin: a Poisson process whose first session begins at once."""
    chance = random.Random(f"arrivals {seed}")
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + chance.expovariate(per_s))
    return times[:count]


def _fitted(session: Session, scale: float, room: int) -> Session:
    """Return the session with scaled lengths, without turns beyond `room`; the first turn is shortened to `room`."""
    kept: list[Turn] = []
    held = 0
    for turn in session:
        added, max_tokens = max(1, round(turn.added * scale)), max(1, round(turn.max_tokens * scale))
        if not kept:
            max_tokens = min(max_tokens, room // 2)
            added = min(added, room - max_tokens)
        if held + added + max_tokens > room:
            break
        held += added
        kept.append(Turn(added, max_tokens))
    return tuple(kept)


def _uniform(chance: random.Random) -> Session:
    return (Turn(chance.randint(40, 1200), chance.randint(30, 300)),)


def _chat(chance: random.Random) -> Session:
    prompt = _lognormal(chance, 30, CHAT_IN_SIGMA, LONGEST_IN)
    return (Turn(prompt, _lognormal(chance, 200, CHAT_OUT_SIGMA, LONGEST_OUT)),)


def _conversation(chance: random.Random) -> Session:
    prompt = _lognormal(chance, _median(1155, AZURE_SIGMA), AZURE_SIGMA, LONGEST_IN)
    return (Turn(prompt, _lognormal(chance, _median(211, AZURE_SIGMA), AZURE_SIGMA, LONGEST_OUT)),)


def _code(chance: random.Random) -> Session:
    prompt = _lognormal(chance, _median(2048, AZURE_SIGMA), AZURE_SIGMA, LONGEST_IN)
    return (Turn(prompt, _lognormal(chance, _median(28, AZURE_SIGMA), AZURE_SIGMA, LONGEST_CODE_OUT)),)


def _edit(chance: random.Random) -> Session:
    file = _log_uniform(chance, 150, 900)
    return (Turn(file, file),)


def _agent(chance: random.Random) -> Session:
    turns = chance.randint(10, 40)
    first = Turn(_log_uniform(chance, 2_000, 60_000), chance.randint(50, 400))
    rest = [Turn(_log_uniform(chance, 50, 1_000), chance.randint(50, 400)) for _ in range(turns - 1)]
    return (first, *rest)


def _lognormal(chance: random.Random, median: float, sigma: float, most: int) -> int:
    return min(most, max(1, round(chance.lognormvariate(math.log(median), sigma))))


def _median(mean: float, sigma: float) -> float:
    """Return the median of the lognormal distribution with this mean."""
    return mean / math.exp(sigma**2 / 2)


def _log_uniform(chance: random.Random, low: int, high: int) -> int:
    return round(math.exp(chance.uniform(math.log(low), math.log(high))))


LISTS: Final[dict[str, Callable[[random.Random], Session]]] = {
    "uniform": _uniform,
    "chat": _chat,
    "conversation": _conversation,
    "code": _code,
    "edit": _edit,
    "agent": _agent,
}

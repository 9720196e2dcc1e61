"""Simulation of conversations over many Macs: what a choice of the place by load, by hash or by mlxd's rule costs.

    python -m benchmarks.fleet                        # 4 and 64 Macs; about two minutes
    python -m benchmarks.fleet --macs 4 --turns 1000

Nothing is served: a Mac is a queue of prefills, one after the other, and a prefix cache that holds a number of
conversations. Conversations have a shared beginning, grow with each turn, and wait some seconds between turns. mlxd's
rule is the daemon's own code (`gateway/remote/peers/placement.py`), which sees what it would be told: queues and
what is warm.
"""

import argparse
import hashlib
import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.ctl.bench.measure import percentile, table
from gateway.remote.peers.placement import CandidatePlace, choose

# Speed of a Mac's prefill in tokens per second, mean seconds of an answer, and mean seconds until the next turn.
RATE: Final = 1000.0
ANSWER_S: Final = 6.0
PAUSE_S: Final = 15.0
# Number of tokens that all conversations begin with, and number of tokens of an answer.
SHARED: Final = 4000
ANSWERED: Final = 200
# Maximum number of conversations in a Mac's prefix cache.
HELD: Final = 24
# Number of Macs that mlxd's rule compares with the one where the conversation is cached.
COMPARED: Final = 4


@dataclass(slots=True)
class Mac:
    """One machine: the time at which its queue is empty, and the number of cached tokens of each conversation."""

    name: str
    free_s: float = 0.0
    cached: OrderedDict[int, int] = field(default_factory=OrderedDict[int, int])

    def wait_s(self, now: float) -> float:
        return max(0.0, self.free_s - now)

    def warm(self, chat: int) -> int:
        return self.cached.get(chat, SHARED if self.cached else 0)

    def prefill(self, chat: int, tokens: int, now: float) -> float:
        """Queue a prompt; return the time of its first token."""
        self.free_s = max(now, self.free_s) + (tokens - self.warm(chat)) / RATE
        self.cached[chat] = tokens + ANSWERED
        self.cached.move_to_end(chat)
        if len(self.cached) > HELD:
            self.cached.popitem(last=False)
        return self.free_s


@dataclass(slots=True, frozen=True)
class Turn:
    """The next prompt of a conversation."""

    chat: int
    tokens: int
    left: int


Policy = Callable[[Sequence[Mac], Turn, float, random.Random, dict[int, Mac]], Mac]


def round_robin() -> Policy:
    count = 0

    def policy(macs: Sequence[Mac], _turn: Turn, _now: float, _rng: random.Random, _home: dict[int, Mac]) -> Mac:
        nonlocal count
        count += 1
        return macs[count % len(macs)]

    return policy


def least_loaded(macs: Sequence[Mac], _turn: Turn, now: float, rng: random.Random, _home: dict[int, Mac]) -> Mac:
    return min(macs, key=lambda mac: (mac.wait_s(now), rng.random()))


def power_of_two(macs: Sequence[Mac], _turn: Turn, now: float, rng: random.Random, _home: dict[int, Mac]) -> Mac:
    return min(rng.choice(macs), rng.choice(macs), key=lambda mac: mac.wait_s(now))


def hashed(macs: Sequence[Mac], turn: Turn, _now: float, _rng: random.Random, _home: dict[int, Mac]) -> Mac:
    digest = hashlib.blake2b(str(turn.chat).encode(), digest_size=8).digest()
    return macs[int.from_bytes(digest) % len(macs)]


def as_mlxd(macs: Sequence[Mac], turn: Turn, now: float, rng: random.Random, home: dict[int, Mac]) -> Mac:
    seen = list(macs) if len(macs) <= 2 * COMPARED else rng.sample(macs, COMPARED)
    if (warm := home.get(turn.chat)) is not None and warm not in seen:
        seen.append(warm)
    rng.shuffle(seen)  # of equal Macs the first one is taken
    places = [CandidatePlace(mac.name, mac.wait_s(now), RATE, warm=mac.warm(turn.chat)) for mac in seen]
    chosen = choose(places, turn.tokens).place
    return next(mac for mac in seen if mac.name == chosen.name)


POLICIES: Final[dict[str, Callable[[], Policy]]] = {
    "round robin": round_robin,
    "least loaded": lambda: least_loaded,
    "power of two": lambda: power_of_two,
    "hash": lambda: hashed,
    "mlxd": lambda: as_mlxd,
}


def simulate(policy: Policy, count: int, chats: int, turns: int, seed: int) -> tuple[float, list[float], int]:
    """Return the cached share of all prompts, the sorted seconds to first tokens, and the number of moves."""
    rng = random.Random(seed)
    macs = [Mac(str(at)) for at in range(count)]
    home: dict[int, Mac] = {}
    events = [(rng.random() * 60, chat, _begun(chat, rng)) for chat in range(count * chats)]
    heapq.heapify(events)
    cached = tokens = moved = 0
    waits: list[float] = []
    newest = count * chats
    while len(waits) < turns:
        now, _, turn = heapq.heappop(events)
        mac = policy(macs, turn, now, rng, home)
        moved += home.get(turn.chat, mac) is not mac
        home[turn.chat] = mac
        cached, tokens = cached + mac.warm(turn.chat), tokens + turn.tokens
        there = mac.prefill(turn.chat, turn.tokens, now)
        waits.append(there - now)
        if turn.left > 1:
            following = Turn(turn.chat, turn.tokens + ANSWERED + rng.randint(150, 1500), turn.left - 1)
        else:
            home.pop(turn.chat)
            newest += 1
            following = _begun(newest, rng)
        heapq.heappush(events, (there + ANSWER_S + rng.expovariate(1 / PAUSE_S), following.chat, following))
    return cached / tokens, sorted(waits), moved


def _begun(chat: int, rng: random.Random) -> Turn:
    return Turn(chat, SHARED + rng.randint(200, 3000), rng.randint(4, 16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--macs", type=lambda text: list(map(int, text.split(","))), default=[4, 64])
    parser.add_argument("--chats", type=lambda text: list(map(int, text.split(","))), default=[12, 20], help="a Mac")
    parser.add_argument("--turns", type=int, default=750, help="a Mac")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    lines: list[tuple[str, ...]] = []
    for count in args.macs:
        for chats in args.chats:
            for name, policy in POLICIES.items():
                part, waits, moved = simulate(policy(), count, chats, args.turns * count, args.seed)
                marks = (f"{percentile(waits, mark):.1f}" for mark in (50, 95, 99))
                lines.append((str(count), str(chats), name, f"{part:.0%}", *marks, f"{moved / len(waits):.0%}"))
    print(table(("Macs", "chats a Mac", "choice", "cached", "TTFT p50 s", "p95", "p99", "moved"), lines))


if __name__ == "__main__":
    main()

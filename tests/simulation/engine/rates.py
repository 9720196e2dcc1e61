"""Rates of one world, from calm to storm, which its seed draws."""

import random
from dataclasses import dataclass
from enum import Enum, auto
from typing import Self

# Twice plain KV, then recurrent state, which has checkpoints, and sliding windows.
ARCHITECTURES = "qwen3", "qwen3", "qwen3_5", "gemma3_text"


class DraftKind(Enum):
    """Source of a world's drafts. `NOISY` takes them from the right answers, with some tokens wrong."""

    OFF = auto()
    LOOKUP = auto()
    NOISY = auto()


@dataclass(frozen=True, slots=True)
class Rates:
    """Probabilities are per tick. `storm` is from 0, where nothing fails, to 1."""

    architecture: str
    storm: float
    requests: int
    arrive: float
    abort: float
    no_memory: float
    broken_step: float
    kv_change: float
    eviction: float
    disk_full: float
    torn_file: float
    death: float
    max_running: int
    max_waiting: int
    prefill_chunk: int
    # Rows of 128 tokens whose KV fits.
    kv_rows: float
    cache_bytes: int
    has_disk: bool
    drafts: DraftKind
    reserved_tokens: int
    deadline: float

    @classmethod
    def of(cls, rng: random.Random) -> Self:
        storm = rng.choice((0.0, rng.random(), rng.random(), 1.0))

        def rate(most: float) -> float:
            return storm * most * rng.random()

        arrive = rng.choice((0.03, 0.2, 0.6, 0.95))
        cache_bytes = rng.choice((0, 1 << 17, 1 << 18, 1 << 20, 1 << 26))
        return cls(
            architecture=rng.choice(ARCHITECTURES),
            storm=storm,
            # Of many requests that come late, some reuse what earlier ones left.
            requests=rng.randint(3, 8) if arrive > 0.1 else rng.randint(6, 14),
            arrive=arrive,
            abort=rate(0.15),
            no_memory=rate(0.1),
            broken_step=rate(0.03),
            kv_change=rate(0.4),
            eviction=rng.choice((rate(0.2), 0.3)),
            disk_full=rate(0.8),
            torn_file=rate(0.3),
            death=rate(0.06),
            max_running=rng.randint(2, 6),
            max_waiting=rng.choice((3, 64, 64)),
            prefill_chunk=rng.choice((8, 32, 512)),
            kv_rows=rng.choice((2.0, 3.0, 5.0, 100.0)),
            cache_bytes=cache_bytes,
            has_disk=cache_bytes > 0 and rng.random() < 0.5,
            drafts=rng.choice(tuple(DraftKind)),
            reserved_tokens=rng.choice((1, 1, 8, 256)),
            deadline=rate(0.2),
        )

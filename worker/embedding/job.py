"""Embedding jobs: a job is one request for vectors or scores, from intake to its answer."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from worker.jobs.queued import QueuedJob

Numbers = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EmbeddingInput:
    """Token ids of an input, and the segment of each token for models that distinguish the texts of a pair."""

    ids: tuple[int, ...]
    types: tuple[int, ...] = ()


@dataclass(slots=True, eq=False, kw_only=True)
class EmbeddingJob(QueuedJob):
    """Embedding or scoring request. `results` has a row of numbers for each computed item.

    Vectors are truncated to `dimensions`; 0 means that they are not truncated.
    """

    items: list[EmbeddingInput]
    dimensions: int = 0
    # Indices of items that are not in a pass yet, sorted by length, the longest first.
    left: list[int] = field(default_factory=list)
    results: list[Numbers | None] = field(default_factory=list[Numbers | None])
    computed: int = 0
    computed_tokens: int = 0

    def __post_init__(self) -> None:
        self.left = sorted(range(len(self.items)), key=lambda at: len(self.items[at].ids), reverse=True)
        self.results = [None] * len(self.items)

    @property
    def is_computed(self) -> bool:
        return self.computed == len(self.items)

    def store(self, at: int, row: Numbers) -> None:
        """Store the result of an item."""
        self.results[at] = row
        self.computed += 1
        self.computed_tokens += len(self.items[at].ids)

    @property
    def tokens(self) -> int:
        return sum(len(item.ids) for item in self.items)

    def data(self) -> bytes:
        """Return all results in the format in which they are sent."""
        rows = [row for row in self.results if row is not None]
        assert len(rows) == len(self.items)
        return np.stack([_cut(row, self.dimensions) for row in rows]).astype("<f4").tobytes()


def _cut(row: Numbers, dimensions: int) -> Numbers:
    if not dimensions or dimensions >= len(row):
        return row
    part = row[:dimensions]
    return (part / np.linalg.norm(part)).astype(np.float32)

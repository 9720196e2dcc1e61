"""Groups of items for one forward pass, of nearly equal length so that there is little padding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from worker.embedding.job import EmbeddingInput, EmbeddingJob

# Maximum fraction of the longest row that may be padding in another.
_MAX_PADDING_FRACTION: Final = 0.12


@dataclass(frozen=True, slots=True)
class ResultPlace:
    """Place of a result: its job, and the index of its item."""

    job: EmbeddingJob
    at: int

    @property
    def item(self) -> EmbeddingInput:
        return self.job.items[self.at]


def take_group(jobs: Sequence[EmbeddingJob], tokens: int) -> list[ResultPlace]:
    """Take the longest item of the first job, and items of all jobs in order that are nearly as long.

    A group has up to `tokens` tokens including padding, and at least one item.
    """
    longest = len(jobs[0].items[jobs[0].left[0]].ids)
    room = max(1, tokens // longest)
    group: list[ResultPlace] = []
    for job in jobs:
        chosen = list(islice(_fitting(job, longest), room - len(group)))
        group += [ResultPlace(job, at) for at in chosen]
        taken = set(chosen)
        job.left = [at for at in job.left if at not in taken]
        if len(group) >= room:
            break
    return group


def _fitting(job: EmbeddingJob, longest: int) -> Iterator[int]:
    least = longest * (1 - _MAX_PADDING_FRACTION)
    return (at for at in job.left if least <= len(job.items[at].ids) <= longest)

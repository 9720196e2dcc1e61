"""Groups of items for one forward pass: of nearly equal length, so that little of it is padding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from worker.embedding.job import EmbeddingInput, EmbeddingJob

# Of the longest row, how much of another may be padding.
_PADDING: Final = 0.12


@dataclass(frozen=True, slots=True)
class ResultPlace:
    """Place of a result: its job, and the item of it."""

    job: EmbeddingJob
    at: int

    @property
    def item(self) -> EmbeddingInput:
        return self.job.items[self.at]


def take_group(jobs: Sequence[EmbeddingJob], tokens: int) -> list[ResultPlace]:
    """Take the longest item of the first job, and of all jobs in their order what is nearly as long, up to `tokens`
    with the padding. A group has one item at least."""
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
    least = longest * (1 - _PADDING)
    return (at for at in job.left if least <= len(job.items[at].ids) <= longest)

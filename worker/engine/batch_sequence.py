"""The sequences of a batch, and the caches that hold their KV row by row."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import StopSequences
from mlx_lm.models.cache import TokenBuffer

from worker.kv import batched
from worker.sampling.prompt_scores import Scores
from worker.sampling.sampler import Guard
from worker.sparse.selected_tokens import SelectedTokens


class PenaltyContext(TokenBuffer):
    """Tokens of a row that its processors are given, those of a draft among them until it is verified."""

    def shorten(self, count: int) -> None:
        """Take the newest tokens back."""
        self._size -= count


@dataclass(slots=True, eq=False)
class BatchSequence:
    """One sequence in the generator. `tokens` are those that its caches hold.

    `segments` are the tokens of the prompt that have not run, cut where a checkpoint may be taken; the last of them is
    one token, whose logits the first sample needs. `caches` are its own until it is in a batch.
    """

    uid: int
    segments: list[list[int]]
    max_tokens: int
    caches: list[Any]
    tokens: list[int]
    processors: Sequence[Guard]
    stops: StopSequences.Matcher
    total: int = 0
    # Of its prompt, has run.
    done: int = 0
    # Tokens sampled and given out.
    generated: int = 0
    # Its newest input was a token that was sampled, not the last of the prompt.
    has_begun: bool = False
    # Generated, but not in its caches: recurrent layers went back to before a block that was rejected in part.
    owed: list[int] = field(default_factory=list[int])
    context: PenaltyContext | None = None
    # Of its prompt, where they are wanted; and whether they were given out.
    scores: Scores | None = None
    is_told: bool = False
    # The slot of its adapter; 0 is the base model.
    adapter: int = 0
    # Of its prompt, the tokens that run, if not all do; and all but the last, with what was generated before.
    kept: SelectedTokens | None = None
    text: Sequence[int] = ()
    # Tokens of its longest medium whose tokens see each other: a slice has room for it. 0 without one.
    longest_whole: int = 0

    def __post_init__(self) -> None:
        last = self.segments[-1]
        if len(last) > 1:
            self.segments[-1:] = [last[:-1], last[-1:]]
        self.total = sum(len(segment) for segment in self.segments)

    @property
    def ahead(self) -> int:
        """Positions by which its next token is ahead of its slot."""
        return self.kept.ahead(len(self.tokens)) if self.kept is not None else 0

    @property
    def is_prefilled(self) -> bool:
        """Whether only the last token of its prompt is left to run."""
        return len(self.segments) == 1

    def ends(self, token: int) -> str | None:
        """Count a sampled token; the reason for which it is the last, `stop` or `length`."""
        self.generated += 1
        is_stop = self.stops.advance(token)
        if is_stop:
            return "stop"
        return "length" if self.generated >= self.max_tokens else None


@dataclass(slots=True)
class BatchSequences:
    """Sequences and, in the same order, the rows of `caches`."""

    members: list[BatchSequence] = field(default_factory=list[BatchSequence])
    caches: list[Any] = field(default_factory=list[Any])

    def __len__(self) -> int:
        return len(self.members)

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def index(self, uid: int) -> int | None:
        return next((at for at, member in enumerate(self.members) if member.uid == uid), None)

    def extend(self, other: "BatchSequences") -> None:
        """Take over all rows of `other`."""
        if not self.members:
            self.caches = other.caches
        elif other.members:
            batched.extend(self.caches, other.caches)
        self.members = self.members + other.members

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        if len(rows) == len(self.members):
            return
        if rows:
            batched.keep(self.caches, rows)
        else:
            self.caches = []
        self.members = [self.members[at] for at in rows]

    def split(self, rows: Sequence[int]) -> "BatchSequences":
        """Take these rows out."""
        taken = BatchSequences(self.members, self.caches)
        if len(rows) == len(self.members):
            self.members, self.caches = [], []
            return taken
        taken.caches = copy.deepcopy(self.caches)
        taken.keep(rows)
        self.keep([at for at in range(len(self.members)) if at not in rows])
        return taken

    def extract(self, at: int) -> tuple[list[Any], list[int]]:
        """The caches of one row, as views, and the tokens that they hold; of a row without any there are none.

        mlx-lm 0.31's `ArraysCache` raises a `TypeError` where it has held nothing.
        """
        tokens = self.members[at].tokens
        return (batched.extract(self.caches, at), list(tokens)) if tokens else ([], [])

    def evaluate(self) -> None:
        mx.eval([cache.state for cache in self.caches])

    def launch(self) -> None:
        mx.async_eval([cache.state for cache in self.caches])

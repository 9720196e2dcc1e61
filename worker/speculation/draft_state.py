"""State that drafters keep on a sequence, so that this state ends with the sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from worker.speculation.text_sources import Lookup, Tokens

UNLIMITED_DRAFT_TOKENS: Final = 1 << 30


@dataclass(slots=True, frozen=True)
class Drafting:
    """Draft settings of one request.

    `most` is the maximum number of tokens of a draft, `prediction` the output that the client predicts. Drafts may come
    from outputs of requests with the same `salt`; with `by_model`, a draft model may also make drafts.
    """

    most: int = UNLIMITED_DRAFT_TOKENS
    prediction: tuple[int, ...] = ()
    salt: str = ""
    by_model: bool = True


class Branch(Protocol):
    """Tokens that followed the same text in an earlier sequence. A branch is valid as long as the row generates its
    tokens.
    """

    def advance(self, tokens: Sequence[int]) -> bool:
        """Advance by generated tokens; return False if the row leaves the branch."""
        ...

    def next_tokens(self, most: int) -> list[int]:
        """Return at most `most` of the branch's next tokens."""
        ...


@dataclass(slots=True)
class BackOff:
    """Exponential back-off: after failures without a success between them, the next 1, 3, 7, … turns are skipped."""

    _failures: int = 0
    _left: int = 0

    def skips(self) -> bool:
        """Return whether this turn is skipped."""
        if self._left == 0:
            return False
        self._left -= 1
        return True

    def fail(self, most: int) -> None:
        """Skip the next 2^n − 1 turns after n failures; `most` is the maximum of n."""
        self._failures = min(self._failures + 1, most)
        self._left = (1 << self._failures) - 1

    def reset(self) -> None:
        """End the series of failures."""
        self._failures = 0


@dataclass(slots=True)
class DraftedCounts:
    """Numbers of a row's tokens that were drafted and accepted, in total and of the client's prediction."""

    drafted: int = 0
    accepted: int = 0
    predicted: int = 0
    predicted_accepted: int = 0


@dataclass(slots=True, eq=False)
class DraftedText:
    """Text of one row, with the acceptance of its drafts.

    `rate` is the share of accepted tokens in drafts that were found in text, `model_rate` the share in a model's
    drafts. `counts` are those since the last report.
    """

    lookup: Lookup
    drafting: Drafting
    begin: int
    rate: float = 0.0
    model_rate: float = 0.0
    counts: DraftedCounts = field(default_factory=DraftedCounts)
    # Tokens that the row's grammar forces next.
    expected: Sequence[int] = ()
    # Cached branch that the row follows.
    branch: Branch | None = None
    # Number of tokens for which the row has followed this branch.
    followed: int = 0
    # Back-off of the lookup: it is paused after a draft whose first token was wrong.
    back_off: BackOff = field(default_factory=BackOff)

    @classmethod
    def of(cls, tokens: Tokens, drafting: Drafting) -> "DraftedText":
        return cls(Lookup(tokens, drafting.prediction), drafting, len(tokens))


@dataclass(slots=True)
class DraftReading:
    """Text of a row that a draft model processes without other rows. The text is as it was when the draft was
    requested; `caches` hold the KV of its first `done` tokens.
    """

    text: Tokens
    caches: list[Any]
    done: int = 0

    @property
    def left(self) -> int:
        return len(self.text) - self.done


@dataclass(slots=True, eq=False)
class DraftState:
    """Drafter's part of a sequence; fields that the drafter does not use are None or 0."""

    followed: DraftedText | None = None
    # Number of tokens in the draft model's caches.
    done: int = 0
    # Text that the draft model is processing alone; None otherwise.
    reading: DraftReading | None = None

    def take_counts(self) -> DraftedCounts:
        """Return the counts of drafted tokens since the last call."""
        counts = DraftedCounts()
        if self.followed is not None:
            counts, self.followed.counts = self.followed.counts, counts
        return counts


class DraftedRow(Protocol):
    """Sequence with the state of its drafter."""

    @property
    def draft(self) -> DraftState: ...

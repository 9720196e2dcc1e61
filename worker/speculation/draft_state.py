"""State of one sequence that drafters keep on it, so that it ends with the sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from worker.speculation.text_sources.indexed_text import Tokens
from worker.speculation.text_sources.lookup import Lookup

UNLIMITED_DRAFT_TOKENS: Final = 1 << 30


@dataclass(slots=True, frozen=True)
class Drafting:
    """Draft settings of one request.

    `most` is the maximum number of tokens of a draft, `prediction` the output that the client predicts. Drafts may come
    from outputs with the same `salt`; with `by_model` a draft model may make them, too.
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


@dataclass(slots=True, eq=False)
class DraftedText:
    """Text of one row, with the acceptance of its drafts.

    `rate` is the share of accepted tokens in drafts that were found in text, `model_rate` the share in a model's
    drafts. `drafted` and `accepted` count tokens of the client's prediction since the last report.
    """

    lookup: Lookup
    drafting: Drafting
    begin: int
    rate: float = 0.0
    model_rate: float = 0.0
    drafted: int = 0
    accepted: int = 0
    # Tokens that the row's grammar forces next.
    expected: Sequence[int] = ()
    # Cached branch that the row follows.
    branch: Branch | None = None
    # Number of tokens for which the row has followed this branch.
    followed: int = 0
    # Remaining steps without lookup in the current back-off.
    rest: int = 0
    # Exponent of the back-off's length.
    rests: int = 0

    @classmethod
    def of(cls, tokens: Tokens, drafting: Drafting) -> "DraftedText":
        return cls(Lookup(tokens, drafting.prediction), drafting, len(tokens))

    def back_off(self, most: int) -> None:
        """Pause lookup for 1, 3, 7, … steps, longer each time; `most` is the maximum exponent."""
        self.rests = min(self.rests + 1, most)
        self.rest = (1 << self.rests) - 1


@dataclass(slots=True)
class DraftReading:
    """Text that a draft model processes alone, as it was when the draft was requested; the caches hold `done` of its
    tokens.
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

    def take_prediction_counts(self) -> tuple[int, int]:
        """Return the numbers of drafted and of accepted tokens of the client's prediction, and reset both to 0."""
        text = self.followed
        if text is None:
            return 0, 0
        counts, text.drafted, text.accepted = (text.drafted, text.accepted), 0, 0
        return counts


class DraftedRow(Protocol):
    """Sequence with the state of its drafter."""

    @property
    def draft(self) -> DraftState: ...

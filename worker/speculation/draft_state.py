"""State of one sequence that drafters keep on it, so that it is gone with the sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from worker.speculation.text_sources.indexed_text import Tokens
from worker.speculation.text_sources.lookup import Lookup

# No limit for the tokens of a draft.
ALL: Final = 1 << 30


@dataclass(slots=True, frozen=True)
class Drafting:
    """A request's part: the most tokens of a draft, the output that its client predicts, whose text it may see, and
    whether a draft model may read its text."""

    most: int = ALL
    prediction: tuple[int, ...] = ()
    salt: str = ""
    by_model: bool = True


class Branch(Protocol):
    """Tokens that followed a row's text before, for as long as the row goes the same way."""

    def advance(self, tokens: Sequence[int]) -> bool:
        """Go on by these tokens; False where the row leaves it."""
        ...

    def ahead(self, most: int) -> list[int]:
        """At most so many tokens that came next."""
        ...


@dataclass(slots=True, eq=False)
class Followed:
    """A row that a drafter follows, with the share of its drafted tokens that were right: of those that are found, and
    of a model's. `drafted` and `accepted` are of its prediction, since they were asked for last.
    """

    lookup: Lookup
    drafting: Drafting
    begin: int
    rate: float = 0.0
    model_rate: float = 0.0
    drafted: int = 0
    accepted: int = 0
    # What its grammar has next.
    expected: Sequence[int] = ()
    # What followed its text before, and tokens for which it has gone the same way.
    branch: Branch | None = None
    followed: int = 0
    # Steps to rest, and how often it has had to.
    rest: int = 0
    rests: int = 0

    @classmethod
    def of(cls, tokens: Tokens, drafting: Drafting) -> "Followed":
        return cls(Lookup(tokens, drafting.prediction), drafting, len(tokens))

    def back_off(self, most: int) -> None:
        self.rests = min(self.rests + 1, most)
        self.rest = (1 << self.rests) - 1


@dataclass(slots=True)
class DraftReading:
    """A text that a model that drafts reads alone, as it was when a draft was asked for: its caches, and how far."""

    text: Tokens
    caches: list[Any]
    done: int = 0

    @property
    def left(self) -> int:
        return len(self.text) - self.done


@dataclass(slots=True, eq=False)
class DraftState:
    """The part of a sequence that its drafter owns: None and 0 where it has no use for them."""

    followed: Followed | None = None
    # Of the text, tokens that the caches of a model that drafts hold; and the text while it is read alone.
    done: int = 0
    reading: DraftReading | None = None

    def take_spent(self) -> tuple[int, int]:
        """Predicted tokens that were drafted since this was asked last, and how many were right."""
        row = self.followed
        if row is None:
            return 0, 0
        spent, row.drafted, row.accepted = (row.drafted, row.accepted), 0, 0
        return spent


class DraftedRow(Protocol):
    """A sequence as drafters see it."""

    @property
    def draft(self) -> DraftState: ...

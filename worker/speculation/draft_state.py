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
    from outputs with the same `salt`, and from a draft model only with `by_model`.
    """

    most: int = UNLIMITED_DRAFT_TOKENS
    prediction: tuple[int, ...] = ()
    salt: str = ""
    by_model: bool = True


class Branch(Protocol):
    """Tokens that followed the same text before. It is valid as long as the row generates the same tokens."""

    def advance(self, tokens: Sequence[int]) -> bool:
        """Move on by generated tokens; return False if the row leaves the branch."""
        ...

    def next_tokens(self, most: int) -> list[int]:
        """Return at most `most` of the tokens that came next."""
        ...


@dataclass(slots=True, eq=False)
class DraftedText:
    """Text of one row, with the acceptance of its drafts.

    `rate` and `model_rate` are the shares of accepted tokens, of drafts that were found in text and of a model's.
    `drafted` and `accepted` count tokens of the client's prediction since they were last reported.
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
    # The cached branch that the row follows, and the number of tokens for which it has followed it.
    branch: Branch | None = None
    followed: int = 0
    # Steps without lookup that are left of the current back-off, and the exponent of its length.
    rest: int = 0
    rests: int = 0

    @classmethod
    def of(cls, tokens: Tokens, drafting: Drafting) -> "DraftedText":
        return cls(Lookup(tokens, drafting.prediction), drafting, len(tokens))

    def back_off(self, most: int) -> None:
        """Pause lookup for 1, 3, 7, … steps, longer each time; `most` limits the exponent."""
        self.rests = min(self.rests + 1, most)
        self.rest = (1 << self.rests) - 1


@dataclass(slots=True)
class DraftReading:
    """Text that a draft model reads alone, as of the request for a draft; its caches hold `done` tokens."""

    text: Tokens
    caches: list[Any]
    done: int = 0

    @property
    def left(self) -> int:
        return len(self.text) - self.done


@dataclass(slots=True, eq=False)
class DraftState:
    """Part of a sequence that belongs to its drafter; the parts that the drafter does not use are None and 0."""

    followed: DraftedText | None = None
    # Number of tokens that the caches of a drafting model hold, and the text while it is read alone.
    done: int = 0
    reading: DraftReading | None = None

    def take_prediction_counts(self) -> tuple[int, int]:
        """Return and reset the numbers of drafted and of accepted tokens of the client's prediction."""
        text = self.followed
        if text is None:
            return 0, 0
        counts, text.drafted, text.accepted = (text.drafted, text.accepted), 0, 0
        return counts


class DraftedRow(Protocol):
    """Sequence with the state of its drafter."""

    @property
    def draft(self) -> DraftState: ...

"""Drafter: guesses at the tokens that rows will generate next, for the batch to verify.

A draft changes the forward passes that are run, never a token: the batch samples at each position as it would without
drafts, and keeps the tokens of a draft as long as they equal the sampled ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from worker.speculation.draft_state import Branch, DraftedRow, Drafting
from worker.speculation.text_sources import Tokens

Draw = Callable[[Sequence[Any], Any, int], Any]
"""(rows, logits `[rows, vocab]`, positions after the next) -> ids `[rows]`, as these rows would sample there."""
Rows = Callable[[], tuple[Sequence[DraftedRow], list[Any]]]
"""() -> rows that decode, in the order of the rows of their caches, and these caches."""


class Drafter:
    """Source of drafts for the rows of one batch; it owns each row's `draft`. This base class drafts nothing.

    Owned by the engine thread. `widest` is the maximum number of tokens of a row in a forward pass: its newest token
    and the draft. `token_bytes` and `nbytes` are the KV memory of a draft model: per token, and in total.
    """

    widest = 1
    token_bytes = 0
    nbytes = 0
    # Number of tokens that a draft model must process before every row that waits for a draft can have one.
    unread = 0

    def read(self, count: int) -> int:
        """Process at most `count` of the unread tokens, all of one row; return the number of processed tokens."""
        return 0

    def begin(self, draw: Draw, rows: Rows) -> None:
        """Begin a batch, which has no rows yet."""

    def add(self, row: DraftedRow, tokens: Tokens, drafting: Drafting) -> None:
        """Add a row whose prompt and output so far are `tokens`."""

    def on_tick(self) -> None:
        """Do a small piece of deferred work at the beginning of a tick."""

    def follow(self, row: DraftedRow, branch: Branch) -> None:
        """Set the cached branch that an added row follows; the branch begins after the row's last token."""

    def discard(self, row: DraftedRow) -> None:
        """Remove a row, if it was added."""

    def note(self, row: DraftedRow, tokens: Sequence[int]) -> None:
        """Append generated tokens to the text of a row."""

    def expect(self, row: DraftedRow, tokens: Sequence[int]) -> None:
        """Set the tokens that a row's grammar forces next. The first of them is the row's newest token, which is not
        noted yet.
        """

    def is_ready(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> bool:
        """Return whether the next step probably has drafts. A step with drafts starts later than one without: it needs
        the newest tokens.
        """
        return False

    def drafts(self, rows: Sequence[DraftedRow], newest: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        """Return at most `most[i]` draft tokens to follow row i's newest token, which is not noted yet."""
        return [[] for _ in rows]

    def verified(self, rows: Sequence[DraftedRow], drafts: Sequence[Sequence[int]], accepted: Sequence[int]) -> None:
        """Record the number of accepted tokens of each draft."""


class Proposer(ABC):
    """Model that drafts for the rows of one batch. Owned by the engine thread.

    A row gets its state here with its first draft. `longest` is the maximum number of tokens of a draft; `token_bytes`
    and `nbytes` are the model's KV memory: per token, and in total.
    """

    source: str
    longest = 7
    token_bytes = 0
    # Number of tokens that must be processed, slice by slice, before every row that waits for a draft can have one.
    unread = 0

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    def is_reading(self, row: DraftedRow) -> bool:
        """Return whether a row's text is still being processed, so that the row can have no draft yet."""
        return False

    def read(self, count: int) -> int:
        """Process at most `count` of the unread tokens, all of one row; return the number of processed tokens."""
        return 0

    @abstractmethod
    def begin(self, draw: Draw, rows: Rows) -> None:
        """Begin a batch, which has no rows yet; drafts are drawn by `draw`."""

    @abstractmethod
    def end(self) -> None:
        """Free the state of all rows. No draft is requested until the next `begin`."""

    def discard(self, row: DraftedRow) -> None:  # noqa: B027  # some have no state of a row
        """Free the state of a row."""

    @abstractmethod
    def propose(
        self, rows: Sequence[DraftedRow], texts: Sequence[Tokens], newest: Sequence[int], count: int
    ) -> list[list[int]]:
        """Return `count` draft tokens per row, or an empty list for a row without a draft. A draft continues after the
        row's newest token, which is not yet in the row's text.

        All rows have generated a token. Long texts are not processed here, because the tick waits for the drafts.
        """

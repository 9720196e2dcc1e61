"""Drafter: guesses at the tokens that rows will generate next, for the batch to verify.

A draft changes which forward passes are made, never a token: the batch samples at each position as it would have, and
keeps the tokens of a draft for as long as they are the ones sampled.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from worker.speculation.draft_state import Branch, DraftedRow, Drafting
from worker.speculation.text_sources.indexed_text import Tokens

Draw = Callable[[Sequence[Any], Any, int], Any]
"""(rows, logits `[rows, vocab]`, positions ahead) -> ids `[rows]`, drawn of them as these rows would draw there."""
Rows = Callable[[], tuple[Sequence[DraftedRow], list[Any]]]
"""() -> rows that generate, in the order of the rows of their caches, and these caches."""


class Drafter(Protocol):
    """Drafts for the rows of one batch, whose `draft` it owns. Owned by the engine thread.

    `widest` are the most tokens that a row has in one forward pass, its newest and the draft.
    """

    widest: int
    # Of a token of a row, in the memory of a model that drafts; and all of that.
    token_bytes: int

    @property
    def nbytes(self) -> int: ...

    @property
    def unread(self) -> int:
        """Tokens that a model that drafts has yet to read before rows that it was asked for have drafts."""
        ...

    def read(self, count: int) -> int:
        """Have it read at most so many of them, of one row; returns how many it has read."""
        ...

    def begin(self, draw: Draw, rows: Rows) -> None:
        """A batch begins, without rows."""
        ...

    def add(self, row: DraftedRow, tokens: Tokens, drafting: Drafting) -> None:
        """Follow a row, whose prompt and output so far are `tokens`."""
        ...

    def tend(self) -> None:
        """A tick begins: there is time for a small piece of what is not urgent."""
        ...

    def follow(self, row: DraftedRow, branch: Branch) -> None:
        """A row that was added goes a way that is known; `branch` stands behind its last token."""
        ...

    def discard(self, row: DraftedRow) -> None: ...

    def note(self, row: DraftedRow, tokens: Sequence[int]) -> None:
        """The row has generated these."""
        ...

    def expect(self, row: DraftedRow, tokens: Sequence[int]) -> None:
        """The grammar of a row has these next, the newest token first, which it has not been told of by `note`."""
        ...

    def is_ready(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> bool:
        """Whether `drafts` will probably have some for the next step; having to read its inputs delays its launch."""
        ...

    def drafts(self, rows: Sequence[DraftedRow], newest: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        """Guesses at what follows each row's newest token, which it has not been told of by `note`."""
        ...

    def verified(self, rows: Sequence[DraftedRow], drafts: Sequence[Sequence[int]], accepted: Sequence[int]) -> None:
        """So many tokens of each draft were the ones sampled."""
        ...


class Proposer(Protocol):
    """Drafts of a model, for the rows of one batch. Owned by the engine thread.

    It learns of a row from the first draft on. `longest` are the most tokens of a draft that it is asked for.
    """

    source: str
    longest: int
    token_bytes: int

    @property
    def nbytes(self) -> int: ...

    @property
    def unread(self) -> int:
        """Tokens of texts that have to be read, slice by slice, before the rows that were asked for have drafts."""
        ...

    def is_reading(self, row: DraftedRow) -> bool:
        """Whether this row is one of them: asking for it is of no use yet."""
        ...

    def read(self, count: int) -> int:
        """Read at most so many tokens of one row; returns how many."""
        ...

    def begin(self, draw: Draw, rows: Rows) -> None:
        """A batch begins, without rows; drafts are drawn by `draw`."""
        ...

    def end(self) -> None:
        """Let go of all rows: nothing is asked any more."""
        ...

    def discard(self, row: DraftedRow) -> None: ...

    def propose(
        self, rows: Sequence[DraftedRow], texts: Sequence[Tokens], newest: Sequence[int], count: int
    ) -> list[list[int]]:
        """So many tokens that may follow each row's newest, which its text lacks; none where it cannot say.

        Only rows that have generated a token are asked for. No long text is read here: a tick waits for it.
        """
        ...


class NoDrafts:
    """The drafter where there is no speculation."""

    widest = 1
    token_bytes = 0
    nbytes = 0
    unread = 0

    def read(self, count: int) -> int:
        return 0

    def begin(self, draw: Draw, rows: Rows) -> None:
        pass

    def add(self, row: DraftedRow, tokens: Tokens, drafting: Drafting) -> None:
        pass

    def tend(self) -> None:
        pass

    def follow(self, row: DraftedRow, branch: Branch) -> None:
        pass

    def discard(self, row: DraftedRow) -> None:
        pass

    def note(self, row: DraftedRow, tokens: Sequence[int]) -> None:
        pass

    def expect(self, row: DraftedRow, tokens: Sequence[int]) -> None:
        pass

    def is_ready(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> bool:
        return False

    def drafts(self, rows: Sequence[DraftedRow], newest: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        return [[] for _ in rows]

    def verified(self, rows: Sequence[DraftedRow], drafts: Sequence[Sequence[int]], accepted: Sequence[int]) -> None:
        pass

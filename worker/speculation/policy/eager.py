"""Drafts of a model at each step, whether they pay or not, for checks that no draft changes a token."""

from collections.abc import Sequence

from worker.speculation.draft_state import DraftedRow, Drafting, Followed
from worker.speculation.drafter import Drafter, Draw, Proposer, Rows
from worker.speculation.text_sources.indexed_text import Tokens


class EagerDrafts(Drafter):
    """All that a proposer says, so many tokens each."""

    def __init__(self, proposer: Proposer, count: int) -> None:
        self._proposer = proposer
        self._count = count
        self.widest = count + 1
        self.drafted = 0
        self.accepted = 0

    @property
    def unread(self) -> int:
        return self._proposer.unread

    def read(self, count: int) -> int:
        return self._proposer.read(count)

    def begin(self, draw: Draw, rows: Rows) -> None:
        self._proposer.begin(draw, rows)

    def add(self, row: DraftedRow, tokens: Tokens, drafting: Drafting) -> None:
        row.draft.followed = Followed.of(tokens, drafting)

    def discard(self, row: DraftedRow) -> None:
        row.draft.followed = None
        self._proposer.discard(row)

    def note(self, row: DraftedRow, tokens: Sequence[int]) -> None:
        if row.draft.followed is not None:
            row.draft.followed.lookup.extend(tokens)

    def is_ready(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> bool:
        return True

    def drafts(self, rows: Sequence[DraftedRow], newest: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        asked = [at for at, limit in enumerate(most) if limit > 0]
        texts = [row.draft.followed.lookup.text for row in (rows[at] for at in asked) if row.draft.followed is not None]
        drafts = self._proposer.propose([rows[at] for at in asked], texts, [newest[at] for at in asked], self._count)
        drafted = dict(zip(asked, drafts, strict=True))
        return [drafted.get(at, [])[:limit] for at, limit in enumerate(most)]

    def verified(self, rows: Sequence[DraftedRow], drafts: Sequence[Sequence[int]], accepted: Sequence[int]) -> None:
        self.drafted += sum(map(len, drafts))
        self.accepted += sum(accepted)

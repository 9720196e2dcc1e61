"""Drafters that ignore whether drafts are worth their time. They serve to check that drafts change no token."""

import random
from collections.abc import Sequence
from typing import Final

from worker.speculation.draft_state import DraftedRow, DraftedText, Drafting
from worker.speculation.drafter import Drafter, Draw, Proposer, Rows
from worker.speculation.text_sources.indexed_text import Tokens

# Share of the tokens drafted by `NoisyDrafts` that are right.
_RIGHT_SHARE: Final = 0.8


class _TrialDrafts(Drafter):
    """Base class that counts drafted and accepted tokens, because a check without drafts proves nothing."""

    def __init__(self, longest: int) -> None:
        self.widest = longest + 1
        self.drafted = 0
        self.accepted = 0

    def add(self, row: DraftedRow, tokens: Tokens, drafting: Drafting) -> None:
        row.draft.followed = DraftedText.of(tokens, drafting)

    def discard(self, row: DraftedRow) -> None:
        row.draft.followed = None

    def note(self, row: DraftedRow, tokens: Sequence[int]) -> None:
        if row.draft.followed is not None:
            row.draft.followed.lookup.extend(tokens)

    def verified(self, rows: Sequence[DraftedRow], drafts: Sequence[Sequence[int]], accepted: Sequence[int]) -> None:
        self.drafted += sum(map(len, drafts))
        self.accepted += sum(accepted)


class EagerDrafts(_TrialDrafts):
    """Drafter that requests `count` tokens from a proposer at each step."""

    def __init__(self, proposer: Proposer, count: int) -> None:
        super().__init__(count)
        self._proposer = proposer
        self._count = count

    @property
    def unread(self) -> int:
        return self._proposer.unread

    def read(self, count: int) -> int:
        return self._proposer.read(count)

    def begin(self, draw: Draw, rows: Rows) -> None:
        self._proposer.begin(draw, rows)

    def discard(self, row: DraftedRow) -> None:
        super().discard(row)
        self._proposer.discard(row)

    def is_ready(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> bool:
        return True

    def drafts(self, rows: Sequence[DraftedRow], newest: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        asked = [at for at, limit in enumerate(most) if limit > 0]
        texts = [row.draft.followed.lookup.text for row in (rows[at] for at in asked) if row.draft.followed is not None]
        drafts = self._proposer.propose([rows[at] for at in asked], texts, [newest[at] for at in asked], self._count)
        drafted = dict(zip(asked, drafts, strict=True))
        return [drafted.get(at, [])[:limit] for at, limit in enumerate(most)]


class NoisyDrafts(_TrialDrafts):
    """Drafter that takes drafts of varying length from the rows' known outputs, and replaces some tokens by random
    ones."""

    def __init__(self, vocab_size: int, longest: int = 6, seed: int = 0) -> None:
        super().__init__(longest)
        self._texts: list[list[int]] = []
        self._vocab_size = vocab_size
        self._longest = longest
        self._rng = random.Random(seed)

    def learn(self, text: Sequence[int]) -> None:
        """Add a whole sequence of prompt and output."""
        self._texts.append(list(text))

    def is_ready(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> bool:
        return bool(self._texts) and self._rng.random() < _RIGHT_SHARE

    def drafts(self, rows: Sequence[DraftedRow], newest: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        texts = [row.draft.followed.lookup.text.tolist() for row in rows if row.draft.followed is not None]
        return [self._draft([*text, token], limit) for text, token, limit in zip(texts, newest, most, strict=True)]

    def _draft(self, known: list[int], most: int) -> list[int]:
        length = min(most, self._rng.choice([0, 1, self._longest])) if self._texts else 0
        text = next((text for text in self._texts if text[: len(known)] == known), known)
        right = text[len(known) : len(known) + length]
        draft = right + [self._rng.randrange(self._vocab_size) for _ in range(length - len(right))]
        return [
            token if self._rng.random() < _RIGHT_SHARE else self._rng.randrange(self._vocab_size) for token in draft
        ]

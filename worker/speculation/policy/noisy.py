"""Drafts that are mostly right, sometimes wrong and of any length, for checks that no draft changes a token."""

import random
from collections.abc import Sequence

from worker.speculation.draft_state import DraftedRow, Drafting, Followed
from worker.speculation.drafter import Drafter
from worker.speculation.text_sources.indexed_text import Tokens

# Of drafted tokens, as many are what the text has there.
_RIGHT = 0.8


class NoisyDrafts(Drafter):
    """Drafts from texts that rows are known to generate, and else at random; none before it knows one."""

    def __init__(self, vocab_size: int, longest: int = 6, seed: int = 0) -> None:
        self._texts: list[list[int]] = []
        self._vocab_size = vocab_size
        self._longest = longest
        self.widest = longest + 1
        self._rng = random.Random(seed)
        # Tokens drafted and accepted: a check that had none has shown nothing.
        self.drafted = 0
        self.accepted = 0

    def learn(self, text: Sequence[int]) -> None:
        """A whole sequence, prompt and output."""
        self._texts.append(list(text))

    def add(self, row: DraftedRow, tokens: Tokens, drafting: Drafting) -> None:
        row.draft.followed = Followed.of(tokens, drafting)

    def discard(self, row: DraftedRow) -> None:
        row.draft.followed = None

    def note(self, row: DraftedRow, tokens: Sequence[int]) -> None:
        if row.draft.followed is not None:
            row.draft.followed.lookup.extend(tokens)

    def is_ready(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> bool:
        return bool(self._texts) and self._rng.random() < _RIGHT

    def drafts(self, rows: Sequence[DraftedRow], newest: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        texts = [row.draft.followed.lookup.text.tolist() for row in rows if row.draft.followed is not None]
        return [self._draft([*text, token], limit) for text, token, limit in zip(texts, newest, most, strict=True)]

    def verified(self, rows: Sequence[DraftedRow], drafts: Sequence[Sequence[int]], accepted: Sequence[int]) -> None:
        self.drafted += sum(len(draft) for draft in drafts)
        self.accepted += sum(accepted)

    def _draft(self, known: list[int], most: int) -> list[int]:
        length = min(most, self._rng.choice([0, 1, self._longest])) if self._texts else 0
        text = next((text for text in self._texts if text[: len(known)] == known), known)
        right = text[len(known) : len(known) + length]
        draft = right + [self._rng.randrange(self._vocab_size) for _ in range(length - len(right))]
        return [token if self._rng.random() < _RIGHT else self._rng.randrange(self._vocab_size) for token in draft]

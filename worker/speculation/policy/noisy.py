"""Drafts that are mostly right, sometimes wrong and of any length, for checks that no draft changes a token."""

import random
from collections.abc import Sequence

from worker.speculation.drafter import Drafting, NoDrafts, Tokens

# Of drafted tokens, as many are what the text has there.
_RIGHT = 0.8


class NoisyDrafts(NoDrafts):
    """Drafts from texts that rows are known to generate, and else at random; none before it knows one."""

    def __init__(self, vocab_size: int, longest: int = 6, seed: int = 0) -> None:
        self._texts: list[list[int]] = []
        self._vocab_size = vocab_size
        self._longest = longest
        self.widest = longest + 1
        self._rng = random.Random(seed)
        self._rows: dict[int, list[int]] = {}
        # Tokens drafted and accepted: a check that had none has shown nothing.
        self.drafted = 0
        self.accepted = 0

    def learn(self, text: Sequence[int]) -> None:
        """A whole sequence, prompt and output."""
        self._texts.append(list(text))

    def add(self, uid: int, tokens: Tokens, drafting: Drafting) -> None:
        self._rows[uid] = tokens.tolist()

    def discard(self, uid: int) -> None:
        self._rows.pop(uid, None)

    def note(self, uid: int, tokens: Sequence[int]) -> None:
        if uid in self._rows:
            self._rows[uid].extend(tokens)

    def is_ready(self, uids: Sequence[int], most: Sequence[int]) -> bool:
        return bool(self._texts) and self._rng.random() < _RIGHT

    def drafts(self, uids: Sequence[int], newest: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        return [
            self._draft([*self._rows[uid], token], limit) for uid, token, limit in zip(uids, newest, most, strict=True)
        ]

    def verified(self, uids: Sequence[int], drafts: Sequence[Sequence[int]], accepted: Sequence[int]) -> None:
        self.drafted += sum(len(draft) for draft in drafts)
        self.accepted += sum(accepted)

    def _draft(self, known: list[int], most: int) -> list[int]:
        length = min(most, self._rng.choice([0, 1, self._longest])) if self._texts else 0
        text = next((text for text in self._texts if text[: len(known)] == known), known)
        right = text[len(known) : len(known) + length]
        draft = right + [self._rng.randrange(self._vocab_size) for _ in range(length - len(right))]
        return [token if self._rng.random() < _RIGHT else self._rng.randrange(self._vocab_size) for token in draft]

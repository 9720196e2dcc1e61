"""Drafts of a model at each step, whether they pay or not, for checks that no draft changes a token."""

from collections.abc import Sequence

import numpy as np

from worker.speculation.drafter import Drafting, Draw, NoDrafts, Proposer, Rows, Tokens


class EagerDrafts(NoDrafts):
    """All that a proposer says, so many tokens each."""

    def __init__(self, proposer: Proposer, count: int) -> None:
        self._proposer = proposer
        self._count = count
        self.widest = count + 1
        self._texts: dict[int, list[int]] = {}
        self.drafted = 0
        self.accepted = 0

    @property
    def unread(self) -> int:
        return self._proposer.unread

    def read(self, count: int) -> int:
        return self._proposer.read(count)

    def begin(self, draw: Draw, rows: Rows) -> None:
        self._proposer.begin(draw, rows)

    def add(self, uid: int, tokens: Tokens, drafting: Drafting) -> None:
        self._texts[uid] = tokens.tolist()

    def discard(self, uid: int) -> None:
        if self._texts.pop(uid, None) is not None:
            self._proposer.discard(uid)

    def note(self, uid: int, tokens: Sequence[int]) -> None:
        if uid in self._texts:
            self._texts[uid].extend(tokens)

    def is_ready(self, uids: Sequence[int], most: Sequence[int]) -> bool:
        return True

    def drafts(self, uids: Sequence[int], newest: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        asked = [at for at, limit in enumerate(most) if limit > 0]
        texts = [np.array(self._texts[uids[at]], dtype=np.int32) for at in asked]
        drafts = self._proposer.propose([uids[at] for at in asked], texts, [newest[at] for at in asked], self._count)
        drafted = dict(zip(asked, drafts, strict=True))
        return [drafted.get(at, [])[:limit] for at, limit in enumerate(most)]

    def verified(self, uids: Sequence[int], drafts: Sequence[Sequence[int]], accepted: Sequence[int]) -> None:
        self.drafted += sum(map(len, drafts))
        self.accepted += sum(accepted)

"""Log-probabilities of a prompt's own tokens. Such rows are prefilled one by one and in small slices: elsewhere the
logits of a prompt are never computed, and those of a whole one do not fit into memory."""

from collections.abc import Collection
from typing import Any, Final

import mlx.core as mx

from worker.engine.batch_sequence import BatchSequences
from worker.engine.forward import ForwardPart, forward
from worker.engine.row import Member
from worker.kv import batched

# Positions whose logits are looked at together.
SLICE: Final = 64


class ScoredRows:
    """Rows whose prompts are scored, each in caches of its own. Owned by the generator."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.rows: list[BatchSequences] = []

    def add(self, member: Member, *, is_single: bool) -> None:
        """A row; one of a lane of one keeps its caches, which may have no batch form."""
        caches = member.caches if is_single else batched.merge([member.caches])
        member.caches = []
        self.rows.append(BatchSequences([member], caches))

    def due(self, *, is_alone: bool) -> list[BatchSequences]:
        """Rows whose turn it is: all, or one after the other beside rows that generate, which wait for each."""
        if is_alone or not self.rows:
            return list(self.rows)
        self.rows = [*self.rows[1:], self.rows[0]]
        return self.rows[-1:]

    def take_complete(self) -> list[BatchSequences]:
        """Take out those whose scores were given out."""
        complete = [rows for rows in self.rows if rows.members[0].scores is None]
        self.rows = [rows for rows in self.rows if rows.members[0].scores is not None]
        return complete

    def run(self, rows: BatchSequences, most: int) -> int:
        """Run the next slice of one of them; its tokens."""
        member = rows.members[0]
        assert member.scores is not None
        part = member.segments[0][: min(most, max(SLICE, member.longest_whole))]
        logits = forward(self._model, ForwardPart(rows.members, mx.array([part]), rows.caches, [len(part)]))
        for at in range(0, len(part), SLICE):
            member.scores.add(logits[0, at : at + SLICE])
        rows.evaluate()
        return len(part)

    def discard(self, members: Collection[Member]) -> None:
        self.rows = [rows for rows in self.rows if rows.members[0] not in members]

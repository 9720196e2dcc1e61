"""Rows that are computed one by one, each in its own caches."""

from collections.abc import Collection

from worker.engine.row import BatchSequence
from worker.engine.sequence_group import SequenceGroup
from worker.kv import batched


class SoloRows:
    """Groups of one row each. Owned by the generator."""

    def __init__(self) -> None:
        self.rows: list[SequenceGroup] = []

    def add(self, sequence: BatchSequence, *, is_single: bool) -> None:
        """Add a row. With `is_single` the row keeps its own caches, which may have no batch form."""
        caches = sequence.caches if is_single else batched.merge([sequence.caches])
        sequence.caches = []
        self.rows.append(SequenceGroup([sequence], caches))

    def due(self, *, is_alone: bool) -> list[SequenceGroup]:
        """Return the rows whose turn it is: all rows, or only one of them while there are other rows, which it
        delays."""
        if is_alone or not self.rows:
            return list(self.rows)
        self.rows = [*self.rows[1:], self.rows[0]]
        return self.rows[-1:]

    def discard(self, sequences: Collection[BatchSequence]) -> None:
        self.rows = [rows for rows in self.rows if rows.sequences[0] not in sequences]

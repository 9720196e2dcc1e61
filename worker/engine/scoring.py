"""Log-probabilities of a prompt's own tokens.

Rows with scored prompts are prefilled one by one and in small slices, because the logits of a whole prompt do not fit
memory. Other prefills compute no logits.
"""

from typing import Any, Final

import mlx.core as mx

from worker.engine.forward import ForwardPart, forward
from worker.engine.sequence_group import SequenceGroup
from worker.engine.solo_rows import SoloRows

SLICE_TOKENS: Final = 64


class ScoredRows(SoloRows):
    """Rows whose prompts are scored, each in its own caches. Owned by the generator."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def take_complete(self) -> list[SequenceGroup]:
        """Remove and return the rows whose scores are complete and were taken."""
        complete = [rows for rows in self.rows if rows.sequences[0].scores is None]
        self.rows = [rows for rows in self.rows if rows.sequences[0].scores is not None]
        return complete

    def run(self, rows: SequenceGroup, most: int) -> int:
        """Run the next slice of a row. Returns the number of tokens in the slice."""
        sequence = rows.sequences[0]
        assert sequence.scores is not None
        part = sequence.segments[0][: min(most, max(SLICE_TOKENS, sequence.longest_whole))]
        logits = forward(self._model, ForwardPart(rows.sequences, mx.array([part]), rows.caches, [len(part)]))
        for at in range(0, len(part), SLICE_TOKENS):
            sequence.scores.add(logits[0, at : at + SLICE_TOKENS])
        rows.evaluate()
        return len(part)

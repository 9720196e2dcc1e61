"""Rows with a sparse prefill, while they wait for the selection of their tokens."""

from mlx_lm.generate import generation_stream

from protocol.stats import Stats
from worker.engine.row import Row
from worker.sparse.chooser import Chooser
from worker.sparse.importance import ImportanceReader


class SparseRows:
    """Rows of a sparse prefill, owned by the engine. Every method does nothing for a model without sparse prefill."""

    def __init__(self, reader: ImportanceReader | None) -> None:
        self._chooser = Chooser(reader, generation_stream) if reader is not None else None

    @property
    def counts(self) -> Stats | None:
        return self._chooser.counts if self._chooser is not None else None

    @property
    def is_busy(self) -> bool:
        return self._chooser is not None and self._chooser.is_busy

    @property
    def nbytes(self) -> int:
        """Bytes of KV that the draft model needs for the prompt that it currently reads."""
        return self._chooser.nbytes if self._chooser is not None else 0

    def needs(self, row: Row) -> int:
        """Return the bytes of KV that the draft model needs until it has selected the row's tokens. If the row needs no
        selection, return the bytes for the prompt that it currently reads.
        """
        if self._chooser is None or not row.keep or row.kept is not None:
            return self.nbytes
        return self._chooser.needs(len(row.prompt))

    def longest(self, tokens: int, budget: int) -> int:
        """Return the length of the longest prompt, at most `tokens`, that the draft model can read with `budget` bytes
        of KV."""
        return tokens if self._chooser is None else min(tokens, self._chooser.longest(budget))

    def must_wait(self, row: Row) -> bool:
        """Whether the tokens of a row are not selected yet; if so, request their selection."""
        if not row.keep or row.kept is not None:
            return False
        assert self._chooser is not None, "the intake refuses what the model cannot do"
        row.kept = self._chooser.kept(row.rid, row.tokens()[: len(row.prompt)], row.keep, row.cache_salt)
        return row.kept is None

    def step(self, limit_s: float) -> None:
        """Continue the draft model's prefill for about `limit_s` seconds."""
        assert self._chooser is not None
        self._chooser.step(limit_s)

    def forget(self, row: Row) -> None:
        """Drop the selection of a row that has ended."""
        if self._chooser is not None and row.keep:
            self._chooser.forget(row.rid)

    def drop(self) -> int | None:
        """Drop the KV of the prompt that the draft model is reading; reading restarts when the prompt is requested
        again. Return the rid of the prompt's row."""
        return self._chooser.drop() if self._chooser is not None else None

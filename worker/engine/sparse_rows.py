"""Rows with a sparse prefill, while they wait for the choice of the tokens that are kept."""

from mlx_lm.generate import generation_stream

from protocol.stats import Stats
from worker.engine.row import Row
from worker.sparse.chooser import Chooser
from worker.sparse.importance import ImportanceReader


class SparseRows:
    """Owned by the engine; of a model without sparse prefill, it has nothing to do."""

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
        """KV of the prompt that is being read."""
        return self._chooser.nbytes if self._chooser is not None else 0

    def needs(self, row: Row) -> int:
        """KV that is held beside this row's own once it is the next."""
        if self._chooser is None or not row.keep or row.kept is not None:
            return self.nbytes
        return self._chooser.needs(len(row.prompt))

    def longest(self, tokens: int, budget: int) -> int:
        """Tokens of the longest prompt of so many that can be read with so many bytes of KV."""
        return tokens if self._chooser is None else min(tokens, self._chooser.longest(budget))

    def must_wait(self, row: Row) -> bool:
        """Whether the tokens that are kept of a row are not chosen yet; they are from now on."""
        if not row.keep or row.kept is not None:
            return False
        assert self._chooser is not None, "the intake refuses what the model cannot do"
        row.kept = self._chooser.kept(row.rid, row.tokens()[: len(row.prompt)], row.keep, row.cache_salt)
        return row.kept is None

    def step(self, limit_s: float) -> None:
        """Read on for about so long."""
        assert self._chooser is not None
        self._chooser.step(limit_s)

    def forget(self, row: Row) -> None:
        """The row has ended."""
        if self._chooser is not None and row.keep:
            self._chooser.forget(row.rid)

    def drop(self) -> int | None:
        """Give up what is being read, until it is asked for again; returns the rid of its row."""
        return self._chooser.drop() if self._chooser is not None else None

"""Rows with questions, computed one by one: the prompt in slices, then each question on the prompt's KV.

Rows that are computed one by one, each in its own caches.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx

from worker.engine.decode_batch import SequenceGroup
from worker.engine.forward import ForwardPart, forward
from worker.engine.row import SLICE_TOKENS, BatchSequence, Path, inner_paths, next_tokens
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


class QuestionRows(SoloRows):
    """Rows with questions, each in its own caches. Owned by the generator."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def run(self, rows: SequenceGroup) -> int:
        """Run the next slice of a row's prompt. Returns the number of tokens in the slice."""
        part = rows.sequences[0].segments[0]
        self._forward(rows, part)
        rows.evaluate()
        return len(part)

    def ask(self, rows: SequenceGroup) -> int:
        """Run the next forward pass of a row's questions; return its number of tokens. Returns 0 once all questions are
        answered."""
        sequence = rows.sequences[0]
        sequence.asking = sequence.asking or self._ask(rows)
        return next(sequence.asking, 0)

    def _ask(self, rows: SequenceGroup) -> Iterator[int]:
        """Answer one question after another. Yields the number of tokens of each forward pass."""
        sequence = rows.sequences[0]
        questions, prompt = sequence.row.questions, len(sequence.tokens)
        assert questions is not None
        before = batched.mark(rows.caches)
        questions.skip_unasked()
        while questions.left:
            question = questions.left[0]
            tokens = [*sequence.segments[0], *question.tokens]
            logits: mx.array | None = None
            for at in range(0, len(tokens), SLICE_TOKENS):
                part = tokens[at : at + SLICE_TOKENS]
                logits = self._forward(rows, part)
                sequence.tokens.extend(part)
                rows.evaluate()
                yield len(part)
            reads: dict[Path, dict[int, float]] = {(): _logprobs(logits, next_tokens(question.labels, ()))}
            after = batched.mark(rows.caches)
            for path in inner_paths(question.labels):
                logits = self._forward(rows, path)
                reads[path] = _logprobs(logits, next_tokens(question.labels, path))
                batched.go_back(rows.caches, after)
                yield len(path)
            questions.answer([_total(reads, label) for label in question.labels])
            questions.skip_unasked()
            batched.go_back(rows.caches, before)
            del sequence.tokens[prompt:]

    def _forward(self, rows: SequenceGroup, tokens: Sequence[int]) -> mx.array:
        part = ForwardPart(rows.sequences, mx.array([list(tokens)]), rows.caches, [len(tokens)])
        return forward(self._model, part)


def _logprobs(logits: mx.array | None, ids: list[int]) -> dict[int, float]:
    """Return the log-probabilities of these ids after the last token of a pass."""
    assert logits is not None, "a question has tokens"
    values = logits[0, -1].astype(mx.float32)
    picked: Any = (values[mx.array(ids)] - mx.logsumexp(values)).tolist()
    return dict(zip(ids, picked, strict=True))


def _total(reads: Mapping[Path, Mapping[int, float]], label: Sequence[int]) -> float:
    """Return the log-probability of a label: the sum of those of its tokens, each after the tokens before it."""
    return sum(reads[tuple(label[:at])][token] for at, token in enumerate(label))

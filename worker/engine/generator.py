"""Generator: runs prompts in chunks on a model, and one decode step after another for all sequences past their prompt.

Models and the caches of one sequence are mlx-lm's; the batch and its caches are ours.

Rows with scored prompts, which need log-probabilities of the prompt's own tokens, are prefilled one by one and in small
slices, because the logits of a whole prompt do not fit memory. Other prefills compute no logits.

Rows with questions are computed one by one: the prompt in slices, then each question on the prompt's KV.
"""

import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
from mlx_lm.generate import generation_stream

from worker.engine.decode_batch import DecodeBatch, SequenceGroup
from worker.engine.forward import ForwardPart, can_pack, forward, has_media
from worker.engine.row import SLICE_TOKENS, BatchSequence, Path, Token, inner_paths, next_tokens
from worker.engine.scheduling.pacing import PassTime
from worker.kv import batched, ragged
from worker.kv.quantized import make_caches
from worker.model.batch_mode import BatchMode
from worker.sampling.logprobs import Scores
from worker.sampling.sampler import RowSampler
from worker.speculation.drafter import Drafter

# Number of tokens of a scored prompt whose logits are computed together.
SCORED_SLICE_TOKENS: Final = 64


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
        part = sequence.segments[0][: min(most, max(SCORED_SLICE_TOKENS, sequence.longest_whole))]
        logits = forward(self._model, ForwardPart(rows.sequences, mx.array([part]), rows.caches, [len(part)]))
        for at in range(0, len(part), SCORED_SLICE_TOKENS):
            sequence.scores.add(logits[0, at : at + SCORED_SLICE_TOKENS])
        rows.evaluate()
        return len(part)


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


@dataclass(slots=True)
class PrefillProgress:
    """Progress of a prompt by `count` tokens. At the end of the prompt, its last token is left for the next decode
    step."""

    sequence: BatchSequence
    count: int
    is_segment_end: bool
    is_prompt_end: bool
    # Scores of a scored prompt, once they are complete.
    scores: Scores | None = None
    # Whether all questions of the row are answered.
    is_answered: bool = False


class Generator:
    """Runs sequences in the model's batch mode. Owned by one thread.

    A step gives one token to each row past its prompt, and runs one chunk of each other row's prompt. If the chunks are
    fused with the decode step, the step has one forward pass, else two.
    """

    def __init__(
        self, model: Any, sampler: RowSampler, mode: BatchMode, drafter: Drafter, pass_tokens: int = 0
    ) -> None:
        self._model = model
        # Maximum number of tokens of a forward pass; 0 means no limit.
        self._pass_tokens = pass_tokens
        self._mode = mode
        # Sequences are grouped by phase. `_waiting` has inserted sequences, `_prefill` and `_scored` have sequences
        # whose prompts are running, `_asked` has those with questions, and `_decode` has those past their prompt.
        self._waiting: deque[BatchSequence] = deque()
        self._prefill = SequenceGroup()
        self._scored = ScoredRows(model)
        self._asked = QuestionRows(model)
        self._drafter = drafter
        self._decode = DecodeBatch(model, sampler, drafter)
        # Forward passes whose time became known in the newest step.
        self.timed: list[PassTime] = []

    @property
    def nbytes(self) -> int:
        """Size of all caches in bytes."""
        waiting = sum(cache.nbytes for sequence in self._waiting for cache in sequence.caches)
        return int(waiting + sum(rows.nbytes for rows in self._groups))

    @property
    def _groups(self) -> list[SequenceGroup]:
        """Groups of all rows, except inserted rows that have not run yet."""
        return [self._prefill, self._decode, *self._scored.rows, *self._asked.rows]

    @property
    def _has_no_others(self) -> bool:
        """Whether all rows are computed one by one, so that a pass for each of them delays no other row."""
        return not len(self._decode) and not len(self._prefill)

    def generating(self) -> tuple[list[BatchSequence], list[Any]]:
        """Return the sequences past their prompt, in the order of their rows in the caches, and the caches."""
        return self._decode.sequences, self._decode.caches

    def insert(self, sequence: BatchSequence) -> None:
        """Queue a sequence with nonempty segments. A sequence with scores must not have tokens in its caches yet."""
        sequence.caches = sequence.caches or make_caches(self._model)
        self._waiting.append(sequence)

    def extract(self, sequence: BatchSequence) -> tuple[list[Any], list[int]]:
        """Return the caches of one sequence and the tokens in them. The caches are views while the sequence is in a
        batch."""
        if sequence in self._waiting:
            return (sequence.caches, sequence.tokens) if sequence.tokens else ([], [])
        rows = next(rows for rows in self._groups if sequence in rows.sequences)
        return rows.extract(rows.sequences.index(sequence))

    def discard(self, sequences: Collection[BatchSequence]) -> None:
        """Remove sequences in any phase."""
        if not sequences:
            return
        self._waiting = deque(sequence for sequence in self._waiting if sequence not in sequences)
        for rows in (self._prefill, self._decode):
            leaving = [at for at, sequence in enumerate(rows.sequences) if sequence in sequences]
            rows.keep(batched.without(len(rows), leaving))
        self._scored.discard(sequences)
        self._asked.discard(sequences)

    def compact(self) -> None:
        """Free KV memory that no sequence uses any more."""
        for rows in self._groups:
            batched.compact(rows.caches)

    def run_passes(
        self, chunk: int, *, is_fused: bool = True, reads: int = 0
    ) -> tuple[list[PrefillProgress], list[Token]]:
        """Run the forward passes of one step, with at most `chunk` tokens of each prompt. The chunks are fused with the
        decode step if `is_fused` is set and the model allows it.

        Afterwards a draft model reads at most `reads` tokens. The caller must discard ended sequences before the next
        step.
        """
        with mx.stream(generation_stream):
            self._admit()
            prompted = self._join()
            began = time.perf_counter()
            prompts = self._chunk(chunk)
            fused = prompts if is_fused and self._can_fuse() else None
            sampled = self._decode.decode(fused)
            self.timed = self._decode.timed
            if prompts is not None:
                self._run_prompts(prompts, fused is not None, began)
                prompted += [self._advance(*each) for each in zip(prompts.sequences, prompts.lengths, strict=True)]
            if reads:
                self._read(reads)
            return prompted + self._run_scored(chunk) + self._run_asked(), sampled

    def wait(self) -> None:
        """Wait until all launched work has ended."""
        mx.synchronize(generation_stream)
        self._decode.rest()

    def _admit(self) -> None:
        if not self._waiting:
            return
        single = self._mode is BatchMode.SINGLE
        if single:
            if any(map(len, self._groups)):
                return
            sequences = [self._waiting.popleft()]
        else:
            sequences = self._fitting()
            for _ in sequences:
                self._waiting.popleft()
        for sequence in sequences:
            if sequence.scores is not None:
                self._scored.add(sequence, is_single=single)
            elif sequence.row.questions is not None:
                self._asked.add(sequence, is_single=single)
        sequences = [each for each in sequences if each.scores is None and each.row.questions is None]
        if not sequences:
            return
        caches = sequences[0].caches if single else batched.merge([sequence.caches for sequence in sequences])
        for sequence in sequences:
            sequence.caches = []
        self._prefill.extend(SequenceGroup(sequences, caches))

    def _fitting(self) -> list[BatchSequence]:
        """Return the first waiting sequences whose media fit one pass. No chunk may cut such a medium, and a pass has a
        place for each of its tokens in every row."""
        if not self._pass_tokens:
            return list(self._waiting)
        fitting: list[BatchSequence] = []
        rows = len(self._prefill)
        longest = max((sequence.longest_whole for sequence in self._prefill.sequences), default=0)
        for sequence in self._waiting:
            rows, longest = rows + 1, max(longest, sequence.longest_whole)
            if rows > 1 and rows * longest > self._pass_tokens:
                break
            fitting.append(sequence)
        return fitting

    def _join(self) -> list[PrefillProgress]:
        """Move rows that have only the last token of their prompt left to the decode rows."""
        ready = [at for at, sequence in enumerate(self._prefill.sequences) if sequence.is_prefilled]
        groups = [self._prefill.split(ready)] if ready else []
        groups += self._scored.take_complete()
        for rows in groups:
            self._decode.join(rows)
        joined = [sequence for rows in groups for sequence in rows.sequences]
        prompted = [PrefillProgress(sequence, sequence.total - sequence.done, True, True) for sequence in joined]
        for sequence in joined:
            sequence.done = sequence.total
        return prompted

    def _run_scored(self, chunk: int) -> list[PrefillProgress]:
        """Run a slice of each scored prompt, or of only one while other rows generate or are in prefill. A prompt's
        scores are complete once only its last token is left."""
        prompted: list[PrefillProgress] = []
        for rows in self._scored.due(is_alone=self._has_no_others):
            sequence = rows.sequences[0]
            if not sequence.is_prefilled:
                self._decode.finish()
                prompted.append(self._advance(sequence, self._scored.run(rows, chunk)))
                self._decode.end_pass()
            if sequence.is_prefilled:
                scores, sequence.scores = sequence.scores, None
                prompted.append(PrefillProgress(sequence, 0, False, False, scores))
        return prompted

    def _run_asked(self) -> list[PrefillProgress]:
        """Run a slice of each prompt with questions, or a pass of its questions; only of one row while other rows
        generate or are in prefill."""
        prompted: list[PrefillProgress] = []
        for rows in self._asked.due(is_alone=self._has_no_others):
            sequence = rows.sequences[0]
            self._decode.finish()
            if sequence.is_prefilled:
                count = self._asked.ask(rows)
                prompted.append(PrefillProgress(sequence, count, False, False, is_answered=not count))
            else:
                prompted.append(self._advance(sequence, self._asked.run(rows)))
            self._decode.end_pass()
        return prompted

    def _chunk(self, most: int) -> ForwardPart | None:
        """Return a pass over at most `most` next tokens of each prompt; None if there are no prompts."""
        sequences = self._prefill.sequences
        if not sequences:
            return None
        if self._pass_tokens:  # `most` may have been widened for a medium of a sequence that still waits
            longest = max(sequence.longest_whole for sequence in sequences)
            most = min(most, max(self._pass_tokens // len(sequences), longest))
        if self._mode is BatchMode.EQUAL:  # a chunk that is no longer than the rest of any prompt needs no padding
            most = min(most, *(len(sequence.segments[0]) for sequence in sequences))
        parts = [sequence.segments[0][:most] for sequence in sequences]
        lengths = [len(part) for part in parts]
        width = ragged.wide(max(lengths)) if self._mode is BatchMode.TOGETHER else max(lengths)
        inputs = mx.array([[*part, *[0] * (width - len(part))] for part in parts])
        return ForwardPart(sequences, inputs, self._prefill.caches, lengths)

    def _can_fuse(self) -> bool:
        """Whether prompts can share a pass with the decode step."""
        decode, prefill = self._decode.sequences, self._prefill.sequences
        return bool(decode) and can_pack(self._model) and not has_media(decode) and not has_media(prefill)

    def _run_prompts(self, prompts: ForwardPart, is_fused: bool, began: float) -> None:
        """Run the prompts if they were not fused with the step, and remove their padding from the caches."""
        if not is_fused:
            forward(self._model, prompts)
        batched.rewind(prompts.caches, prompts.excess)
        if is_fused:
            self._prefill.launch()
            return
        self._decode.finish()
        self._prefill.evaluate()
        seconds = self._decode.end_pass() if len(self._decode) else time.perf_counter() - began
        self.timed.append(PassTime(seconds, prompted=sum(prompts.lengths)))

    def _read(self, count: int) -> None:
        self._decode.finish()
        if read := self._drafter.read(count):
            self.timed.append(PassTime(self._decode.end_pass(), prompted=read, is_reading=True))

    def _advance(self, sequence: BatchSequence, count: int) -> PrefillProgress:
        segment = sequence.segments[0]
        sequence.tokens.extend(segment[:count])
        sequence.done += count
        sequence.segments[:1] = [segment[count:]] if segment[count:] else []
        return PrefillProgress(sequence, count, not segment[count:], False)

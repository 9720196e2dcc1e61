"""Batch of the rows that generate: each step gives every row one token, and the accepted tokens of its draft.

A plain step is launched before the tokens of the previous step are read. A verify block is a row's newest token and its
draft in one forward pass: the row samples at each position as it would without a draft, and draft tokens are accepted
up to the first that differs. Caches that keep tokens one by one are then rewound. Recurrent layers cannot be rewound:
after a partial rejection, a row with such layers is restored to where the block began, and *owes* the tokens that it
has generated. The row's next block begins with the owed tokens. If they leave no room for a draft, that block is
accepted whole. Chunks of prompts can be fused with either kind of step.

Group of sequences whose KV is in the same caches, row by row.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx

from worker.engine.forward import ForwardPart, forward
from worker.engine.row import BatchSequence, Context, Token
from worker.engine.scheduling.pacing import PassTime
from worker.kv import batched, ragged
from worker.model import memory
from worker.sampling.sampler import RowSampler
from worker.speculation.drafter import Drafter
from worker.structured.masks import constrains


@dataclass(slots=True)
class SequenceGroup:
    """Sequences, in the order of their rows in `caches`."""

    sequences: list[BatchSequence] = field(default_factory=list[BatchSequence])
    caches: list[Any] = field(default_factory=list[Any])

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def extend(self, other: "SequenceGroup") -> None:
        """Append all rows of `other`, which must not be used afterwards."""
        if not self.sequences:
            self.caches = other.caches
        elif other.sequences:
            batched.extend(self.caches, other.caches)
        self.sequences = self.sequences + other.sequences

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        if len(rows) == len(self.sequences):
            return
        if rows:
            batched.keep(self.caches, rows)
        else:
            self.caches = []
        self.sequences = [self.sequences[at] for at in rows]

    def split(self, rows: Sequence[int]) -> "SequenceGroup":
        """Remove these rows and return them as a group."""
        if len(rows) == len(self.sequences):
            taken = SequenceGroup(self.sequences, self.caches)
            self.sequences, self.caches = [], []
            return taken
        taken = SequenceGroup([self.sequences[at] for at in rows], batched.take(self.caches, rows))
        taken.launch()
        self.keep(batched.without(len(self.sequences), rows))
        return taken

    def extract(self, at: int) -> tuple[list[Any], list[int]]:
        """Return the caches of one row as views, and the tokens in the caches; a row without tokens has no caches.

        The caches of a row without tokens are not extracted, because mlx-lm 0.31's `ArraysCache` raises `TypeError` if
        it has never had contents.
        """
        tokens = self.sequences[at].tokens
        return (batched.extract(self.caches, at), list(tokens)) if tokens else ([], [])

    def evaluate(self) -> None:
        mx.eval([cache.state for cache in self.caches])

    def launch(self) -> None:
        mx.async_eval([cache.state for cache in self.caches])


# Maximum number of tokens of a row's verify block if the model has recurrent layers: after a partial rejection, they
# run the accepted tokens again.
MAX_RECURRENT_BLOCK_TOKENS: Final = 16


@dataclass(slots=True)
class _PendingStep:
    """Plain step that was launched; the next step reads its tokens."""

    rows: int
    prompted: int
    launched: float
    # Time at which the step ended, if it is known before the step's tokens are read. It is known if the loop rests, and
    # on a CPU, where a launch returns when almost all of the step has run.
    ended: float = 0.0


@dataclass(slots=True)
class _Block:
    """Verify block: the owed tokens of each row, its newest token and its draft, then padding."""

    rows: list[list[int]]
    lengths: list[int]
    # Index of each row's newest token.
    begins: list[int]
    drafts: list[list[int]]
    # Number of accepted tokens of each draft.
    accepted: list[int] = field(default_factory=list[int])

    @classmethod
    def of(cls, sequences: Sequence[BatchSequence], ids: Sequence[int], drafts: list[list[int]]) -> "_Block":
        rows = [[*sequence.owed, token, *draft] for sequence, token, draft in zip(sequences, ids, drafts, strict=True)]
        lengths = [len(row) for row in rows]
        width = ragged.wide(max(lengths))
        padded = [[*row, *[0] * (width - len(row))] for row in rows]
        return cls(padded, lengths, [len(sequence.owed) for sequence in sequences], drafts)

    @property
    def width(self) -> int:
        return len(self.rows[0])

    @property
    def steps(self) -> int:
        """Maximum number of positions at which any row of the block samples."""
        return max(len(draft) for draft in self.drafts) + 1

    def drafted(self, at: int) -> int:
        """Return the number of draft tokens with which a row's block was made."""
        return self.lengths[at] - self.begins[at] - 1

    def kept(self, at: int) -> int:
        """Return the number of a row's tokens that stay in its caches."""
        return self.begins[at] + 1 + self.accepted[at]

    def generated(self, at: int) -> list[int]:
        """Return the tokens that a row generates by this block."""
        return self.rows[at][self.begins[at] : self.kept(at)]


class DecodeBatch(SequenceGroup):
    """Rows that generate. The input of a row is a sampled token that was not copied to the host yet, or its prompt's
    last token."""

    def __init__(self, model: Any, sampler: RowSampler, drafter: Drafter) -> None:
        super().__init__()
        self._model = model
        self._sampler = sampler
        self._drafter = drafter
        self._is_recurrent = False
        self._inputs: mx.array | None = None
        # Log-probabilities of the sampled inputs.
        self._logprobs: list[mx.array] = []
        self._has_gpu = memory.has_gpu()
        # Plain step that sampled the inputs; None if its time cannot be measured.
        self._pending: _PendingStep | None = None
        # Time at which the newest forward pass that was waited for ended.
        self.ended = 0.0
        # Number of rows of the newest step if that was a verify block, else 0.
        self._block_rows = 0
        # Times of forward passes that became known since the newest step began.
        self.timed: list[PassTime] = []

    def join(self, rows: SequenceGroup) -> None:
        """Append rows whose prompts have run up to the last token, which the next step runs."""
        last = mx.array([sequence.segments[0][0] for sequence in rows.sequences], dtype=mx.uint32)
        for sequence in rows.sequences:
            sequence.segments = []
            known = sequence.tokens if sequence.row.kept is None else list(sequence.text)
            sequence.context = Context(known) if sequence.processors else None
        self.extend(rows)
        self._is_recurrent = batched.is_recurrent(self.caches)
        self._inputs = last if self._inputs is None else mx.concatenate([self._inputs, last])
        self._logprobs += [last] * len(rows)

    def keep(self, rows: Sequence[int]) -> None:
        if self._inputs is not None and len(rows) < len(self.sequences):
            self._inputs = self._inputs[mx.array(list(rows))] if rows else None
            self._logprobs = [self._logprobs[at] for at in rows]
        super().keep(rows)

    def finish(self) -> None:
        """Wait for the running step, so that it and the next pass are measured separately."""
        if self._pending is not None:
            mx.eval(self._inputs)
            self._time_plain()

    def end_pass(self) -> float:
        """Return the seconds of the pass that ran after the newest step and has just ended."""
        began, self.ended = self.ended, time.perf_counter()
        return self.ended - began

    def rest(self) -> None:
        """Note that nothing runs any more, because the rest that follows is not part of a step's time."""
        if self._pending is not None and not self._pending.ended:
            self._pending.ended = time.perf_counter()
        self._block_rows = 0

    def decode(self, prefill: ForwardPart | None = None) -> list[Token]:
        """Run one step, fused with `prefill` if that is given."""
        self.timed = []
        if self._inputs is None:
            self._pending = None
            return []
        began = time.perf_counter()
        block = self._draft(self._inputs)
        drafted = time.perf_counter()
        if block is None:
            return self._plain(self._inputs, prefill)
        sampled = self._verify(block, self._inputs, prefill)
        self._time_block(block, len(sampled), began, drafted, prefill)
        return sampled

    def _time_block(
        self, block: "_Block", tokens: int, began: float, drafted: float, prefill: ForwardPart | None
    ) -> None:
        """Measure a block from its launch to its end. Nothing runs while a block's tokens are sent, so the time for
        sending the previous block's tokens is added if that block had as many rows.
        """
        rows, before, last = len(block.rows), self._block_rows, self.ended
        self._block_rows, self.ended = rows, time.perf_counter()
        seconds = self.ended - drafted + (began - last if before == rows else 0.0)
        prompted = sum(prefill.lengths) if prefill is not None else 0
        self.timed.append(PassTime(seconds, rows, block.width, tokens, prompted))

    def _time_plain(self) -> None:
        """Measure a plain step from the end of the previous step to its own end. A step runs while the previous tokens
        are sent, so its end is known once its own tokens are read."""
        pending, last, self._pending = self._pending, self.ended, None
        if pending is None:
            return
        self.ended = pending.ended or time.perf_counter()
        seconds = self.ended - max(last, pending.launched)
        self.timed.append(PassTime(seconds, pending.rows, 1, pending.rows, pending.prompted))

    def _plain(self, inputs: mx.array, prefill: ForwardPart | None) -> list[Token]:
        """Launch the next plain step, then read the tokens that are its inputs."""
        pending = _PendingStep(len(self), sum(prefill.lengths) if prefill else 0, 0.0)
        part = ForwardPart(self.sequences, inputs[:, None], self.caches, [1] * len(self))
        logits = forward(self._model, part, prefill)
        # The time is taken before the launch: if nothing else runs, the step begins before its launch returns.
        pending.launched = time.perf_counter()
        logprobs, targets, contexts = self._targets(None, inputs, logits)
        given, self._logprobs, self._inputs = self._logprobs, list(logprobs[:, 0]), targets[:, 0]
        mx.async_eval(self._inputs, self._logprobs, contexts)
        if not self._has_gpu:
            pending.ended = time.perf_counter()
        mx.eval(given)
        ids = self._read(inputs)
        self._time_plain()
        self._pending, self._block_rows = pending, 0
        sampled: list[Token] = []
        for sequence, token, logprob in zip(self.sequences, ids, given, strict=True):
            sequence.tokens.append(token)
            if sequence.has_begun:
                self._drafter.note(sequence, (token,))
                sampled.append(Token(sequence.row, token, logprob, sequence.ends(token)))
            sequence.has_begun = True
        return sampled

    def _draft(self, inputs: mx.array) -> "_Block | None":
        """Return the next verify block; None if no row has a draft or owes tokens."""
        if self._drafter.widest == 1:
            return None
        most = [self._most(sequence) for sequence in self.sequences]
        owes = any(sequence.owed for sequence in self.sequences)
        for sequence in self.sequences:
            if sequence.mask is not None:
                self._drafter.expect(sequence, sequence.mask.forced)
        if not owes and not self._drafter.is_ready(self.sequences, most):
            return None
        ids = self._read(inputs)
        self._time_plain()
        drafts = self._drafter.drafts(self.sequences, ids, most)
        return _Block.of(self.sequences, ids, drafts) if owes or any(drafts) else None

    def _most(self, sequence: BatchSequence) -> int:
        """Return the maximum number of draft tokens for a row."""
        if not sequence.has_begun:
            return 0
        left = max(0, sequence.max_tokens - sequence.generated - 1)
        if sequence.mask is not None:
            left = min(left, self._sampler.masks.most_drafted(sequence.mask))
        return min(left, max(0, MAX_RECURRENT_BLOCK_TOKENS - 1 - len(sequence.owed))) if self._is_recurrent else left

    def _verify(self, block: "_Block", inputs: mx.array, prefill: ForwardPart | None) -> list[Token]:
        """Run a block and keep the tokens that each row would have generated without it."""
        before = batched.states(self.caches)
        part = ForwardPart(self.sequences, mx.array(block.rows), self.caches, block.lengths)
        logprobs, targets, contexts = self._targets(block, inputs, forward(self._model, part, prefill))
        mx.eval(targets, self._logprobs)
        chosen: Any = targets.tolist()
        sampled: list[Token] = []
        for at, sequence in enumerate(self.sequences):
            agreed = _agreed(block.drafts[at], chosen[at])
            block.accepted.append(
                agreed if sequence.mask is None else self._sampler.masks.accept(sequence.mask, agreed)
            )
            own = [self._logprobs[at], *(logprobs[at, step] for step in range(block.accepted[at]))]
            for count, (token, each) in enumerate(
                zip(block.generated(at), own, strict=True) if sequence.has_begun else (), 1
            ):
                ended = sequence.ends(token)
                sampled.append(Token(sequence.row, token, each, ended))
                if ended is not None:
                    block.accepted[at] = count - 1
                    break
            if sequence.has_begun:
                self._drafter.note(sequence, block.generated(at))
            if sequence.context is not None:
                sequence.context.shorten(block.drafted(at) - block.accepted[at])
            sequence.has_begun = True
        self._remove_rejected(block, before)
        self._sampler.advance(self.sequences, [count + 1 for count in block.accepted])
        self._drafter.verified(self.sequences, block.drafts, block.accepted)
        self._inputs = mx.array(
            [row[count] for row, count in zip(chosen, block.accepted, strict=True)], dtype=mx.uint32
        )
        self._logprobs = [logprobs[at, count] for at, count in enumerate(block.accepted)]
        mx.async_eval(self._logprobs, [each.logprobs for each in sampled], contexts)
        return sampled

    def _remove_rejected(self, block: "_Block", before: Sequence[list[Any]]) -> None:
        """Remove rejected tokens from the caches."""
        drop: list[int] = []
        is_back = [bool(before) and block.kept(at) < block.lengths[at] for at in range(len(self.sequences))]
        for at, sequence in enumerate(self.sequences):
            kept = block.rows[at][: block.kept(at)]
            if is_back[at]:
                sequence.owed = kept
                drop.append(block.width)
            else:
                sequence.tokens.extend(kept)
                sequence.owed = []
                drop.append(block.width - len(kept))
        batched.rewind(self.caches, drop)
        batched.restore(self.caches, before, is_back)

    def _targets(
        self, block: "_Block | None", inputs: mx.array, logits: mx.array
    ) -> tuple[mx.array, mx.array, list[mx.array]]:
        """Return log-probabilities `[rows, steps, vocab]` and sampled ids `[rows, steps]` after each row's newest
        token, and the contexts of processors.

        If a row has a grammar, the inputs are read first: see `worker.structured.masks`.
        """
        steps = block.steps if block is not None else 1
        if block is not None and any(block.begins):
            at = mx.minimum(mx.array(block.begins)[:, None] + mx.arange(steps), logits.shape[1] - 1)
            logits = mx.take_along_axis(logits, at[..., None], axis=1)
        logits, contexts = self._process(block, inputs, logits[:, :steps])
        if constrains(self.sequences):
            mx.async_eval(logits, contexts)
            self._take_masks(self._read(inputs), block.drafts if block is not None else ())
            logits = self._sampler.masks.apply(self.sequences, logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        targets = self._sampler.sample(self.sequences, logprobs)
        if block is None:
            self._sampler.advance(self.sequences, [1] * len(self))
        return logprobs, targets, contexts

    def _take_masks(self, ids: Sequence[int], drafts: Sequence[Sequence[int]] = ()) -> None:
        """Pass the tokens of the running forward pass to the grammars, except the last tokens of prompts."""
        begun = [at for at, sequence in enumerate(self.sequences) if sequence.has_begun]
        own = [drafts[at] for at in begun] if drafts else None
        self._sampler.masks.take([self.sequences[at] for at in begun], [ids[at] for at in begun], own)

    def _read(self, inputs: mx.array) -> list[int]:
        ids: Any = inputs.tolist()
        return ids

    def _process(self, block: "_Block | None", inputs: mx.array, logits: mx.array) -> tuple[mx.array, list[mx.array]]:
        """Return logits `[rows, steps, vocab]` after the processors of each row, and the contexts that the processors
        saw.

        At each draft token, a processor sees the text as if that token were accepted. If a processor raises an error
        there, the draft is cut before that token, and the row continues.
        """
        contexts: list[mx.array] = []
        for at, sequence in enumerate(self.sequences):
            if sequence.context is None:
                continue
            newest, draft = inputs[at : at + 1], block.drafts[at] if block is not None else []
            if draft:
                newest = mx.concatenate([newest, mx.array(draft, dtype=newest.dtype)])
            context = sequence.context.update_and_fetch(newest)
            contexts.append(context)
            for step in range(len(draft) + 1):
                seen, row = context[: context.size - len(draft) + step], logits[at : at + 1, step]
                for processor in sequence.processors:
                    row = processor(seen, row)
                if step and block is not None and any(processor.error for processor in sequence.processors):
                    block.drafts[at] = draft[: step - 1]
                    for processor in sequence.processors:
                        processor.error = None
                    break
                logits[at : at + 1, step] = row
        return logits, contexts


def _agreed(draft: Sequence[int], targets: Sequence[int]) -> int:
    """Return the number of leading draft tokens that equal the sampled tokens."""
    return next((at for at, token in enumerate(draft) if token != targets[at]), len(draft))

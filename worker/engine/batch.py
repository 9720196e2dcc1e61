"""The rows on the device, from their insertion to what they leave in the prefix cache."""

import logging
import time
from collections import abc
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.generate import StopSequences

from worker.engine.decode_batch import PAIR, REFEED
from worker.engine.generator import Generator
from worker.engine.row import BatchSequence, Row, Token
from worker.engine.row_media import RowMedia
from worker.engine.row_prefixes import RowPrefixes
from worker.engine.scheduling.kv_budget import KvCost
from worker.engine.scheduling.pass_time import PassTime
from worker.errors import is_allocation_failure, is_fabric_fault, is_gpu_fault
from worker.kv import batched
from worker.kv.quantized import make_caches
from worker.model.agreement import agreement_of
from worker.model.batch_mode import BatchMode
from worker.prefix_cache.prefix import PrefixCache
from worker.prefix_cache.radix_tree import common_prefix
from worker.sampling.penalties import processors
from worker.sampling.prompt_scores import Scores
from worker.sampling.sampler import Draws, Guard, RowSampler
from worker.speculation.drafter import Drafter
from worker.structured.masks import Masks, MaskWork, wait_for_one
from worker.vision.attach import Vision
from worker.vision.encoder import MediaEncoder

log = logging.getLogger("mlxd.worker")

# Prompts from here on go to disk before their answer is complete: a successor of this worker may have to go on with it.
EARLY_TOKENS: Final = 1024
# Waiting for another row's prefill pays from about here.
MIN_SHARED_TOKENS: Final = 64
# How long a step waits for a mask when no row can go on without one.
PARKED_WAIT_S: Final = 0.05


@dataclass(slots=True, frozen=True)
class StepOutput:
    """Results of one step; `timed` are the forward passes whose time is known by now.

    `returned` are rows that are not in the batch any more: they wait for their media as those in the queue do. `scored`
    are rows whose prompts have their log-probabilities now; none of them has a token yet.
    """

    tokens: list[Token]
    progress: list[tuple[Row, int, int]]
    broken: list[tuple[Row, Exception]]
    prefilled: int
    timed: Sequence[PassTime]
    returned: list[Row]
    scored: list[tuple[Row, Scores]]
    # Log-probabilities of prompts that have more of them than before.
    scoring: list[tuple[Row, Scores]]


class Batch:
    """The rows on the device. One thread owns it and everything MLX.

    `insert` takes a row at any time, `remove` takes it out in any phase, `step` gives the decoding rows their
    next tokens and runs one chunk for the prefilling ones. `settle` stores what the rows that ended have computed.
    """

    def __init__(
        self,
        model: Any,
        eos_ids: Sequence[int],
        cache: PrefixCache,
        mode: BatchMode = BatchMode.TOGETHER,
        drafter: Drafter | None = None,
        vision: Vision | None = None,
        encoder: MediaEncoder | None = None,
        table_rows: int = 0,
    ) -> None:
        # Known once a first row, the one for warming up, has ended.
        self.kv_cost: KvCost | None = None
        self._cache = cache
        self._masks = Masks()
        suppressed = vision.needs.suppressed if vision is not None else ()
        self._sampler = RowSampler(self._masks, suppressed, agreement_of(model), table_rows)
        self._media = RowMedia(vision, encoder)
        # All that are in, in the order of their insertion; of these, those in prefill, and those that are out of the
        # generator while their grammar works.
        self._sequences: list[BatchSequence] = []
        self._prefilling: list[BatchSequence] = []
        self._parked: list[BatchSequence] = []
        # Rows that have ended, with all tokens and their KV, until `settle`.
        self._ended: list[tuple[Row, list[int], list[Any]]] = []
        # The cache has failed since the last `settle`, where ranks of a group clear theirs at the same place of a plan.
        self._must_clear = False
        self._eos_ids = tuple(eos_ids)
        can_verify = mode is BatchMode.TOGETHER and batched.can_rewind(make_caches(model))
        self._drafter: Drafter = drafter if drafter is not None and can_verify else Drafter()
        self._generator = Generator(model, self._sampler, mode, self._drafter)
        self._drafter.begin(self._sampler.guess, self._generator.generating)
        self._prefixes = RowPrefixes(cache, self._generator.stream)

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def rows(self) -> list[Row]:
        return [sequence.row for sequence in self._sequences]

    @property
    def prefilling(self) -> int:
        return len(self._prefilling)

    @property
    def longest_prefill(self) -> int:
        """Tokens that the longest prefill takes from its beginning to its end."""
        return max((sequence.row.slots - sequence.reused for sequence in self._prefilling), default=0)

    @property
    def context(self) -> int:
        """The most tokens that a row in prefill has computed; of rows that generate, where none is in prefill."""
        if self._prefilling:
            return max(sequence.prefilled for sequence in self._prefilling)
        return max((sequence.row.slots for sequence in self._sequences), default=0)

    @property
    def decoding(self) -> int:
        return len(self._sequences) - len(self._prefilling)

    @property
    def unread(self) -> int:
        """Tokens that a model that drafts has yet to read."""
        return self._drafter.unread

    @property
    def widest_step(self) -> int:
        """Tokens that a row may bring to the next step."""
        return max(self._drafter.widest, REFEED) if self._drafter.widest > 1 else PAIR

    @property
    def kv_bytes(self) -> int:
        return self._generator.nbytes + self._drafter.nbytes

    def must_wait(self, row: Row, *, is_first: bool = False) -> bool:
        """Whether what a row needs is being prefilled by another, read from disk, or encoded right now.

        `is_first`: no row that waits comes before it.
        """
        if row.report.scored_top is not None:
            return False  # it computes all of its prompt
        if self.is_prefilling_prefix_of(row):
            return True
        row.ticket = row.ticket or self._cache.restore(row.reusable, row.cache_salt)
        if row.ticket is not None and not row.ticket.is_settled:
            return True
        if not row.media:
            return False
        keys = row.keys()[:-1]
        if row.ticket is not None:
            self._cache.attach(keys, row.cache_salt, row.ticket)
        return not self._media.is_ready(row, self._cache.longest(keys, row.cache_salt, row.whole), is_first=is_first)

    def is_prefilling_prefix_of(self, row: Row) -> bool:
        """Whether a row in prefill will soon have cached much more of this prompt than is cached now."""
        if not self._prefilling or not self._cache.is_on:
            return False
        tokens = row.reusable
        cached: int | None = None
        for sequence in self._prefilling:
            other = sequence.row
            if other.cache_salt != row.cache_salt:
                continue
            gain = self._prefixes.shareable(other, row.whole(common_prefix(other.keys(), tokens)), self.kv_cost)
            if gain < MIN_SHARED_TOKENS:
                continue
            cached = self._cache.longest(tokens, row.cache_salt) if cached is None else cached
            if gain - cached >= MIN_SHARED_TOKENS:
                return True
        return False

    def insert(self, row: Row, mask: MaskWork | None = None) -> bool:
        """Queue prompt and output so far, less what the prefix cache holds; sampling goes on at position len(output).

        The last token always runs: its logits are what the first sample needs. False, and the row is not in, where
        features of its media are missing, which are made from now on. `mask` is the work of its grammar, if that is at
        work already.
        """
        self.settle()
        tokens, keys = row.tokens(), row.keys()
        ticket, row.ticket = row.ticket, None
        scores = None if row.report.scored_top is None else Scores(row.prompt, row.report.scored_top)
        reused, caches = 0, []
        if scores is None:
            self._store_running(keys, row.cache_salt)
            with mx.stream(self._generator.stream):
                reused, caches = self._cache.fetch(
                    row.reusable, row.cache_salt, ticket, row.whole if row.media else None
                )
        if not self._media.is_ready(row, reused):
            return False
        if row.stats.cached is None:
            row.stats.cached = 0 if row.output else reused
        own = processors(row.sampling, len(row.prompt), row.words, self._eos_ids)
        guards = [Guard(processor) for processor in (*row.processors, *own)]
        segments, marks = self._prefixes.segments(row, tokens, reused)
        draws, stops = Draws(row.sampling, len(row.output)), self._stops(row).matcher()
        sequence = BatchSequence(row, segments, caches, tokens[:reused].tolist(), draws, guards, stops)
        sequence.marks, sequence.scores = marks, scores
        sequence.placement, sequence.longest_whole = self._media.placement(row, reused), self._media.longest_whole(row)
        if row.kept is not None and guards:
            sequence.text = tokens[:-1].tolist()
        self._enter(sequence)
        self._drafter.add(sequence, tokens, row.drafting)
        if (branch := self._cache.branch(keys, row.cache_salt)) is not None:
            self._drafter.follow(sequence, branch)
        if row.rule is not None:
            sequence.mask = mask or self._masks.follow(row.rule, row.output)
        return True

    def _enter(self, sequence: BatchSequence) -> None:
        """A sequence is in the batch from now on."""
        self._generator.insert(sequence)
        self._sequences.append(sequence)
        self._prefilling.append(sequence)
        sequence.row.sequence = sequence

    def _stops(self, row: Row) -> StopSequences:
        """Tokens that end a row."""
        eos_ids = () if row.sampling.ignore_eos and row.rule is None else self._eos_ids
        return StopSequences([[token] for token in (*eos_ids, *row.sampling.stop_ids)])

    def remove(self, row: Row) -> None:
        """Take a row out if it is in; what it has computed so far goes to the prefix cache."""
        if (sequence := row.sequence) is None:
            return
        if sequence not in self._parked:
            tokens = self._take_out(sequence)
            with self._keeping(row):
                self._prefixes.persist(row, tokens)
        self._forget(sequence)

    @contextmanager
    def _keeping(self, row: Row) -> abc.Generator[None]:
        """The boundary of what a row leaves in the prefix cache.

        A failure there costs the cache its memory, and no row its answer. Where a device or a rank failed, the engine
        has to know.
        """
        try:
            yield
        except Exception as error:  # the boundary of what one row leaves
            is_memory = is_allocation_failure(error)
            if not is_memory and (is_gpu_fault(error) or is_fabric_fault(error)):
                raise
            text = "the KV of row %d could not be kept; the prefix cache is cleared: %s"
            log.warning(text, row.rid, error, exc_info=not is_memory)
            self._cache.fail(error)
            self._must_clear = True

    def _store_running(self, tokens: Any, salt: str) -> None:
        """Store what running rows have in common with these tokens. Few are ever asked for it, and it costs a copy."""
        unstored = [sequence for sequence in self._sequences if sequence.is_unstored]
        if not unstored or not self._cache.is_on:
            return
        tokens = tokens[:-1]
        head = tokens[:MIN_SHARED_TOKENS]
        for sequence in unstored:
            other = sequence.row
            if other.cache_salt != salt or not np.array_equal(other.keys()[:MIN_SHARED_TOKENS], head):
                continue
            if common_prefix(other.keys(), tokens) - self._cache.longest(tokens, salt) >= MIN_SHARED_TOKENS:
                sequence.is_unstored = False
                with self._keeping(other):
                    caches, done = self._generator.extract(sequence)
                    self._prefixes.keep(other, done, caches)

    def _take_out(self, sequence: BatchSequence) -> list[int]:
        """Take a sequence out of the generator; the tokens whose KV it leaves in the prefix cache."""
        row, sequence.is_unstored = sequence.row, False
        tokens: list[int] = []
        with mx.stream(self._generator.stream):
            with self._keeping(row):
                caches, tokens = self._generator.extract(sequence)
                # Inside of a medium a checkpoint serves nobody, and would hide those before it.
                is_usable = not self._cache.needs_checkpoints or row.whole(len(tokens)) == len(tokens)
                # A row that never ran holds what it was given.
                if len(tokens) > sequence.reused and is_usable:
                    self._prefixes.keep(row, tokens, caches)
            self._generator.discard([sequence])
        return tokens

    def step(self, chunk: int, *, is_fused: bool = True, reads: int = 0) -> StepOutput:
        """One decode step, and at most `chunk` prompt tokens of each prefilling row, which may ride on it.

        Then a model that drafts reads at most `reads` tokens.
        """
        self.settle()
        self._drafter.on_tick()
        returned = self._unpark()
        most = self._media.widened(chunk, (sequence.row for sequence in self._prefilling))
        self._begin(most, is_fused=is_fused)
        prompted, tokens = self._generator.run_passes(most, is_fused=is_fused, reads=reads)
        progress: list[tuple[Row, int, int]] = []
        scored: list[tuple[Row, Scores]] = []
        scoring: list[tuple[Row, Scores]] = []
        prefilled = 0
        for part in prompted:
            sequence = part.sequence
            if part.scores is not None:
                scored.append((sequence.row, part.scores))
                continue
            prefilled += part.count
            if part.is_prompt_end:
                self._prefilling.remove(sequence)
            self._media.release(sequence)
            done = sequence.prefilled
            if part.is_segment_end and (sequence.marks is None or done in sequence.marks):
                self._checkpoint(sequence, is_prompt_end=part.is_prompt_end)
            progress.append((sequence.row, done, sequence.reused + sequence.total))
            if sequence.scores is not None:
                scoring.append((sequence.row, sequence.scores))
        watched = (sequence for sequence in self._sequences if sequence.processors or sequence.mask is not None)
        broken = [(sequence.row, error) for sequence in watched if (error := _error(sequence)) is not None]
        self._end([token.row for token in tokens if token.ended is not None])
        self._park()
        return StepOutput(tokens, progress, broken, prefilled, self._generator.timed, returned, scored, scoring)

    def _end(self, rows: Sequence[Row]) -> None:
        """Take out the rows that ended; what they leave is stored by `settle`."""
        sequences = [row.sequence for row in rows if row.sequence is not None]
        with mx.stream(self._generator.stream):
            for sequence in sequences:
                with self._keeping(sequence.row):
                    caches, tokens = self._generator.extract(sequence)
                    self.kv_cost = self.kv_cost or KvCost.of(caches, len(tokens), self._drafter.token_bytes)
                    self._ended.append((sequence.row, tokens, caches))
            self._generator.discard(sequences)
        for sequence in sequences:
            self._forget(sequence)

    def wait(self) -> None:
        """Return when nothing of what was launched is running any more."""
        self._generator.wait()

    def _begin(self, chunk: int, *, is_fused: bool) -> None:
        """The forward passes of a step follow."""

    def account(self, row: Row) -> None:
        """Bring the row's counts up to date."""
        if row.sequence is not None:
            predicted, accepted = row.sequence.draft.take_prediction_counts()
            row.stats.predicted += predicted
            row.stats.accepted += accepted

    def settle(self) -> None:
        """Store the rows that ended. Not in `step`: it takes a while, in which their clients can have their answers."""
        ended, self._ended = self._ended, []
        for row, tokens, caches in ended:
            with self._keeping(row):
                self._prefixes.keep(row, tokens, caches)
                self._prefixes.persist(row, tokens)
        if self._must_clear:
            self._must_clear = False
            self._cache.clear()

    def _park(self) -> None:
        """Take out the rows that the step did not wait for: what was sampled for them is dropped, their KV is kept."""
        for work in self._masks.late():
            sequence = next((sequence for sequence in self._sequences if sequence.mask is work), None)
            if sequence is not None:
                self._take_out(sequence)
                self._parked.append(sequence)

    def _unpark(self) -> list[Row]:
        """Put back the rows whose masks are there. When nothing else is to be done, wait for one a moment.

        Returns those that have to wait for their media, of which neither KV nor features are left; their grammars
        follow them again when they are back.
        """
        returned: list[Row] = []
        if self._parked and len(self._parked) == len(self._sequences):
            wait_for_one(self._parked, PARKED_WAIT_S)
        for sequence in [sequence for sequence in self._parked if sequence.mask is not None and sequence.mask.is_done]:
            self._end_stay(sequence)
            if not self.insert(sequence.row, sequence.mask):
                returned.append(sequence.row)
        return returned

    def abandon(self) -> None:
        """Let go of every row after a failed step, when nothing in the generator can be trusted or even asked."""
        self._ended.clear()
        for sequence in list(self._sequences):
            self._forget(sequence)

    def close(self) -> None:
        self._masks.close()

    def _checkpoint(self, sequence: BatchSequence, is_prompt_end: bool) -> None:
        """Share a prompt with the requests that follow while this one still runs.

        The checkpoint before the last token serves: a cached prompt must leave one to run, and the row is not among the
        decoding ones yet. A copy of its KV out of theirs would keep all of theirs twice until it is made. Where caches
        can be cut, a short prompt is stored when a request needs it.
        """
        row = sequence.row
        if row.kept is not None:
            return
        is_lazy = not self._cache.needs_checkpoints and len(row.tokens()) <= EARLY_TOKENS
        if is_prompt_end:
            sequence.is_unstored = is_lazy
            return
        if is_lazy:
            return
        with self._keeping(row):
            caches, tokens = self._generator.extract(sequence)
            self._prefixes.keep(row, tokens, caches)
            if len(tokens) >= max(EARLY_TOKENS, len(row.prompt) - 1):
                self._prefixes.persist(row, tokens)

    def _forget(self, sequence: BatchSequence) -> None:
        """The row is not in the batch any more, and holds no features."""
        self._end_stay(sequence)
        self._media.forget(sequence.row)

    def _end_stay(self, sequence: BatchSequence) -> None:
        """Let go of all that the batch has of a sequence."""
        self.account(sequence.row)
        for sequences in (self._sequences, self._prefilling, self._parked):
            if sequence in sequences:
                sequences.remove(sequence)
        self._drafter.discard(sequence)
        sequence.row.sequence = None


def _error(sequence: BatchSequence) -> Exception | None:
    """The error of what chooses a sequence's tokens: of its processors, or of its grammar."""
    for guard in sequence.processors:
        if guard.error is not None:
            return guard.error
    return sequence.mask.error(time.monotonic()) if sequence.mask is not None else None

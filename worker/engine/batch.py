"""Batch: the rows on the device, from their insertion to their prefixes in the prefix cache.

Media of the rows in a batch: placement of features, and their release after the prefill.

Prefixes of rows in the prefix cache: where they are cut, and how they are stored.
"""

import logging
import time
from collections import abc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.generate import StopSequences, generation_stream

from worker.engine.decode_batch import MAX_RECURRENT_BLOCK_TOKENS
from worker.engine.generator import Generator
from worker.engine.output import StepOutput
from worker.engine.row import BatchSequence, Row
from worker.engine.scheduling.kv_budget import KvCost
from worker.errors import is_allocation_failure, is_fabric_fault, is_gpu_fault
from worker.kv import batched
from worker.kv.quantized import make_caches
from worker.model.batch_mode import BatchMode
from worker.model.rank_split import agreement_of
from worker.prefix_cache.cache_and_eviction import SCORED, PrefixCache
from worker.prefix_cache.radix_tree import common_prefix
from worker.sampling.logprobs import Scores
from worker.sampling.penalties import processors
from worker.sampling.sampler import Draws, Guard, RowSampler
from worker.speculation.drafter import Drafter
from worker.structured.masks import Masks, MaskWork, wait_for_one
from worker.vision.encoder import MediaEncoder
from worker.vision.media import media_keys
from worker.vision.multimodal_merge import MediaPlacement
from worker.vision.tower import Vision

log = logging.getLogger("mlxd.worker")


class RowMedia:
    """Media of the rows of a batch, owned by the batch. For text models every method does nothing."""

    def __init__(self, vision: Vision | None, encoder: MediaEncoder | None) -> None:
        self._encoder = encoder
        # Whether tokens of a medium attend to each other in both directions, so that no chunk may cut a medium.
        self._keeps_whole = vision is not None and bool(vision.needs.block)

    def is_ready(self, row: Row, cached: int, *, is_first: bool = False) -> bool:
        """Whether a row has the features of all media after its cached tokens; requests missing features."""
        if not row.media:
            return True
        assert self._encoder is not None, "media are for models with a tower"
        media = [span.medium for span in row.media if span.end > cached]
        return self._encoder.is_ready(row.rid, media, is_first=is_first)

    def placement(self, row: Row, reused: int) -> MediaPlacement | None:
        """Return the media of a row, with the features of the media that are not reused."""
        if not row.media:
            return None
        assert self._encoder is not None, "media are for models with a tower"
        placement = MediaPlacement(row.media, row.positions, len(row.prompt))
        for span in row.media:
            if span.end > reused and span.medium.key not in placement.features:
                placement.features[span.medium.key] = self._encoder.held(row.rid, span.medium)
        self._encoder.keep(row.rid, placement.features)
        return placement

    def release(self, sequence: BatchSequence) -> None:
        """Free the features that the prefill of a row has passed."""
        row, placement = sequence.row, sequence.placement
        if placement is not None and placement.features:
            assert self._encoder is not None
            needed = {span.medium.key for span in row.media if span.end > sequence.prefilled}
            passed = placement.features.keys() - needed
            for key in passed:
                del placement.features[key]
            self._encoder.release(row.rid, passed)

    def forget(self, row: Row) -> None:
        """Free the features of a row."""
        if row.media:
            assert self._encoder is not None
            self._encoder.forget(row.rid)

    def longest_whole(self, row: Row) -> int:
        """Return the number of tokens of a row's longest medium that no chunk may cut; 0 without such a medium."""
        return max((span.end - span.begin for span in row.media), default=0) if self._keeps_whole else 0

    def widened(self, chunk: int, prefilling: Iterable[Row]) -> int:
        """Return `chunk`, or the length of the longest medium in prefill if that is larger and the medium may not be
        cut."""
        if not self._keeps_whole:
            return chunk
        return max((chunk, *(span.end - span.begin for row in prefilling for span in row.media)))


# Models whose caches cannot be cut get checkpoints at this distance within a long message.
CHECKPOINT_TOKENS: Final = 2048
# Number of newest message boundaries that get a checkpoint, besides the first boundary: the next turn of a chat
# branches off at one of them.
MAX_BOUNDARY_CHECKPOINTS: Final = 6
# Waiting for another row's prefill pays off if the common prefix has at least about this many tokens.
MIN_SHARED_TOKENS: Final = 64


class RowPrefixes:
    """Writer of rows' prefixes, owned by the batch."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache

    def segments(self, row: Row, tokens: Any, reused: int) -> tuple[list[list[int]], frozenset[int] | None]:
        """Return the tokens to run, in segments, and the ends of segments that get a checkpoint; None means that all
        segments do.

        Segments are cut at checkpoints and at the edges of media, so that each chunk has tokens of only one kind, and
        the same kernel computes them whatever the chunk size is.
        """
        if row.questions is not None:
            return row.questions.segments(tokens.tolist(), reused)
        last = len(tokens) - 1
        cuts: set[int] = set()
        if self._cache.needs_checkpoints:
            messages = [at for at in row.boundaries if reused < at < last]
            chunks = (row.whole(at) for at in range(reused + CHECKPOINT_TOKENS, last, CHECKPOINT_TOKENS))
            cuts = {*messages[:1], *messages[-MAX_BOUNDARY_CHECKPOINTS:], *chunks} - {reused}
        if row.kept is not None:
            return row.kept.segments(tokens, reused), None
        marks: frozenset[int] | None = None
        if row.media:
            edges = {at for span in row.media for at in (span.begin, span.end) if reused < at < last}
            # A checkpoint is only worthwhile at the last edge of media, not at the others.
            marks = frozenset(
                {*cuts, *([max(edges)] if edges and self._cache.needs_checkpoints else ()), last, last + 1}
            )
            cuts |= edges
        return [part.tolist() for part in np.split(tokens[reused:], [at - reused for at in sorted(cuts)])], marks

    def must_wait(self, row: Row, prefilling: Sequence[BatchSequence], cost: KvCost | None) -> bool:
        """Whether one of the sequences in prefill is still within a prefix that it shares with the row, and that
        is much longer than what the cache holds. The wait is never longer than the prefill of that prefix.
        """
        row.awaited = None
        if not prefilling or not self._cache.is_on:
            return False
        tokens = row.reusable
        head = tokens[:MIN_SHARED_TOKENS]
        cached: int | None = None
        for sequence in prefilling:
            other = sequence.row
            # Rows that are computed one by one are slow, so only their like wait for them.
            is_slow = sequence.scores is not None or (sequence.is_alone and row.questions is None)
            if is_slow or other.cache_salt != row.cache_salt or not _begins_with(other, head):
                continue
            gain = self._shareable(sequence, row.whole(common_prefix(other.keys(), tokens)), cost)
            if gain < MIN_SHARED_TOKENS or sequence.prefilled >= gain:
                continue
            cached = self._cache.longest(tokens, row.cache_salt) if cached is None else cached
            if gain - cached >= MIN_SHARED_TOKENS:
                row.awaited = other, gain
                return True
        return False

    def missing(self, tokens: Any, salt: str, running: Sequence[BatchSequence]) -> Iterator[tuple[BatchSequence, int]]:
        """Yield the running sequences that have computed a prefix of these tokens which the cache lacks, and the length
        of that prefix.
        """
        if not running or not self._cache.is_on:
            return
        head = tokens[:MIN_SHARED_TOKENS]
        for sequence in running:
            other = sequence.row
            if other.cache_salt != salt or not _begins_with(other, head):
                continue
            common = min(common_prefix(other.keys(), tokens), sequence.prefilled)
            if common - self._cache.longest(tokens, salt) >= MIN_SHARED_TOKENS:
                yield sequence, common

    def _shareable(self, sequence: BatchSequence, common: int, cost: KvCost | None) -> int:
        """Return how many of the `common` leading tokens a sequence in prefill can leave in the cache. With
        checkpoints, these are the tokens up to the last one that is not taken yet and that fits the cache's budget."""
        if sequence.row.kept is not None:
            return 0
        if not self._cache.needs_checkpoints:
            return min(common, cost.storable(self._cache.budget)) if cost is not None else common
        ends = accumulate(map(len, sequence.segments), initial=sequence.prefilled)
        marks = sequence.marks
        cuts = [at for at in ends if sequence.prefilled < at <= common and (marks is None or at in marks)]
        while cuts and cost is not None and cost.stored(cuts[-1], len(cuts)) > self._cache.budget:
            cuts.pop()
        return cuts[-1] if cuts else 0

    def keep(self, row: Row, tokens: Sequence[int], caches: Sequence[Any]) -> None:
        """Store a prefix in memory. KV of a sparse prompt is not stored, because no other request can use it."""
        if row.kept is not None:
            return
        with mx.stream(generation_stream):
            keys = media_keys(np.array(tokens, dtype=np.int32), row.media)
            self._cache.store(keys, caches, row.cache_salt, row.rid)

    def persist(self, row: Row, tokens: Sequence[int]) -> None:
        """Write a prefix to disk, with the checkpoints that the next turn or a resumed request will need."""
        if row.kept is not None:
            return
        starts = row.boundaries or [len(row.prompt) - 1]
        keys = media_keys(np.array(tokens, dtype=np.int32), row.media)
        self._cache.persist(keys, {starts[0], starts[-1], len(tokens)}, row.cache_salt)


def _begins_with(row: Row, head: Any) -> bool:
    return np.array_equal(row.keys()[: len(head)], head)


# Prompts with more tokens are written to disk at the end of their prefill, because a successor of this worker may have
# to resume the row.
EARLY_STORE_TOKENS: Final = 1024
# A step waits at most this long for a mask if all rows wait for their masks.
MASK_WAIT_S: Final = 0.05


class Batch:
    """The rows on the device. Owned by the only thread that uses MLX.

    `insert` adds a row at any time, `remove` takes it out in any phase, `step` gives decoding rows their next tokens
    and runs one chunk of the prefilling ones. `store_ended` stores the KV of rows that have ended.
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
        pass_tokens: int = 0,
    ) -> None:
        # Cost of KV; None until the first row, which is the warm-up's, has ended.
        self.kv_cost: KvCost | None = None
        self._cache = cache
        self._masks = Masks()
        suppressed = vision.needs.suppressed if vision is not None else ()
        self._sampler = RowSampler(self._masks, suppressed, agreement_of(model), table_rows)
        self._media = RowMedia(vision, encoder)
        # All sequences, in the order of insertion.
        self._sequences: list[BatchSequence] = []
        self._prefilling: list[BatchSequence] = []
        # Sequences that are out of the generator until their mask is ready.
        self._parked: list[BatchSequence] = []
        # Sequences of ended rows, which the next `store_ended` stores and takes out of the generator.
        self._ended: list[BatchSequence] = []
        # Whether the cache has failed since the last `store_ended`. The next one clears it, on all ranks of a group.
        self._must_clear = False
        self._eos_ids = tuple(eos_ids)
        can_verify = mode is BatchMode.TOGETHER and batched.can_rewind(make_caches(model))
        self._drafter: Drafter = drafter if drafter is not None and can_verify else Drafter()
        self._generator = Generator(model, self._sampler, mode, self._drafter, pass_tokens)
        self._drafter.begin(self._sampler.guess, self._generator.generating)
        self._prefixes = RowPrefixes(cache)

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def rows(self) -> list[Row]:
        return [sequence.row for sequence in self._sequences]

    @property
    def prefilling(self) -> int:
        """Number of rows in prefill that share the next step: of those that are computed one by one, a step runs only
        one while there are other rows."""
        alone = sum(sequence.is_alone for sequence in self._prefilling)
        return len(self._prefilling) - alone + (min(alone, 1) if alone < len(self) else alone)

    @property
    def longest_prefill(self) -> int:
        """Number of tokens of the longest prefill, including the tokens that have run."""
        return max((sequence.row.slots - sequence.reused for sequence in self._prefilling), default=0)

    @property
    def context(self) -> int:
        """Longest context of the rows in prefill, or of all rows if none is in prefill."""
        if self._prefilling:
            return max(sequence.prefilled for sequence in self._prefilling)
        return max((sequence.row.slots for sequence in self._sequences), default=0)

    @property
    def decoding(self) -> int:
        return len(self._sequences) - len(self._prefilling)

    @property
    def unread(self) -> int:
        """Number of tokens that the draft model has not read yet."""
        return self._drafter.unread

    @property
    def widest_step(self) -> int:
        """Maximum number of tokens of a row in one step."""
        widest = self._drafter.widest
        return max(widest, MAX_RECURRENT_BLOCK_TOKENS) if widest > 1 else 1

    @property
    def kv_bytes(self) -> int:
        return self._generator.nbytes + self._drafter.nbytes

    def is_awaiting(self, row: Row) -> bool:
        """Whether what `must_wait` found a row to wait for, a prefill or a read from disk, has not ended yet."""
        return row.is_awaiting or (row.ticket is not None and not row.ticket.is_done)

    def must_wait(self, row: Row, *, is_first: bool = False) -> bool:
        """Whether a row must wait: its prefix is being prefilled by another row or read from disk, or its media are not
        encoded.

        `is_first` is set if no other waiting row comes before this one.
        """
        if row.report.scored_top is not None:
            return False  # a scored prompt is computed completely
        if self.is_prefilling_prefix_of(row):
            return True
        row.ticket = row.ticket or self._cache.restore(row.reusable, row.cache_salt)
        if row.ticket is not None and not row.ticket.is_done:
            return True
        if not row.media:
            return False
        keys = row.keys()[:-1]
        if row.ticket is not None:
            self._cache.attach(keys, row.cache_salt, row.ticket, row.rid)
        return not self._media.is_ready(row, self._cache.longest(keys, row.cache_salt, row.whole), is_first=is_first)

    def is_prefilling_prefix_of(self, row: Row) -> bool:
        """Whether a row in prefill is still within a prefix that this row can reuse; see `RowPrefixes.must_wait`."""
        return self._prefixes.must_wait(row, self._prefilling, self.kv_cost)

    def insert(self, row: Row, mask: MaskWork | None = None) -> bool:
        """Insert a row: its prompt and output so far, except the prefix in the cache. Sampling continues at position
        len(output).

        The last token always runs, because the first sample needs its logits. If features of the row's media are
        missing, they are requested and the result is False. `mask` is the work on the row's masks, if the row's grammar
        has already begun.
        """
        self.store_ended()
        tokens, keys = row.tokens(), row.keys()
        ticket, row.ticket = row.ticket, None
        scores = None if row.report.scored_top is None else Scores(row.prompt, row.report.scored_top)
        reused, caches = 0, []
        if scores is None:
            self._store_running(keys, row.cache_salt)
            with mx.stream(generation_stream):
                reused, caches = self._cache.fetch(
                    row.reusable,
                    row.cache_salt,
                    ticket,
                    row.whole if row.media or row.questions else None,
                    row.rid,
                )
        if not self._media.is_ready(row, reused):
            return False
        row.stats.insert(self._cache.lookup if scores is None else SCORED, is_resumed=bool(row.output))
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
        """Add a sequence to the batch."""
        self._generator.insert(sequence)
        self._sequences.append(sequence)
        self._prefilling.append(sequence)
        self._cache.make_room_for(len(self._sequences))
        sequence.row.sequence = sequence

    def _stops(self, row: Row) -> StopSequences:
        """Return the tokens that end a row."""
        eos_ids = () if row.sampling.ignore_eos and row.rule is None else self._eos_ids
        return StopSequences([[token] for token in (*eos_ids, *row.sampling.stop_ids)])

    def remove(self, row: Row) -> None:
        """Take a row out if it is in the batch, and store its KV in the prefix cache."""
        if (sequence := row.sequence) is None:
            return
        if sequence not in self._parked:
            tokens = self._take_out(sequence)
            with self._keeping(row):
                self._prefixes.persist(row, tokens)
        self._forget(sequence)

    @contextmanager
    def _keeping(self, row: Row) -> abc.Generator[None]:
        """Clear the prefix cache if storing a row's KV fails, so that no row loses its answer.

        Raises failures of a device or a rank.
        """
        try:
            yield
        except Exception as error:  # an error in storing one row's prefix must not affect other rows
            is_memory = is_allocation_failure(error)
            if not is_memory and (is_gpu_fault(error) or is_fabric_fault(error)):
                raise
            text = "the KV of row %d could not be kept; the prefix cache is cleared: %s"
            log.warning(text, row.rid, error, exc_info=not is_memory)
            self._cache.fail(error)
            self._must_clear = True

    def _store_running(self, tokens: Any, salt: str) -> None:
        """Store the KV of running rows that share a prefix with these tokens, now that a new row can reuse it; of rows
        in prefill, the part that has run."""
        unstored = [sequence for sequence in self._sequences if sequence.is_unstored]
        unstored += [] if self._cache.needs_checkpoints else self._prefilling
        for sequence, common in self._prefixes.missing(tokens[:-1], salt, unstored):
            with self._keeping(sequence.row):
                caches, done = self._generator.extract(sequence)
                self._prefixes.keep(sequence.row, done if sequence.is_unstored else done[:common], caches)
            sequence.is_unstored = False

    def _take_out(self, sequence: BatchSequence) -> list[int]:
        """Take a sequence out of the generator. Returns the tokens whose KV is now in the prefix cache."""
        row, sequence.is_unstored = sequence.row, False
        tokens: list[int] = []
        with mx.stream(generation_stream):
            with self._keeping(row):
                caches, tokens = self._generator.extract(sequence)
                # A checkpoint inside a medium is never reused, and would hide the checkpoints before it.
                is_usable = not self._cache.needs_checkpoints or row.whole(len(tokens)) == len(tokens)
                # A row with questions has stored its prompt already, up to the end of a slice.
                is_usable = is_usable and row.questions is None
                if len(tokens) > sequence.reused and is_usable:
                    self._prefixes.keep(row, tokens, caches)
            self._generator.discard([sequence])
        return tokens

    def step(self, chunk: int, *, is_fused: bool = True, reads: int = 0) -> StepOutput:
        """Run one decode step and at most `chunk` prompt tokens of each prefilling row, in one pass if `is_fused`.

        Afterwards a draft model reads at most `reads` tokens.
        """
        self.store_ended()
        self._drafter.on_tick()
        returned = self._unpark()
        most = self._media.widened(chunk, (sequence.row for sequence in self._prefilling))
        self._begin(most, is_fused=is_fused)
        prompted, tokens = self._generator.run_passes(most, is_fused=is_fused, reads=reads)
        progress: list[tuple[Row, int, int]] = []
        scored: list[tuple[Row, Scores]] = []
        scoring: list[tuple[Row, Scores]] = []
        answered: list[Row] = []
        prefilled = 0
        for part in prompted:
            sequence = part.sequence
            if part.scores is not None:
                scored.append((sequence.row, part.scores))
                continue
            prefilled += part.count
            if part.is_answered:
                answered.append(sequence.row)
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
        return StepOutput(
            tokens, progress, broken, prefilled, self._generator.timed, returned, scored, scoring, answered
        )

    def _end(self, rows: Sequence[Row]) -> None:
        """Forget rows that ended, except their KV, which `store_ended` stores."""
        for row in rows:
            if (sequence := row.sequence) is not None:
                self._ended.append(sequence)
                self._forget(sequence)

    def wait(self) -> None:
        """Wait until all launched work has ended."""
        self._generator.wait()

    def _begin(self, chunk: int, *, is_fused: bool) -> None:
        """Hook before the forward passes of a step, for a batch of several ranks."""

    def compact(self) -> None:
        """Free KV memory that no row uses any more."""
        with mx.stream(generation_stream):
            self._generator.compact()

    def account(self, row: Row) -> None:
        """Add the row's newest counts of drafted and accepted tokens to its statistics."""
        if row.sequence is not None:
            row.stats.add_drafts(row.sequence.draft.take_counts())

    def store_ended(self) -> None:
        """Store the KV of rows that ended. `step` does not do this itself, so that clients get their answers first."""
        ended, self._ended = self._ended, []
        with mx.stream(generation_stream):
            for sequence in ended:
                row = sequence.row
                with self._keeping(row):
                    caches, tokens = self._generator.extract(sequence)
                    self.kv_cost = self.kv_cost or KvCost.of(caches, len(tokens), self._drafter.token_bytes)
                    self._prefixes.keep(row, tokens, caches)
                    self._prefixes.persist(row, tokens)
            self._generator.discard(ended)
        if self._must_clear:
            self._must_clear = False
            self._cache.clear()

    def _park(self) -> None:
        """Take out rows whose mask was late; drop their samples, but keep their KV."""
        for work in self._masks.late():
            sequence = next((sequence for sequence in self._sequences if sequence.mask is work), None)
            if sequence is not None:
                self._take_out(sequence)
                self._parked.append(sequence)
                sequence.row.stats.wait_for_grammar()

    def _unpark(self) -> list[Row]:
        """Insert the rows again whose masks have become ready. If all rows are parked, first wait for a mask.

        Returns the rows that must wait for their media, because their KV and media features are gone.
        """
        returned: list[Row] = []
        if self._parked and len(self._parked) == len(self._sequences):
            wait_for_one(self._parked, MASK_WAIT_S)
        for sequence in [sequence for sequence in self._parked if sequence.mask is not None and sequence.mask.is_done]:
            self._end_stay(sequence)
            if not self.insert(sequence.row, sequence.mask):
                returned.append(sequence.row)
        return returned

    def abandon(self) -> None:
        """Drop every row after a failed step, without using the generator, whose state is unknown."""
        self._ended.clear()
        for sequence in list(self._sequences):
            self._forget(sequence)

    def close(self) -> None:
        self._masks.close()

    def _checkpoint(self, sequence: BatchSequence, is_prompt_end: bool) -> None:
        """Store a prompt for later requests while its row still runs.

        The checkpoint leaves out the last token, because a cached prompt must leave one token to run. It is taken
        before the row joins the decode rows, because a copy from their caches would briefly hold the KV of all of them
        twice. If caches can be cut, a short prompt is stored only when a request can reuse it.
        """
        row = sequence.row
        if row.kept is not None:
            return
        is_short = not self._cache.needs_checkpoints and len(row.tokens()) <= EARLY_STORE_TOKENS
        is_lazy = is_short and row.questions is None
        if is_prompt_end:
            sequence.is_unstored = is_lazy
            return
        if is_lazy:
            return
        with self._keeping(row):
            caches, tokens = self._generator.extract(sequence)
            self._prefixes.keep(row, tokens, caches)
            if len(tokens) >= max(EARLY_STORE_TOKENS, len(row.prompt) - 1):
                self._prefixes.persist(row, tokens)

    def _forget(self, sequence: BatchSequence) -> None:
        """Remove a sequence from the batch, and free its features."""
        self._end_stay(sequence)
        self._media.forget(sequence.row)

    def _end_stay(self, sequence: BatchSequence) -> None:
        """Remove a sequence from the batch, but keep the features of its media."""
        self.account(sequence.row)
        for sequences in (self._sequences, self._prefilling, self._parked):
            if sequence in sequences:
                sequences.remove(sequence)
        self._drafter.discard(sequence)
        self._cache.make_room_for(len(self._sequences))
        sequence.row.sequence = None


def _error(sequence: BatchSequence) -> Exception | None:
    """Return the error of a sequence's processors or grammar."""
    for guard in sequence.processors:
        if guard.error is not None:
            return guard.error
    return sequence.mask.error(time.monotonic()) if sequence.mask is not None else None

"""The rows on the device, from their insertion to what they leave in the prefix cache."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.generate import StopSequences
from mlx_lm.models.cache import make_prompt_cache

from worker.cache import batched
from worker.cache.prefix import PrefixCache
from worker.cache.radix_tree import common_prefix
from worker.engine.decode_batch import PAIR, REFEED, Timed
from worker.engine.generator import Generator
from worker.engine.kv_budget import KvCost
from worker.engine.penalties import processors
from worker.engine.prompt_scores import Scores
from worker.engine.row import Row
from worker.engine.sampling import Guard, RowSampler
from worker.errors import is_allocation_failure
from worker.model.lanes import Lane
from worker.speculation.drafter import Drafter, NoDrafts
from worker.structured.masks import Masks
from worker.vision.attach import Vision
from worker.vision.encoder import Encoder
from worker.vision.graft import Placement
from worker.vision.media import Tokens, media_keys

log = logging.getLogger("mlxd.worker")

# Models whose caches cannot be cut get a checkpoint this often within a long message …
CHECKPOINT_TOKENS: Final = 2048
# … and at the newest message boundaries, where the next turn of a chat will leave this one.
NEWEST_BOUNDARIES: Final = 6
# Prompts from here on go to disk before their answer is complete: a successor of this worker may have to go on with it.
EARLY_TOKENS: Final = 1024
# Waiting for another row's prefill pays from about here.
MIN_SHARED_TOKENS: Final = 64
# How long a tick waits for a mask when no row can go on without one.
PARKED_WAIT_S: Final = 0.05


@dataclass(slots=True, frozen=True)
class Token:
    """One sampled token of one row; `ended` is the reason for which it is the last, `stop` or `length`."""

    row: Row
    id: int
    logprobs: mx.array
    ended: str | None


@dataclass(slots=True, frozen=True)
class Tick:
    """Results of one tick; `timed` are the forward passes whose time is known by now.

    `returned` are rows that are not in the batch any more: they wait for their media as those in the queue do. `scored`
    are rows whose prompts have their log-probabilities now; none of them has a token yet.
    """

    tokens: list[Token]
    progress: list[tuple[Row, int, int]]
    broken: list[tuple[Row, Exception]]
    prefilled: int
    timed: Sequence[Timed]
    returned: list[Row]
    scored: list[tuple[Row, Scores]]


class Batch:
    """The rows on the device. One thread owns it and everything MLX.

    `insert` takes a row at any time, `remove` takes it out in any phase, `tick` does one decode step for the decoding
    rows and then one chunk for the prefilling ones. `settle` stores what the rows that ended have computed.
    """

    def __init__(
        self,
        model: Any,
        eos_ids: Sequence[int],
        cache: PrefixCache,
        lane: Lane = Lane.TOGETHER,
        drafter: Drafter | None = None,
        vision: Vision | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        # Known once a first row, the one for warming up, has ended.
        self.kv_cost: KvCost | None = None
        self._cache = cache
        self._masks = Masks()
        self._sampler = RowSampler(self._masks, vision.needs.suppressed if vision is not None else ())
        self._graft = vision.graft if vision is not None else None
        # Tokens of a medium see each other in both directions: no chunk may cut it.
        self._keeps_whole = vision is not None and bool(vision.needs.block)
        self._encoder = encoder
        # Rows taken out while their grammar works, by the uid that they had.
        self._parked: dict[int, Row] = {}
        self._rows: dict[int, Row] = {}
        self._guards: dict[int, list[Guard]] = {}
        self._prefilling: set[int] = set()
        # Rows past their prompt whose KV is nowhere but in the batch: it is stored when they end, or are asked for it.
        self._unstored: set[int] = set()
        # Rows that have ended, with all tokens and their KV, until `settle`.
        self._ended: list[tuple[Row, list[int], list[Any]]] = []
        self._eos_ids = tuple(eos_ids)
        self._eos = StopSequences([[token] for token in eos_ids])
        self._never = StopSequences()
        can_verify = lane is Lane.TOGETHER and batched.can_rewind(make_prompt_cache(model))
        self._drafter: Drafter = drafter if drafter is not None and can_verify else NoDrafts()
        self._drafter.begin(self._sampler.guess)
        self._generator = Generator(model, self._sampler, lane, self._drafter)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    @property
    def prefilling(self) -> int:
        return len(self._prefilling)

    @property
    def longest_prefill(self) -> int:
        """Tokens that the longest prefill takes from its beginning to its end."""
        rows = (self._rows[uid] for uid in self._prefilling)
        return max((len(row.prompt) + len(row.output) - row.reused for row in rows), default=0)

    @property
    def decoding(self) -> int:
        return len(self._rows) - len(self._prefilling)

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
        if row.scores_prompt:
            return False  # it computes all of its prompt
        if self.is_prefilling_prefix_of(row):
            return True
        row.ticket = row.ticket or self._cache.restore(row.keys()[:-1], row.cache_salt)
        if row.ticket is not None and not row.ticket.is_settled:
            return True
        if not row.media:
            return False
        keys = row.keys()[:-1]
        if row.ticket is not None:
            self._cache.attach(keys, row.cache_salt, row.ticket)
        return not self._has_features(row, self._cache.longest(keys, row.cache_salt, row.whole), is_first)

    def _has_features(self, row: Row, cached: int, is_first: bool = False) -> bool:
        """Whether a row holds the features of all media behind its cached tokens; missing ones are made from now on."""
        assert self._encoder is not None, "media are for models with a tower"
        media = [span.medium for span in row.media if span.end > cached]
        return self._encoder.is_ready(row.rid, media, is_first=is_first)

    def is_prefilling_prefix_of(self, row: Row) -> bool:
        """Whether a row in prefill will soon have cached much more of this prompt than is cached now."""
        if not self._prefilling or not self._cache.is_on:
            return False
        tokens = row.keys()[:-1]
        cached: int | None = None
        for uid in self._prefilling:
            other = self._rows[uid]
            if other.cache_salt != row.cache_salt:
                continue
            gain = self._shareable(other, row.whole(common_prefix(other.keys(), tokens)))
            if gain < MIN_SHARED_TOKENS:
                continue
            cached = self._cache.longest(tokens, row.cache_salt) if cached is None else cached
            if gain - cached >= MIN_SHARED_TOKENS:
                return True
        return False

    def insert(self, row: Row, parked: int | None = None) -> bool:
        """Queue prompt and output so far, less what the prefix cache holds; sampling goes on at position len(output).

        The last token always runs: its logits are what the first sample needs. False, and the row is not in, where
        features of its media are missing, which are made from now on.
        """
        self.settle()
        tokens, keys = row.tokens(), row.keys()
        ticket, row.ticket = row.ticket, None
        scores = Scores(row.prompt, row.top_logprobs or 0) if row.scores_prompt else None
        reused, caches = 0, []
        if scores is None:
            self._store_running(keys, row.cache_salt)
            with mx.stream(self._generator.stream):
                reused, caches = self._cache.fetch(keys[:-1], row.cache_salt, ticket, row.whole if row.media else None)
        if row.media and not self._has_features(row, reused):
            return False
        placement = self._placement(row, reused)
        if row.cached is None:
            row.cached = 0 if row.output else reused
        row.prefilled = row.reused = reused
        own = processors(row.sampling, len(row.prompt), row.words, self._eos_ids)
        guards = [Guard(processor) for processor in (*row.processors, *own)]
        uid = self._generator.insert(
            self._segments(row, tokens, reused),
            row.max_tokens - len(row.output),
            caches,
            tokens[:reused].tolist(),
            guards,
            self._stops(row),
            scores,
        )
        row.uid = uid
        if placement is not None:
            assert self._graft is not None
            self._graft.placements[uid] = placement
        self._rows[uid] = row
        self._guards[uid] = guards
        self._prefilling.add(uid)
        self._sampler.add(uid, row.sampling, len(row.output))
        self._drafter.add(uid, tokens, row.drafting)
        if parked is not None:
            self._masks.move(parked, uid)
        elif row.rule is not None:
            self._masks.add(uid, row.rule, row.output)
        return True

    def _stops(self, row: Row) -> StopSequences:
        """Tokens that end a row."""
        ignores_eos = row.sampling.ignore_eos and row.rule is None
        if not row.sampling.stop_ids:
            return self._never if ignores_eos else self._eos
        return StopSequences([[token] for token in (*(() if ignores_eos else self._eos_ids), *row.sampling.stop_ids)])

    def _placement(self, row: Row, reused: int) -> Placement | None:
        """The media of a row, with the features of those that are not reused."""
        if not row.media:
            return None
        assert self._encoder is not None, "media are for models with a tower"
        placement = Placement(row.media, row.positions, len(row.prompt))
        for span in row.media:
            if span.end > reused and span.medium.key not in placement.features:
                placement.features[span.medium.key] = self._encoder.held(row.rid, span.medium)
        self._encoder.keep(row.rid, placement.features)
        return placement

    def _pass_media(self, row: Row) -> None:
        """Let go of the features that the prefill of a row needs no more."""
        assert self._graft is not None
        assert self._encoder is not None
        assert row.uid is not None
        placement = self._graft.placements[row.uid]
        if placement.features:
            needed = {span.medium.key for span in row.media if span.end > row.prefilled}
            passed = placement.features.keys() - needed
            for key in passed:
                del placement.features[key]
            self._encoder.release(row.rid, passed)

    def remove(self, row: Row) -> None:
        """Take a row out if it is in; what it has computed so far goes to the prefix cache."""
        if row.uid is None:
            return
        if row.uid not in self._parked:
            self._persist(row, self._take_out(row))
        self._forget(row)

    def _store_running(self, tokens: Any, salt: str) -> None:
        """Store what running rows have in common with these tokens. Few are ever asked for it, and it costs a copy."""
        if not self._unstored or not self._cache.is_on:
            return
        tokens = tokens[:-1]
        head = tokens[:MIN_SHARED_TOKENS]
        for uid in sorted(self._unstored):
            other = self._rows[uid]
            if other.cache_salt != salt or not np.array_equal(other.keys()[:MIN_SHARED_TOKENS], head):
                continue
            if common_prefix(other.keys(), tokens) - self._cache.longest(tokens, salt) >= MIN_SHARED_TOKENS:
                self._unstored.discard(uid)
                caches, done = self._generator.extract(uid)
                self._keep(other, done, caches)

    def _take_out(self, row: Row) -> list[int]:
        assert row.uid is not None
        self._unstored.discard(row.uid)
        with mx.stream(self._generator.stream):
            caches, tokens = self._generator.remove(row.uid)
        # Inside of a medium a checkpoint serves nobody, and would hide those before it.
        is_usable = not self._cache.needs_checkpoints or row.whole(len(tokens)) == len(tokens)
        # A row that never ran holds what it was given.
        if len(tokens) > row.reused and is_usable:
            try:
                self._keep(row, tokens, caches)
            except Exception as error:  # the row is out, often to make room, and must not be lost for what it leaves
                if not is_allocation_failure(error):
                    raise
                log.warning("no memory to cache a row's KV; the prefix cache is cleared: %s", error)
                self._cache.clear()
        return tokens

    def tick(self, chunk: int, *, rides: bool = True) -> Tick:
        """One decode step, and at most `chunk` prompt tokens of each prefilling row, which may ride on it."""
        self.settle()
        returned = self._unpark()
        most = max(chunk, self._longest_medium()) if self._keeps_whole else chunk
        prompted, generated = self._generator.next(most, rides=rides)
        progress: list[tuple[Row, int, int]] = []
        scored: list[tuple[Row, Scores]] = []
        prefilled = 0
        for step in prompted:
            row = self._rows[step.uid]
            if step.scores is not None:
                row.scores_prompt = False
                scored.append((row, step.scores))
                continue
            done, total = row.reused + step.done, row.reused + step.total
            prefilled += done - row.prefilled
            row.prefilled = done
            if step.is_prompt_end:
                self._prefilling.discard(step.uid)
            if row.media:
                self._pass_media(row)
            if step.is_segment_end and (row.marks is None or done in row.marks):
                self._checkpoint(row, is_prompt_end=step.is_prompt_end)
            progress.append((row, done, total))
        broken = [
            (self._rows[uid], guard.error)
            for uid, guards in self._guards.items()
            for guard in guards
            if guard.error is not None
        ]
        broken += [(self._rows[uid], error) for uid, error in self._masks.errors()]
        tokens: list[Token] = []
        for sampled in generated:
            row = self._rows[sampled.uid]
            tokens.append(Token(row, sampled.token, sampled.logprobs, sampled.ended))
            if sampled.tokens is not None and sampled.caches is not None:
                self.kv_cost = self.kv_cost or KvCost.of(sampled.caches, len(sampled.tokens), self._drafter.token_bytes)
                self._ended.append((row, sampled.tokens, sampled.caches))
                self._forget(row)
        self._park()
        return Tick(tokens, progress, broken, prefilled, self._generator.timed, returned, scored)

    def account(self, row: Row) -> None:
        """Bring the row's counts up to date."""
        if row.uid is not None:
            predicted, accepted = self._drafter.spent(row.uid)
            row.predicted += predicted
            row.accepted += accepted

    def settle(self) -> None:
        """Store the rows that ended. Not in `tick`: it takes a while, in which their clients can have their answers."""
        ended, self._ended = self._ended, []
        for row, tokens, caches in ended:
            self._keep(row, tokens, caches)
            self._persist(row, tokens)

    def _park(self) -> None:
        """Take out the rows that the step did not wait for: what was sampled for them is dropped, their KV is kept."""
        for uid in self._masks.late():
            if (row := self._rows.get(uid)) is not None:
                self._take_out(row)
                self._parked[uid] = row

    def _unpark(self) -> list[Row]:
        """Put back the rows whose masks are there. When nothing else is to be done, wait for one a moment.

        Returns those that have to wait for their media, of which neither KV nor features are left; their grammars
        follow them again when they are back.
        """
        returned: list[Row] = []
        if self._parked and len(self._parked) == len(self._rows):
            self._masks.wait(list(self._parked), PARKED_WAIT_S)
        for uid in [uid for uid in self._parked if self._masks.is_done(uid)]:
            row = self._parked.pop(uid)
            del self._rows[uid]
            self._guards.pop(uid)
            self._prefilling.discard(uid)
            self._sampler.discard(uid)
            self.account(row)
            self._drafter.discard(uid)
            if self._graft is not None:
                self._graft.placements.pop(uid, None)
            row.uid = None
            is_in = False
            try:
                is_in = self.insert(row, parked=uid)
            finally:
                if not is_in:
                    self._masks.discard(uid)
            if not is_in:
                row.prefilled = row.reused = 0
                returned.append(row)
        return returned

    def abandon(self) -> None:
        """Let go of every row after a failed step, when nothing in the generator can be trusted or even asked."""
        self._ended.clear()
        for row in self.rows:
            self._forget(row)
        if self._graft is not None:
            self._graft.placements.clear()

    def close(self) -> None:
        self._masks.close()

    def _longest_medium(self) -> int:
        """Tokens of the longest medium in prefill."""
        rows = (self._rows[uid] for uid in self._prefilling)
        return max((span.end - span.begin for row in rows for span in row.media), default=0)

    def _segments(self, row: Row, tokens: Any, reused: int) -> list[list[int]]:
        """The tokens to run, cut where a checkpoint is worth having, and at the edges of media: whatever the size of a
        chunk, it holds tokens of one kind, whose numbers come from the same kernel."""
        last = len(tokens) - 1
        cuts: set[int] = set()
        if self._cache.needs_checkpoints:
            messages = [at for at in row.boundaries if reused < at < last]
            chunks = (row.whole(at) for at in range(reused + CHECKPOINT_TOKENS, last, CHECKPOINT_TOKENS))
            cuts = {*messages[:1], *messages[-NEWEST_BOUNDARIES:], *chunks} - {reused}
        row.marks = None
        if row.media:
            edges = {at for span in row.media for at in (span.begin, span.end) if reused < at < last}
            # Of many media, only behind the newest: the edges before it are of use to nobody.
            row.marks = frozenset(
                {*cuts, *([max(edges)] if edges and self._cache.needs_checkpoints else ()), last, last + 1}
            )
            cuts |= edges
        return [part.tolist() for part in np.split(tokens[reused:], [at - reused for at in sorted(cuts)])]

    def _shareable(self, other: Row, common: int) -> int:
        """Number of `common` leading tokens that `other` will leave in the cache: all, or up to its last checkpoint, as
        far as there is room."""
        if not self._cache.needs_checkpoints:
            return min(common, self.kv_cost.storable(self._cache.budget)) if self.kv_cost is not None else common
        marks = (*other.boundaries, len(other.prompt) - 1, *range(CHECKPOINT_TOKENS, common + 1, CHECKPOINT_TOKENS))
        cuts = sorted({at for at in marks if at <= common})
        while cuts and self.kv_cost is not None and self.kv_cost.stored(cuts[-1], len(cuts)) > self._cache.budget:
            cuts.pop()
        return cuts[-1] if cuts else 0

    def _checkpoint(self, row: Row, is_prompt_end: bool) -> None:
        """Share a prompt with the requests that follow while this one still runs.

        The checkpoint before the last token serves: a cached prompt must leave one to run, and the row is not among the
        decoding ones yet. A copy of its KV out of theirs would keep all of theirs twice until it is made. Where caches
        can be cut, a short prompt is stored when a request needs it.
        """
        assert row.uid is not None
        is_lazy = not self._cache.needs_checkpoints and len(row.tokens()) <= EARLY_TOKENS
        if is_prompt_end:
            if is_lazy:
                self._unstored.add(row.uid)
            return
        if is_lazy:
            return
        caches, tokens = self._generator.extract(row.uid)
        self._keep(row, tokens, caches)
        if len(tokens) >= max(EARLY_TOKENS, len(row.prompt) - 1):
            self._persist(row, tokens)

    def _persist(self, row: Row, tokens: Sequence[int]) -> None:
        """To disk: all KV, and the checkpoints that the next turn or a resumed request will ask for."""
        starts = row.boundaries or [len(row.prompt) - 1]
        self._cache.persist(self._keyed(row, tokens), {starts[0], starts[-1], len(tokens)}, row.cache_salt)

    def _keep(self, row: Row, tokens: Sequence[int], caches: Sequence[Any]) -> None:
        with mx.stream(self._generator.stream):
            self._cache.store(self._keyed(row, tokens), caches, row.cache_salt)

    def _keyed(self, row: Row, tokens: Sequence[int]) -> Tokens:
        return media_keys(np.array(tokens, dtype=np.int32), row.media)

    def _forget(self, row: Row) -> None:
        assert row.uid is not None
        self.account(row)
        self._rows.pop(row.uid, None)
        self._parked.pop(row.uid, None)
        self._masks.discard(row.uid)
        self._guards.pop(row.uid, None)
        self._prefilling.discard(row.uid)
        self._unstored.discard(row.uid)
        self._sampler.discard(row.uid)
        self._drafter.discard(row.uid)
        if row.media:
            assert self._graft is not None
            assert self._encoder is not None
            self._graft.placements.pop(row.uid, None)
            self._encoder.forget(row.rid)
        row.uid = None
        row.prefilled = row.reused = 0

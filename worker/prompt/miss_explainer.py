"""Explanation of misses: why tokens of a prompt did not come from the prefix cache. It is computed when asked for."""

import time
from collections.abc import Callable, Sequence
from typing import Final

from protocol.from_worker import Explained, MissCause, MissCode
from protocol.prompts import ChatPrompt
from protocol.to_worker import Explain
from worker.prefix_cache.prefix import PrefixCache
from worker.prefix_cache.radix_tree import common_prefix
from worker.prompt.prompt_difference import equal_chars, hashed, text_causes
from worker.prompt.recent_prompts import RecentPrompt, RecentPrompts

# Prompts with fewer equal tokens at their beginning, or misses of fewer tokens, are not worth a word.
MIN_TOKENS: Final = 16

Compared = tuple[RecentPrompt, int]


class MissExplainer:
    """Explainer of the misses of one model's cache. `explain` may take milliseconds for each recent prompt, so only a
    thread that can wait calls it."""

    def __init__(self, recent: RecentPrompts, cache: PrefixCache, decode: Callable[[Sequence[int]], str]) -> None:
        self._recent = recent
        self._cache = cache
        self._decode = decode

    def explain(self, call: Explain) -> Explained:
        """Explain the misses of one request."""
        if not self._cache.is_on:
            return Explained(call.rid, causes=(MissCause(MissCode.OFF, 0),))
        known = self._recent.until(call.of)
        lookup = known[-1].stats.lookup if known else None
        if lookup is None:
            return Explained(call.rid)
        ours = known.pop()
        # A request that never had a place, or has come to this worker twice, says nothing of the cache.
        compared = [
            (each, common_prefix(ours.keys[:-1], each.text()))
            for each in known
            if each.rid != ours.rid and each.stats.lookup is not None
            if call.crosses_salts or each.salt == ours.salt
        ]
        causes = self._special_causes(ours)
        partner: Compared | None = None
        if not causes:
            partner = _partner(ours, compared, call.other)
            causes = self._kv_causes(ours, compared)
            # What differs is not worth a word if a closer request has served the prompt.
            if partner is not None and (call.other or partner[1] >= lookup.reused):
                causes += text_causes(ours, *partner, self._decode)
            longest = max((common for _, common in compared), default=0)
            causes = _with_new(ours, causes, longest, has_other=bool(call.other))
        if not call.shows_text:
            causes = [hashed(cause) for cause in causes]
        other, common = partner or (None, 0)
        return Explained(
            rid=call.rid,
            prompt=len(ours.keys),
            reused=lookup.reused,
            restored=lookup.restored,
            common=common,
            other=0 if other is None else other.rid,
            age_s=0.0 if other is None else ours.stats.arrived - other.stats.arrived,
            causes=tuple(sorted(causes, key=lambda cause: -cause.tokens)),
        )

    def _special_causes(self, ours: RecentPrompt) -> list[MissCause]:
        """Return the cause if the prompt could not come from the cache whatever it was."""
        assert ours.stats.lookup is not None
        missed = len(ours.keys) - 1 - ours.stats.lookup.reused
        if ours.stats.lookup.problem == "scored":
            return [MissCause(MissCode.SCORED, missed)]
        return [MissCause(MissCode.SPARSE, missed)] if ours.is_sparse else []

    def _kv_causes(self, ours: RecentPrompt, compared: Sequence[Compared]) -> list[MissCause]:
        """Return why KV of text that an earlier request had as well was not there."""
        lookup = ours.stats.lookup
        assert lookup is not None
        own = [each for each in compared if each[0].salt == ours.salt]
        near, common = max(own, key=lambda each: each[1], default=(None, 0))
        causes: list[MissCause] = []
        at = lookup.reused
        # Without checkpoints, known text without KV has been evicted, and a file that holds it is too short or too new.
        if lookup.known - at >= MIN_TOKENS and (lookup.problem or self._cache.needs_checkpoints):
            code = MissCode.DISK if lookup.problem else MissCode.CHECKPOINT
            causes.append(MissCause(code, lookup.known - at, at))
            at = lookup.known
        if near is not None and common - at >= MIN_TOKENS:
            causes.append(self._lost_cause(ours, own, near, at, common - at))
            at = common
        foreign, shared = max(
            (each for each in compared if each[0].salt != ours.salt), key=lambda each: each[1], default=(None, 0)
        )
        if foreign is not None and shared - at >= MIN_TOKENS:
            code = MissCode.SALT if foreign.adapter == ours.adapter else MissCode.ADAPTER
            causes.append(MissCause(code, shared - at, at, by=foreign.rid))
        return causes

    def _lost_cause(
        self, ours: RecentPrompt, own: Sequence[Compared], near: RecentPrompt, at: int, tokens: int
    ) -> MissCause:
        """Return why tokens of a path that was computed before are not in the tree any more, from position `at` on."""
        lookup, now = ours.stats.lookup, time.monotonic()
        if lookup is not None and lookup.problem == "disk":
            return MissCause(MissCode.DISK, tokens, at)
        shared = {each.rid: common for each, common in own}
        for lost in reversed(tuple(self._cache.evictions)):
            if not near.stats.arrived <= lost.at <= (ours.stats.admitted or now):
                continue
            is_ours = lost.owner == 0 or (shared.get(lost.owner, 0) > lost.begin and lost.end > at)
            if is_ours and lost.by and lost.by == lost.owner:
                return MissCause(MissCode.TOO_LARGE, tokens, at, by=lost.by)
            if is_ours:
                code = MissCode.EVICTED if lost.by else MissCode.MEMORY
                return MissCause(code, tokens, at, by=lost.by, ago_s=ours.stats.arrived - lost.at)
        return MissCause(MissCode.NOT_STORED, tokens, at, by=near.rid)


def _partner(ours: RecentPrompt, compared: Sequence[Compared], named: int) -> Compared | None:
    """Return the request to compare with: the named one, or the most similar of those that have anything in common."""
    if named:
        return next((each for each in compared if each[0].rid == named), None)

    def likeness(each: Compared) -> tuple[int, int]:
        other, common = each
        if isinstance(ours.prompt, ChatPrompt) and isinstance(other.prompt, ChatPrompt):
            return equal_chars(ours.prompt, other.prompt), common
        return 0, common

    best = max(((likeness(each), at) for at, each in enumerate(compared) if each[0].salt == ours.salt), default=None)
    if best is None or (best[0][0] == 0 and best[0][1] < MIN_TOKENS):
        return None
    return compared[best[1]]


def _with_new(ours: RecentPrompt, causes: list[MissCause], common: int, *, has_other: bool) -> list[MissCause]:
    """Return the causes, or "new" for a prompt whose end is unlike that of any recent request.

    Another question in the last message is such an end, unless the client has named the request to compare with.
    """
    if isinstance(ours.prompt, ChatPrompt) and not has_other:
        last_message = len(ours.prompt.messages) - 1
        changed = [each for each in causes if each.code == MissCode.MESSAGE and each.message == last_message]
        causes = [each for each in causes if each not in changed]
    else:
        changed = []
    assert ours.stats.lookup is not None
    begin = max(common, ours.stats.lookup.reused)
    tokens = len(ours.keys) - 1 - begin
    if not causes and tokens >= MIN_TOKENS and (changed or common < MIN_TOKENS):
        return [MissCause(MissCode.NEW, tokens, begin)]
    return causes

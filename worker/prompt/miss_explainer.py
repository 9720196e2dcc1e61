"""Explanation of misses: why tokens of a prompt did not come from the prefix cache. It is computed when asked for.

Recent prompts of one model, kept in memory to explain why a prompt did not come from the prefix cache.

The prompts are bounded in number and size, are never written anywhere, and are only kept while there is a prefix cache,
which holds the same tokens.

Differences between two prompts: which part of the text is not the same, and why.
"""

import hashlib
import json
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from msgspec import structs

from protocol.from_worker import Explained, MissCause, MissCode
from protocol.to_worker import ChatPrompt, Explain, NextTurnPrompt, Prompt
from worker.engine.row import Row, RowStats, Thinking
from worker.prefix_cache.cache_and_eviction import PrefixCache
from worker.prefix_cache.radix_tree import Tokens, common_prefix
from worker.prompt.rewrites import media, words

MAX_PROMPTS: Final = 256
MAX_BYTES: Final = 16 << 20
# Approximate size of a message's objects beside its text.
_MESSAGE_BYTES: Final = 1024
# Size of a token in a list of the output.
_OUTPUT_BYTES: Final = 36


@dataclass(frozen=True, slots=True, eq=False)
class RecentPrompt:
    """Prompt of a row, with the parts of the row that the engine goes on changing: `output`, `stats` and `thinking`.

    `keys` are the prompt's keys in the prefix cache, and `prompt_bytes` is the approximate size without the output.
    """

    rid: int
    prompt: Prompt
    keys: Tokens
    salt: str
    adapter: str
    truncated: tuple[int, int]
    is_sparse: bool
    output: list[int]
    stats: RowStats
    thinking: Thinking
    prompt_bytes: int

    def text(self) -> Tokens:
        """Return the keys of the prompt and of the output so far."""
        return np.concatenate((self.keys, np.array(self.output, dtype=np.int32)))


class RecentPrompts:
    """The newest prompts, oldest first. The intake's thread adds them, and another thread reads them."""

    def __init__(self, max_prompts: int = MAX_PROMPTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_prompts = max_prompts
        self._max_bytes = max_bytes
        self._prompts: deque[RecentPrompt] = deque()
        # Outputs of the prompts, which grow while their rows run, and the size of everything else.
        self._outputs: deque[list[int]] = deque()
        self._prompt_bytes = 0
        # Whether there is a prefix cache. Without it prompts are not kept.
        self.is_on: Callable[[], bool] = lambda: True

    def add(self, row: Row, prompt: Prompt, characters: int) -> None:
        """Add a new row with a prompt of about this many characters, and drop the oldest prompts beyond the limits.

        Prompts of next turns are not kept, because no client has sent them.
        """
        if not self.is_on() or isinstance(prompt, NextTurnPrompt):
            return
        keys = row.keys()[: len(row.prompt)]
        size = keys.nbytes + characters
        if isinstance(prompt, ChatPrompt):
            size += _MESSAGE_BYTES * (len(prompt.messages) + len(prompt.tools))
            media = tuple(structs.replace(medium, data=b"") for medium in prompt.media)
            prompt = structs.replace(prompt, media=media)
        adapter = row.adapter.name if row.adapter is not None else ""
        own = row.output, row.stats, row.thinking
        self._prompts.append(
            RecentPrompt(
                row.rid, prompt, keys, row.cache_salt, adapter, row.truncated, bool(row.keep), *own, prompt_bytes=size
            )
        )
        self._outputs.append(row.output)
        self._prompt_bytes += size
        while len(self._prompts) > self._max_prompts or (self._prompts and self.nbytes > self._max_bytes):
            self._prompt_bytes -= self._prompts.popleft().prompt_bytes
            self._outputs.popleft()

    @property
    def nbytes(self) -> int:
        return self._prompt_bytes + _OUTPUT_BYTES * sum(map(len, self._outputs))

    def until(self, rid: int) -> list[RecentPrompt]:
        """Return the prompt of this request after those that arrived before it, or [] if it is not known any more."""
        prompts = list(self._prompts)
        for at in range(len(prompts) - 1, -1, -1):
            if prompts[at].rid == rid:
                return prompts[: at + 1]
        return []


Message = dict[str, Any]
# Number of characters of an excerpt, and of those before the difference.
EXCERPT_CHARS: Final = 80
_BEFORE_CHARS: Final = 24
# Number of tokens that are decoded after the first token that differs, and before it.
_SHOWN_TOKENS: Final = 16
_TOKENS_BEFORE: Final = 8
_OPENING: Final = ("system", "developer")
_MONTH: Final = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\b\.?"
# Parts of dates and times as clients and templates write them, in digits or with the names of months and days.
_MOMENT: Final = re.compile(
    rf"\b{_MONTH}|\b(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*\b\.?|\b[ap]\.?m\b\.?"
    r"|\b(?:utc|gmt|cet|cest|[ecmp][sd]t)\b|(?<=\d)(?:st|nd|rd|th)\b|\d+",
    re.IGNORECASE,
)
_HAS_DATE: Final = re.compile(
    rf"\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\d{{1,2}}:\d{{2}}|\b1[5-9]\d{{8}}\b|\b{_MONTH} \d|\d\.? {_MONTH}",
    re.IGNORECASE,
)


def text_causes(
    ours: RecentPrompt, theirs: RecentPrompt, common: int, decode: Callable[[Sequence[int]], str]
) -> list[MissCause]:
    """Return what differs after the `common` tokens with which both prompts begin, the first difference in the text
    first. Only this one has a number of tokens."""
    whole = theirs.text()
    tokens = min(len(whole), len(ours.keys) - 1) - common
    if tokens <= 0:
        return []
    causes: list[MissCause] = []
    if isinstance(ours.prompt, ChatPrompt) and isinstance(theirs.prompt, ChatPrompt):
        causes = chat_causes(ours.prompt, theirs.prompt)
    begin = max(0, common - _TOKENS_BEFORE)
    # Keys of media are no tokens.
    new, old = (
        decode([token for token in text[begin : common + _SHOWN_TOKENS].tolist() if token >= 0])
        for text in (ours.keys, whole)
    )
    if ours.truncated != theirs.truncated and ours.prompt != theirs.prompt:
        causes = [MissCause(MissCode.TRUNCATED, 0)]
    elif not causes:
        causes = [_unseen_cause(ours, theirs, common, old, new)]
    return [structs.replace(causes[0], tokens=tokens, at=common), *causes[1:]]


def chat_causes(ours: ChatPrompt, theirs: ChatPrompt) -> list[MissCause]:
    """Return what the client has changed, in the order in which most templates render it."""
    changed: list[MissCause] = []
    pairs = enumerate(zip(ours.messages, theirs.messages, strict=False))
    differing = [at for at, (left, right) in pairs if _differ(left, right, ours, theirs)]
    if differing[:1] == [0] and ours.messages[0]["role"] in _OPENING:
        changed.append(_message_cause(differing.pop(0), ours, theirs))
    if ours.tools != theirs.tools:
        changed.append(_tools_cause(ours.tools, theirs.tools))
    if (settings := _settings(theirs)) != (now := _settings(ours)):
        changed.append(MissCause(MissCode.SETTINGS, 0, old=_short(_json(settings)), new=_short(_json(now))))
    return [*changed, *(_message_cause(at, ours, theirs) for at in differing[:1])]


def equal_chars(ours: ChatPrompt, theirs: ChatPrompt) -> int:
    """Return the size of the messages that both have at the same place, as a measure of similarity."""
    pairs = zip(ours.messages, theirs.messages, strict=False)
    return sum(1 + len(words(left.get("content"))) for left, right in pairs if not _differ(left, right, ours, theirs))


def hashed(cause: MissCause) -> MissCause:
    """Return a cause with hashes in place of its excerpts."""
    return structs.replace(cause, old=_hash(cause.old), new=_hash(cause.new))


def _unseen_cause(ours: RecentPrompt, theirs: RecentPrompt, common: int, old: str, new: str) -> MissCause:
    """Return the cause of a difference that is in the rendered text alone."""
    if not isinstance(ours.prompt, ChatPrompt) or not isinstance(theirs.prompt, ChatPrompt):
        return MissCause(MissCode.TEXT, 0, old=_short(old), new=_short(new))
    at = len(theirs.prompt.messages)
    if common >= len(theirs.keys) and at < len(ours.prompt.messages):
        # The difference is in the answer to the other request.
        message = ours.prompt.messages[at]
        code = MissCode.MESSAGE
        if theirs.thinking.tokens:
            code = MissCode.THOUGHTS if message.get("reasoning_content") else MissCode.THOUGHTS_UNSENT
        return MissCause(code, 0, 0, at, str(message["role"]), _short(old), _short(new))
    if _HAS_DATE.search(old) and _HAS_DATE.search(new) and _without_moments(old) == _without_moments(new):
        return MissCause(MissCode.DATE, 0, role="template", old=_short(old), new=_short(new))
    has_thoughts = any(message.get("reasoning_content") for message in theirs.prompt.messages)
    code = MissCode.THOUGHTS if has_thoughts else MissCode.TEMPLATE
    return MissCause(code, 0, role="template", old=_short(old), new=_short(new))


def _message_cause(at: int, ours: ChatPrompt, theirs: ChatPrompt) -> MissCause:
    new, old = ours.messages[at], theirs.messages[at]
    role = str(new["role"])
    if _digests(new, ours) != _digests(old, theirs):
        return MissCause(MissCode.MEDIA, 0, 0, at, role, _json(_digests(old, theirs)), _json(_digests(new, ours)))
    if old["role"] == role and _without_thoughts(old) == _without_thoughts(new):
        before, after = str(old.get("reasoning_content") or ""), str(new.get("reasoning_content") or "")
        return MissCause(MissCode.THOUGHTS_UNSENT, 0, 0, at, role, *excerpts(before, after))
    before, after = _readable(old), _readable(new)
    code = MissCode.SYSTEM if role in _OPENING else MissCode.MESSAGE
    if _HAS_DATE.search(before + after) and _without_moments(before) == _without_moments(after):
        code = MissCode.DATE
    return MissCause(code, 0, 0, at, role, *excerpts(before, after))


def _tools_cause(new: list[dict[str, Any]], old: list[dict[str, Any]]) -> MissCause:
    code, before, after = MissCode.TOOL_ORDER, old, new
    if sorted(map(_json, new)) != sorted(map(_json, old)):
        code = MissCode.TOOLS
        before, after = [tool for tool in old if tool not in new], [tool for tool in new if tool not in old]
    return MissCause(code, 0, old=_short(", ".join(map(_name, before))), new=_short(", ".join(map(_name, after))))


def excerpts(old: str, new: str) -> tuple[str, str]:
    """Return the places at which two texts first differ, each with a little of the text before."""
    size = min(len(old), len(new))
    at = next((at for at in range(size) if old[at] != new[at]), size)
    begin = max(0, at - _BEFORE_CHARS)
    mark = "…" if begin else ""
    return mark + _short(old[begin:]), mark + _short(new[begin:])


def _differ(left: Message, right: Message, ours: ChatPrompt, theirs: ChatPrompt) -> bool:
    if media(left.get("content")) or media(right.get("content")):
        return _readable(left) != _readable(right) or _digests(left, ours) != _digests(right, theirs)
    return left != right


def _digests(message: Message, prompt: ChatPrompt) -> list[str]:
    return [
        f"{prompt.media[part['media']].digest.hex()[:16]} {_json(prompt.media[part['media']].options)}"
        for part in media(message.get("content"))
    ]


def _readable(message: Message) -> str:
    """Return a message as text, without its media."""
    rest = {name: value for name, value in message.items() if name not in ("role", "content") and value}
    text = words(message.get("content"))
    return f"{message['role']}: {text}{' ' + _json(rest) if rest else ''}"


def _without_thoughts(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "reasoning_content" and value}


def _without_moments(text: str) -> str:
    return re.sub(r"[\s#:./,-]+", " ", _MOMENT.sub("#", text))


def _settings(prompt: ChatPrompt) -> dict[str, Any]:
    return {"thinking": prompt.thinking, "effort": prompt.effort, **prompt.template_kwargs}


def _name(tool: dict[str, Any]) -> str:
    return str(tool["function"]["name"])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _short(text: str) -> str:
    return text if len(text) <= EXCERPT_CHARS else text[:EXCERPT_CHARS] + "…"


def _hash(text: str) -> str:
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=6)
    return f"#{digest.hexdigest()}" if text else ""


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

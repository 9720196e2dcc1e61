"""Differences between two prompts: which part of the text is not the same, and why."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec import structs

from protocol.from_worker import MissCause, MissCode
from protocol.prompts import ChatPrompt
from worker.prompt.contents import media, words
from worker.prompt.recent_prompts import RecentPrompt

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
    if ours.left_out != theirs.left_out and ours.prompt != theirs.prompt:
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

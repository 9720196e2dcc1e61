"""Texts that a template does not see: marks stand for them in the rendering, and the texts then replace the marks.

Text beside calls: some templates drop it and take no separate message for it, such as Mistral's. The template renders a
mark in the name of the first call, and the text replaces the mark before the markup that opens the call. That is where
the model itself has written the text.

Quoted markers: many templates split an answer at a marker such as `</think>` and drop the text before it, or refuse the
answer. If the answer only quotes the marker, a mark stands for it, and the whole answer is in the prompt, unchanged.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import compress, product, takewhile
from typing import Any, Final, cast

from jinja2 import Environment
from jinja2.exceptions import TemplateError

from worker.output.parsers.families import FAMILIES
from worker.output.parsers.think_and_calls import MarkupGrammar
from worker.prompt.rewrites import ANSWERED, ASKED, QUESTION, SAID, TOOL, Message, Messages, words

_MARK: Final = "words_beside_call_"
# Characters of which one stands on both sides of the number of a quoted marker: noncharacters and private characters of
# Unicode, which templates neither strip nor change.
_DELIMITERS: Final = (*map(chr, range(0xFDD0, 0xFDF0)), *map(chr, range(0xF0000, 0xFFFFE)))
_WORDS: Final = re.compile(r"\w+")
_MARKER_MIN: Final = 3
_MARKER_MAX: Final = 64
_PLAIN: Final = re.compile(r"[\w\s]*")


def marked(messages: Messages) -> tuple[Messages, list[str]]:
    """Move each text beside calls out of its message. Return the messages, with marks, and the texts."""
    texts: list[str] = []
    shown: Messages = []
    for message in messages:
        if message.get("tool_calls") and words(message.get("content")):
            first, *others = message["tool_calls"]
            name = f"{_MARK}{len(texts)}_{first['function']['name']}"
            texts.append(words(message["content"]))
            first = {**first, "function": {**first["function"], "name": name}}
            message = {**message, "content": "", "tool_calls": [first, *others]}
        shown.append(message)
    return shown, texts


def with_words(rendered: str, opening: str, texts: Sequence[str]) -> str:
    """Replace the marks by the texts, before the `opening` of their calls. Raises `TemplateError`."""
    found: list[int] = []

    def opened(mark: re.Match[str]) -> str:
        found.append(int(mark[1]))
        return texts[found[-1]] + opening if found[-1] < len(texts) else ""

    text = re.sub(re.escape(opening + _MARK) + r"(\d+)_", opened, rendered) if texts else rendered
    if found != list(range(len(texts))):
        raise TemplateError("it does not keep each text beside its calls")
    return text


def opening_of(calling: str, saying: str, name: str) -> str:
    """Return the markup before the name of a call: what follows the common beginning of two renderings, of a turn with
    a call and of one with text."""
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(calling, saying, strict=False)))
    return calling[common:].partition(name)[0]


# Markers of reasoning in the formats of all families, in pairs of start and end.
_REASONING: Final = tuple(
    dict.fromkeys(
        (start.strip(), end)
        for family in FAMILIES.values()
        if isinstance(family.grammar, MarkupGrammar) and family.grammar.think
        for start in family.grammar.think.starts
        for end in family.grammar.think.ends
    )
)
_REASONING_MARKERS: Final = tuple(dict.fromkeys(marker for pair in _REASONING for marker in pair))
# Texts of messages that markers of the template's own are searched for: those that the model has written.
_PLACES_OF_ANSWERS: Final = frozenset({"assistant", "reasoning_content", "arguments"})
_OWN_REASONING: Final = re.compile(
    r"\s*(?:" + "|".join(f"{re.escape(start)}.*?{re.escape(end)}" for start, end in _REASONING) + ")", re.DOTALL
)
_OPEN_REASONING: Final = re.compile(r"\s*(?:" + "|".join({re.escape(start) for start, _ in _REASONING}) + ")")

# A chat and its tools.
_Case = tuple[Messages, tuple[dict[str, Any], ...]]


class HiddenMarkers:
    """Quoted markers of the texts of a chat, and the marks that stand for them, which none of the texts holds."""

    def __init__(self, *texts: Any) -> None:
        self._texts = texts
        self._markers: list[str] = []

    @cached_property
    def _delimiter(self) -> str:
        text = json.dumps(self._texts, ensure_ascii=False)
        delimiter = next((each for each in _DELIMITERS if each not in text), "")
        if not delimiter:
            raise TemplateError("the messages hold every character that could stand for a marker in them")
        return delimiter

    def mark(self, marker: str) -> str:
        """Return the mark of a further marker."""
        self._markers.append(marker)
        return f"{self._delimiter}{len(self._markers) - 1}{self._delimiter}"

    def shown(self, rendered: str) -> str:
        """Replace the marks by the markers."""
        if not self._markers:
            return rendered
        return re.sub(f"{self._delimiter}([0-9]+){self._delimiter}", lambda mark: self._markers[int(mark[1])], rendered)


class QuotedMarkers:
    """Markers that a template must not see in the texts of messages, because it drops or refuses text there.

    `render` renders a chat with tools, and returns None if the template refuses it. A marker is tried when a text first
    contains it, in every place of such a text, so that a text is treated alike in all conversations. Reasoning with
    which an answer begins stays visible: whether it is rendered is for the template to decide.
    """

    def __init__(self, templates: Sequence[str], render: Callable[[Messages, Sequence[Any]], str | None]) -> None:
        self._templates = templates
        self._render = render
        self._dropping: dict[tuple[str, ...], bool] = {}
        # Whether the template renders each chat's text if it has no markers, by the place of the text.
        self._usable: dict[str, list[bool]] = {}

    def hidden(self, messages: Messages, tools: Sequence[Any], continues: bool) -> tuple[Messages, "HiddenMarkers"]:
        """Return the messages with marks in place of quoted markers, and these markers. `continues` means that the
        model continues the last message, which may be reasoning that is still open."""
        quoted = HiddenMarkers(messages, tools)
        last = len(messages) - 1
        shown: Messages = []
        for at, message in enumerate(messages):
            is_open = continues and at == last and _OPEN_REASONING.match(words(message.get("content")))
            shown.append(message if is_open else self._without(message, quoted))
        return shown, quoted

    def _without(self, message: Message, quoted: HiddenMarkers) -> Message:
        content, reasoning, calls = (message.get(key) for key in ("content", "reasoning_content", "tool_calls"))
        changed: Message = {}
        if content:
            changed["content"] = self._content(message["role"], content, quoted)
        if reasoning:
            changed["reasoning_content"] = self._text("reasoning_content", reasoning, quoted)
        if calls:
            changed["tool_calls"] = [
                _called(call, self._value(call["function"]["arguments"], quoted)) for call in calls
            ]
        return {**message, **changed}

    def _content(self, role: str, content: Any, quoted: HiddenMarkers) -> Any:
        own = _OWN_REASONING.match(words(content)) if role == "assistant" else None
        visible = own.end() if own else 0
        if isinstance(content, str):
            return content[:visible] + self._text(role, content[visible:], quoted)
        shown: list[Any] = []
        for part in content:
            if part["type"] == "text":
                text = part["text"]
                part = {**part, "text": text[:visible] + self._text(role, text[visible:], quoted)}
                visible = max(0, visible - len(text))
            shown.append(part)
        return shown

    def _value(self, value: Any, quoted: HiddenMarkers) -> Any:
        """Return a JSON value of a call's arguments with marks."""
        match value:
            case str():
                return self._text("arguments", value, quoted)
            case dict():
                members = cast("dict[str, Any]", value).items()
                return {self._text("arguments", key, quoted): self._value(member, quoted) for key, member in members}
            case list():
                return [self._value(member, quoted) for member in cast("list[Any]", value)]
            case _:
                return value

    def _text(self, place: str, text: str, quoted: HiddenMarkers) -> str:
        markers = self._markers if place in _PLACES_OF_ANSWERS else _REASONING_MARKERS
        present = [marker for marker in markers if marker in text]
        if not present:
            return text
        pairs = [pair for pair in _REASONING if all(marker in present for marker in pair)]
        units = [*((marker,) for marker in present), *pairs]
        dropping = {marker for unit in units if self._is_dropping(place, unit) for marker in unit}
        if not dropping:
            return text

        def stand_in(found: re.Match[str]) -> str:
            return quoted.mark(found[0])

        return re.sub("|".join(map(re.escape, sorted(dropping, key=len, reverse=True))), stand_in, text)

    @cached_property
    def _markers(self) -> tuple[str, ...]:
        """Texts that the template may look for: its literals, and the markers of reasoning."""
        literals = set(_REASONING_MARKERS)
        for template in self._templates:
            literals |= set(_literals(template))
        return tuple(sorted(each for each in literals if _is_marker(each)))

    def _is_dropping(self, place: str, markers: tuple[str, ...]) -> bool:
        """Return whether the template drops or refuses text around these markers, but not around marks."""
        key = (place, *markers)
        if key not in self._dropping:
            marks = list(map(HiddenMarkers().mark, markers))
            # The text of arguments is JSON, in which a marker must stand for itself.
            is_whole = place != "arguments" or all(
                json.dumps(each, ensure_ascii=False)[1:-1] == each for each in markers
            )
            self._dropping[key] = is_whole and self._drops(place, markers) and not self._drops(place, marks)
        return self._dropping[key]

    def _drops(self, place: str, markers: Sequence[str]) -> bool:
        """Return whether the template loses a word around or within the markers, in a chat where it needs not."""
        if place not in self._usable:
            plain = "words6 words7 words8"
            self._usable[place] = [self._keeps(case, plain.split()) for case in _cases(place, plain)]
        text = f"words6 {markers[0]} words7 {markers[-1]} words8"
        wanted = _WORDS.findall(text)
        return not all(self._keeps(case, wanted) for case in compress(_cases(place, text), self._usable[place]))

    def _keeps(self, case: _Case, wanted: Sequence[str]) -> bool:
        """Return whether the words are in the rendering, in this order."""
        text, at = self._render(*case) or "", 0
        for word in wanted:
            at = text.find(word, at) + len(word)
            if at < len(word):
                return False
        return True


def _literals(template: str) -> Iterator[str]:
    """Yield the strings in a template's code, also with an empty text in place of `{}`."""
    for token in Environment().lexer.tokenize(template):
        if token.type == "string":
            yield from (token.value, token.value.replace("{}", ""))


def _is_marker(literal: str) -> bool:
    return _MARKER_MIN <= len(literal.strip()) <= _MARKER_MAX and not _PLAIN.fullmatch(literal)


def _cases(place: str, text: str) -> Iterator[_Case]:
    """Yield chats with this text in one place of a message, each with and without a tool."""
    return product(_chats(place, text), ((), (TOOL,)))


def _chats(place: str, text: str) -> list[Messages]:
    """Return chats in which this text is in the last message or in an earlier one."""
    if place == "system":
        return [[{"role": place, "content": text}, QUESTION]]
    if place in ("user", "tool"):
        before = [QUESTION, ASKED] if place == "tool" else []
        chat = [*before, {**(ANSWERED if place == "tool" else QUESTION), "content": text}]
        return [chat, [*chat, SAID, QUESTION]]
    if place == "arguments":
        ways = [{"n": text}, {"n": {"m": [text]}}, {text: "v"}]
        [call] = ASKED["tool_calls"]
        turns = [{**ASKED, "tool_calls": [_called(call, arguments)]} for arguments in ways]
    else:
        said: Message = {"role": "assistant", "content": "z", "content" if place == "assistant" else place: text}
        thought = {"reasoning_content": "thought", **said}
        turns = [said, thought, {**ASKED, **said}, {**ASKED, **thought}]
    chats: list[Messages] = []
    for turn in turns:
        chat = [QUESTION, turn, ANSWERED] if turn.get("tool_calls") else [QUESTION, turn]
        chats += (chat, [*chat, *([SAID] if turn.get("tool_calls") else []), QUESTION])
    return chats


def _called(call: Message, arguments: Any) -> Message:
    return {**call, "function": {**call["function"], "arguments": arguments}}

"""Rendering of chat messages to prompt text with the model's own template.

Simplified tools for chat templates that support only plain schemas: one type per parameter, descriptions, no
references.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, Final, cast

from jinja2.exceptions import TemplateError
from msgspec import structs

from protocol.failures import Code
from protocol.to_worker import ChatPrompt
from worker.errors import RequestInvalid
from worker.output.parsers.schema import Schema, mapping, referred
from worker.prompt.chat_template import REFUSALS, RENDERING, ChatTemplate, thinking_variables
from worker.prompt.family import calling_family
from worker.prompt.rewrites import (
    ADAPTATIONS,
    CALL,
    CALL_IDS,
    CALL_SHAPES,
    CALLED_WORDS,
    CALLING,
    DROPPED_TURNS,
    LISTED_TOOL,
    NAMED_CALLS,
    NAMED_TOOL,
    OPENED_TURNS,
    PROBED_TURNS,
    QUESTION,
    REASONED,
    REFUSED_TURNS,
    RESULT,
    SHOWN_NEXT,
    SHOWN_RESULT,
    TOOL,
    USUAL_TOOL_FAMILY,
    WORD,
    Messages,
    Repair,
    alternating,
    arguments_as_json,
    as_parts,
    calls_in_content,
    calls_in_text,
    last_calls_answered,
    media,
    media_to_users,
    reasoning_in_blocks,
    reasoning_in_fields,
    reasoning_in_parts,
    results_in_order,
    tools_in_text,
    unchanged,
    with_ids,
    words,
)
from worker.prompt.template_placeholders import QuotedMarkers, marked, opening_of, with_words
from worker.vision.media import MediaMarkers

_MAX_DEPTH: Final = 12


def simple_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return simplified tools in OpenAI's format: keywords other than types, names and descriptions are dropped."""
    return [{"type": "function", "function": _function(mapping(tool.get("function")))} for tool in tools]


def _function(function: Schema) -> dict[str, Any]:
    parameters = mapping(function.get("parameters"))
    return {
        "name": function.get("name"),
        "description": function.get("description") or "",
        "parameters": _simple({**parameters, "type": "object"}, parameters, 0),
    }


def _simple(schema: Any, root: Schema, depth: int) -> dict[str, Any]:
    fields = _chosen(mapping(schema), root)
    kind = _kind(fields)
    simple: dict[str, Any] = {"type": kind, "description": str(fields.get("description") or "")}
    if isinstance(fields.get("enum"), list):
        simple["enum"] = fields["enum"]
    if depth >= _MAX_DEPTH:
        return simple
    if kind == "array":
        simple["items"] = _simple(fields.get("items"), root, depth + 1)
    if kind == "object":
        inner = mapping(fields.get("properties"))
        simple["properties"] = {name: _simple(each, root, depth + 1) for name, each in inner.items()}
        simple["required"] = [name for name in fields.get("required") or () if name in inner]
        simple["additionalProperties"] = {"type": "string", "description": ""}
    return simple


def _chosen(schema: Schema, root: Schema) -> Schema:
    """Resolve references, and choose the first alternative that is not null."""
    for _ in range(_MAX_DEPTH):
        ref = schema.get("$ref")
        options = next((schema[key] for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list)), None)
        if isinstance(ref, str):
            following = referred(ref, root)
        elif options:
            real = [mapping(option) for option in options if mapping(option).get("type") != "null"]
            following = real[0] if real else {}
        else:
            break
        schema = {**{key: schema[key] for key in ("description",) if key in schema}, **following}
    return schema


def _kind(fields: Schema) -> str:
    declared = fields.get("type")
    kinds = cast("list[Any]", declared) if isinstance(declared, list) else [declared]
    first = next((kind for kind in kinds if isinstance(kind, str) and kind != "null"), None)
    return first or ("object" if "properties" in fields else "array" if "items" in fields else "string")


# Reasoning effort with the least thinking, for families that cannot disable thinking completely.
_LEAST_EFFORT: Final = {"harmony": "low", "solar_open": "low"}
_NEAREST: Final = {"low": ("medium", "high", ""), "medium": ("high", "low", ""), "high": ("medium", "low", "")}


class Renderer:
    """Renderer of chats that sets only the variables of the request; the template sets the defaults of all others.

    If a template refuses the messages, they are rewritten and tried again, with the smallest change first
    (worker/prompt/rewrites.py).
    """

    def __init__(
        self, tokenizer: Any, markers: MediaMarkers | None = None, family: str = "", tool_family: str = ""
    ) -> None:
        """`markers` are the media markers of a model that takes media; without `markers`, no media are expected.

        `family` is the model's, if it is known. `tool_family` is the family whose parser reads the model's calls; by
        default the one that the template shows.
        """
        self._markers = markers
        self._least_effort = _LEAST_EFFORT.get(family, "")
        self._template = ChatTemplate(tokenizer)
        self._is_code = self._template.is_code
        is_readable = not self._is_code or tokenizer.chat_template is None
        self.has_template = bool(tokenizer.has_chat_template) and is_readable
        self.knows_tools = self._template.may_take_tools
        self._tool_family = tool_family or calling_family(self._template.templates)
        # Value of `tools` without tools. Most templates test it, but a few iterate over it unconditionally and need an
        # empty list.
        self._no_tools: list[Any] | None = None
        # Markup that opens a call, if text beside calls must be put before it.
        self._opening = ""
        # Rewrite that sends reasoning where the template reads it.
        self._place_reasoning: Callable[[Messages], Messages] = partial(reasoning_in_fields, names=("thinking",))
        # Rewrite of message contents. A few templates render contents only as lists, because their models take images.
        self._shape_contents: Callable[[Messages], Messages] = unchanged
        self._shape_contents = self._choose_contents()
        self._no_tools = [] if not self._is_code and not self._try([QUESTION]) else None
        self.knows_tools = self.knows_tools and self._renders_tools()
        self._write_calls = self._choose_calls()
        self._shape_calls = self._choose_shape()
        self._place_reasoning = self._choose_reasoning()
        self._open_calls: Repair = unchanged
        opens = (repair for repair, chat in OPENED_TURNS if self._drops(chat, repair))
        self._open_calls = next(opens, unchanged)
        self._dropped_repairs = [repair for repair, chat in DROPPED_TURNS if self._drops(chat, repair)]
        self._adaptations = tuple(adapt for adapt in ADAPTATIONS if not self._loses_system(adapt)) or ADAPTATIONS
        self._turn_repairs = self._choose_turn_repairs()
        self._quoted = QuotedMarkers(self._template.templates.texts, self._adapted)
        # Kinds of media that the template renders in a user's message.
        self.shown = frozenset(kind for kind in (markers.by_kind if markers else ()) if self._shows("user", kind))
        # Roles whose media the template does not render.
        self._hiding = frozenset(role for role in ("tool", "assistant", "system") if not self._shows(role))
        self._bridge = "" if self._takes_moved() else SHOWN_NEXT

    def render(self, prompt: ChatPrompt, *, opens_answer: bool = True) -> str:
        """Render the prompt's text, including special tokens. Raises `RequestInvalid`."""
        return self.place(prompt, opens_answer=opens_answer)[0]

    def place(self, prompt: ChatPrompt, *, opens_answer: bool = True) -> tuple[str, list[int]]:
        """Render the prompt's text, and return the indices of its media in the order of their markers.

        Every marker in the text belongs to a medium, because markers that clients type are broken up. Raises
        `RequestInvalid`.
        """
        if not self.has_template:
            raise RequestInvalid(
                Code.UNSUPPORTED, "this model has no chat template; use /v1/completions", param="messages"
            )
        if prompt.thinking is False and not prompt.effort:
            prompt = structs.replace(prompt, effort=self._least_effort)
        if self._markers is not None:
            prompt = structs.replace(
                prompt,
                messages=self._markers.broken(prompt.messages),
                tools=self._markers.broken(prompt.tools),
                template_kwargs=self._markers.broken(prompt.template_kwargs),
            )
        try:
            return RENDERING.run(lambda: self._render_with_effort(prompt, opens_answer and not prompt.continue_final))
        except REFUSALS as error:
            # Clients see why the template itself refused the messages, but not the errors of code that it runs.
            reason = f": {error}" if isinstance(error, TemplateError) else ""
            message = f"the model's chat template refused the messages{reason}"
            raise RequestInvalid(Code.TEMPLATE_ERROR, message, detail=repr(error), param="messages") from error

    def _render_with_effort(self, prompt: ChatPrompt, opens_answer: bool) -> tuple[str, list[int]]:
        """Render with the requested effort, or the nearest accepted one: many clients always send an effort."""
        try:
            return self._render_somehow(prompt, opens_answer)
        except REFUSALS:
            for effort in _NEAREST.get(prompt.effort, ()):
                nearest = structs.replace(prompt, effort=effort)
                if self._distinguishes(prompt, nearest):
                    with suppress(*REFUSALS):
                        return self._render_somehow(nearest, opens_answer)
            raise

    def _distinguishes(self, prompt: ChatPrompt, other: ChatPrompt) -> bool:
        """Return whether the template uses a variable in which the thinking options of the two prompts differ."""
        ours, theirs = thinking_variables(prompt), thinking_variables(other)
        changed = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
        return self._is_code or any(self._template.mentions(name) for name in changed)

    def _render_somehow(self, prompt: ChatPrompt, opens_answer: bool) -> tuple[str, list[int]]:
        """Render with the first rewrite that the template accepts. If there is none, raise the error for the least
        changed messages.
        """
        messages = results_in_order(with_ids(prompt.messages))
        if prompt.media:
            messages = media_to_users(messages, self._hiding, self._bridge)
        if not self.knows_tools and _mentions_tools(prompt):
            messages = self._write_calls(tools_in_text(messages, prompt.tools, self._tool_family))
        for repair in self._dropped_repairs:
            # Without a generation prompt, the last calls are complete in any template.
            messages = repair(messages) if opens_answer or repair is not last_calls_answered else messages
        first: Exception | None = None
        plain = simple_tools(prompt.tools)
        choices = (prompt.tools, plain) if plain != prompt.tools else (prompt.tools,)
        for shapes in self._shapes(messages, bool(prompt.tools)):
            for tools, shape in itertools.product(choices, shapes):
                # An empty turn that is to be continued may be left out of the shape.
                is_left_out = prompt.continue_final and shape[-1]["role"] != prompt.messages[-1]["role"]
                shown = structs.replace(prompt, tools=tools, continue_final=prompt.continue_final and not is_left_out)
                turns, quoted = self._quoted.hidden(shape, tools, shown.continue_final)
                try:
                    text = quoted.shown(self._render(turns, shown, opens_answer or is_left_out))
                    return text, self._order(prompt.messages, shape, text)
                except REFUSALS as error:
                    first = first or error
        assert first is not None, "there is always a shape to try"
        raise first

    def _shapes(self, messages: Messages, has_tools: bool) -> Iterator[list[Messages]]:
        """Yield the shapes to try with each repair of turns, the least change first.

        Duplicates are skipped, because rendering a long conversation is slow.
        """
        tried: list[Messages] = []
        for repair in self._turn_repairs:
            turns = self._with_calls(repair(messages), has_tools)
            shapes: list[Messages] = []
            shapes += (shape for adapt in self._adaptations if (shape := adapt(turns)) not in [*tried, *shapes])
            tried += shapes
            yield shapes

    def _with_calls(self, messages: Messages, has_tools: bool = True) -> Messages:
        """Return the messages with their calls in the form that the template renders."""
        if not self.knows_tools:
            return messages
        messages = self._shape_calls(messages)
        return self._write_calls(self._open_calls(messages) if has_tools else messages)

    def _order(self, given: Messages, shape: Messages, text: str) -> list[int]:
        """Return the indices of the media in the order of their markers in the text."""
        wanted, shown = _media(given), _media(shape)
        if self._markers is None or not wanted:
            return []
        if self._markers.kinds(text) != [part["type"] for part in shown] or len(shown) != len(wanted):
            raise TemplateError("it does not keep each image, video and audio clip in its place")
        return [part["media"] for part in shown]

    def probe(self) -> tuple[str, str]:
        """Render a chat of one message with and without the generation prompt; ("", "") if the template refuses it."""
        try:
            opened = self.render(ChatPrompt([QUESTION]))
            closed = self.render(ChatPrompt([QUESTION]), opens_answer=False)
        except RequestInvalid:
            return "", ""
        return (opened, closed) if opened.startswith(closed) else ("", "")

    def _try(
        self, messages: Messages, tools: Sequence[dict[str, Any]] = (), thinking: bool | None = None
    ) -> str | None:
        """Render exactly these messages with a generation prompt; None if the template refuses them."""
        with suppress(*REFUSALS):
            return self._render(messages, ChatPrompt(messages, list(tools), thinking=thinking), opens_answer=True)
        return None

    def _render(self, messages: Messages, prompt: ChatPrompt, opens_answer: bool) -> str:
        tools = prompt.tools or self._no_tools if self.knows_tools else self._no_tools
        has_tools = self.knows_tools and _mentions_tools(prompt)
        if self._is_code:
            return self._template.render(messages, tools, prompt, opens=opens_answer, has_tools=has_tools)
        messages, texts = marked(messages) if self._opening else (messages, [])
        messages = self._shape_contents(self._place_reasoning(messages))
        rendered = self._template.render(messages, tools, prompt, opens=opens_answer, has_tools=has_tools)
        return with_words(rendered, self._opening, texts)

    def _choose_contents(self) -> Callable[[Messages], Messages]:
        """Choose lists of parts for message contents if the template drops or refuses strings."""
        messages: Messages = [{"role": "user", "content": "word1"}]
        for shape in () if self._is_code else (unchanged, as_parts):
            if any("word1" in (self._try(shape(messages), tools) or "") for tools in ([], [TOOL])):
                return shape
        return unchanged

    def _shows(self, role: str, kind: str = "image") -> bool:
        """Return whether the template renders a medium in a message of this role exactly once."""
        if self._markers is None or kind not in self._markers.by_kind:
            return False
        shown = {"role": role, "content": [{"type": "text", "text": "word1"}, {"type": kind, "media": 0}]}
        turns: dict[str, Messages] = {
            "user": [shown],
            "tool": self._write_calls(SHOWN_RESULT),
            "assistant": [QUESTION, shown, QUESTION],
            "system": [shown, QUESTION],
        }
        return self._markers.kinds(self._try(turns[role], [TOOL] if role == "tool" else []) or "") == [kind]

    def _takes_moved(self) -> bool:
        """Return whether media of a result can move to a user message directly after it."""
        if self._markers is None:
            return True
        text = self._try(self._write_calls(media_to_users(SHOWN_RESULT, self._hiding)), [TOOL]) or ""
        return self._markers.kinds(text) == ["image"]

    def _choose_calls(self) -> Callable[[Messages], Messages]:
        """Choose a rewrite of earlier calls with which the template renders their names and arguments, as JSON or in
        the model's notation, and their results."""
        if self._is_code:
            return unchanged
        in_content, in_text = (partial(way, family=self._tool_family) for way in (calls_in_content, calls_in_text))
        if not self.knows_tools:
            # A template without tools takes results only if it knows their role and belongs to a model with calls.
            takes_results = self._tool_family != USUAL_TOOL_FAMILY and self._knows_role("tool")
            way = in_content if takes_results and self._is_written_well(in_content) else in_text
            return lambda messages: alternating(way(messages))
        for way in (unchanged, arguments_as_json, in_content, in_text):
            ways = [partial(_chained, (ids, way)) for ids in CALL_IDS]
            named = [each for each in ways if self._is_written_well(each)]
            if named:
                return next((each for each in named if self._shows_same_ids(each)), named[0])
        return unchanged

    def _is_written_well(self, way: Callable[[Messages], Messages]) -> bool:
        text = self._try(way(NAMED_CALLS[:3]), [TOOL]) or ""
        is_lost = any(word not in text for word in ("probed_name", "quoted", "word1", "words2"))
        is_python, is_quoted_twice = "'quoted'" in text, '\\"quoted' in text
        return not (is_lost or is_python or is_quoted_twice)

    def _shows_same_ids(self, way: Callable[[Messages], Messages]) -> bool:
        """Return whether the ids that the template renders beside results are those of their calls."""
        messages = way(NAMED_CALLS)
        text = self._try(messages, [TOOL])
        ids = [call["id"] for message in messages for call in message.get("tool_calls") or ()]
        shown = [(text or "").count(call_id) for call_id in ids]
        return text is not None and (
            not any(shown) or all(n >= 2 * ids.count(i) for n, i in zip(shown, ids, strict=True))
        )

    def _knows_role(self, role: str) -> bool:
        """Return whether the template renders a message of this role otherwise than one of an unknown role."""
        known, unknown = (self._try([QUESTION, {"role": each, "content": "words1"}]) or "" for each in (role, "words2"))
        return "words1" in known and known != unknown.replace("words2", role)

    def _choose_reasoning(self) -> Callable[[Messages], Messages]:
        """Choose where to send reasoning so that the template renders it: in fields, parts or blocks."""
        names = [name for name in ("reasoning", "thought", "thoughts") if self._template.mentions(name)]
        usual, all_fields = self._place_reasoning, partial(reasoning_in_fields, names=("thinking", *names))
        for self._place_reasoning in (usual, all_fields, reasoning_in_parts, reasoning_in_blocks):
            for thinking in (None, True):
                if all(self._shows_reasoning(chat, thinking) for chat in REASONED):
                    return self._place_reasoning
        # Some templates read a field only if a variable of the request says so.
        return all_fields

    def _shows_reasoning(self, chat: Messages, thinking: bool | None) -> bool:
        messages = self._write_calls(self._shape_calls(chat))
        text = self._try(messages, [TOOL], thinking) or ""
        # In quotes, the reasoning is in a list that was rendered as data.
        is_data = re.search("[\"']words6[\"']", text)
        return not is_data and text.count("words6") == 1 and all(word in text for word in WORD.findall(repr(chat)))

    def _choose_shape(self) -> Callable[[Messages], Messages]:
        """Choose a rewrite of turns with several calls that the template neither refuses nor drops in part."""
        if self._is_code or not self.knows_tools:
            return CALL_SHAPES[0]
        ways = (("", CALLED_WORDS), (self._find_opening(), CALLED_WORDS), ("", CALLED_WORDS[:2]))
        for opening, wanted in dict.fromkeys(ways):
            self._opening = opening
            for shape in CALL_SHAPES:
                if self._holds(shape, wanted):
                    return shape
        return CALL_SHAPES[0]

    def _find_opening(self) -> str:
        """Return the markup before a call's name; "" if the template refuses a turn with a call or with text."""
        calling, saying = (
            self._try([QUESTION, turn], [TOOL]) or ""
            for turn in (self._write_calls([CALLING])[0], {"role": "assistant", "content": "words1"})
        )
        return opening_of(calling, saying, "probe")

    def _holds(self, shape: Callable[[Messages], Messages], wanted: tuple[str, ...]) -> bool:
        """Return whether the template renders the `wanted` words of two calls and of the text beside them, at the end
        of a chat and before a later answer, with and without reasoning."""
        return all(self._holds_beside(shape, wanted, fields) for fields in ({"reasoning_content": "thought"}, {}))

    def _holds_beside(
        self, shape: Callable[[Messages], Messages], wanted: tuple[str, ...], fields: dict[str, str]
    ) -> bool:
        calls = [
            {**CALL, "id": f"call0000{n}", "function": {"name": "probe", "arguments": {"n": f"word{n}"}}}
            for n in (1, 2)
        ]
        messages: Messages = [
            QUESTION,
            {"role": "assistant", "content": "said", "tool_calls": calls, **fields},
            *({**RESULT, "tool_call_id": call["id"]} for call in calls),
        ]
        answered: Messages = [*messages, {"role": "assistant", "content": "z"}, QUESTION]
        text = self._try(self._write_calls(shape(messages)), [TOOL]) or ""
        # Earlier turns may lose their reasoning and the text beside it, but the template must not refuse them.
        is_taken = self._try(self._write_calls(shape(answered)), [TOOL]) is not None
        return is_taken and all(word in text for word in wanted)

    def _drops(self, chat: Messages, repair: Repair) -> bool:
        """Return whether the template silently drops a word of the chat, but none with the repair."""
        if self._is_code or not self.knows_tools:
            return False
        return self._keeps(chat, (unchanged,)) is False and self._keeps(repair(chat), (unchanged,)) is True

    def _choose_turn_repairs(self) -> tuple[Repair, ...]:
        """Choose repairs with which the template drops no turn in silence; the first does not change the messages."""
        if self._is_code or not self.knows_tools:
            return REFUSED_TURNS

        @cache  # Most repairs leave most of the chats as they are.
        def drops(chat: str) -> bool:
            return self._keeps(json.loads(chat), self._adaptations) is False

        kept = [repair for repair in REFUSED_TURNS if not any(drops(json.dumps(repair(chat))) for chat in PROBED_TURNS)]
        return tuple(kept) or REFUSED_TURNS

    def _keeps(self, chat: Messages, adaptations: Sequence[Callable[[Messages], Messages]]) -> bool | None:
        """Return whether the template renders the tool and all words of a chat, with the first adaptation that it
        takes; None if it takes none."""
        text = self._adapted(chat, [NAMED_TOOL], adaptations)
        return None if text is None else all(word in text for word in WORD.findall(repr([chat, NAMED_TOOL])))

    def _adapted(self, chat: Messages, tools: Sequence[Any], adaptations: Sequence[Repair] = ()) -> str | None:
        """Render a chat with the first adaptation that the template takes; None if it takes none."""
        turns = self._with_calls(chat)
        texts = (self._try(adapt(turns), tools) for adapt in adaptations or self._adaptations)
        return next((text for text in texts if text is not None), None)

    def _renders_tools(self) -> bool:
        """Return whether the template renders tools, at least after some rewrite of the messages. Other templates
        refuse or ignore tools.
        """
        if self._is_code:
            return True
        messages: Messages = [{"role": "system", "content": "w"}, QUESTION]
        for tools in ([LISTED_TOOL], simple_tools([LISTED_TOOL])):
            for adapt in ADAPTATIONS:
                if (text := self._try(adapt(messages), tools)) is not None:
                    return "probe" in text or "listed" in text
        return False

    def _loses_system(self, adapt: Callable[[Messages], Messages]) -> bool:
        """Return whether, with this rewrite, the template silently drops a system message: one within a chat, or one
        before calls."""
        system = {"role": "system", "content": "words1"}
        later = [{"role": "system", "content": "words2"}, {"role": "user", "content": "y"}]
        turns: list[Messages] = [[QUESTION, *later], [system, QUESTION, *later]]
        if self.knows_tools:
            turns.append([system, QUESTION, *self._write_calls([CALLING, RESULT])])
        return not self._is_code and any(self._loses_word(adapt(messages)) for messages in turns)

    def _loses_word(self, messages: Messages) -> bool:
        wanted = {words(message["content"]) for message in messages if "words" in words(message["content"])}
        text = self._try(messages, [TOOL] if messages[-1]["role"] == "tool" else [])
        return text is not None and any(word not in text for word in wanted)


def _media(messages: Messages) -> list[dict[str, Any]]:
    return [part for message in messages for part in media(message.get("content"))]


def _mentions_tools(prompt: ChatPrompt) -> bool:
    return bool(prompt.tools) or any(
        message["role"] == "tool" or message.get("tool_calls") for message in prompt.messages
    )


def _chained(rewrites: Sequence[Callable[[Messages], Messages]], messages: Messages) -> Messages:
    for rewrite in rewrites:
        messages = rewrite(messages)
    return messages

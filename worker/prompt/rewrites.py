"""Rewrites of chat messages for templates: pure functions from messages to messages.

Messages are in OpenAI's format: their content is a string, or a list if there are media, and tool arguments are
objects.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Final

from worker.prompt.contents import joined, media, parts, words, wrapped
from worker.structured.tool_grammar.call_text import WrittenCall, call_text
from worker.structured.tool_grammar.formats import SINGLE

Message = dict[str, Any]
Messages = list[Message]

# Family of models that show no notation of their own: most have seen that of Hermes
# (NousResearch/Hermes-Function-Calling).
USUAL_TOOL_FAMILY: Final = "hermes"
# Prompt for models whose template renders no tools, and the notation of calls in it.
TOOLS_PROMPT: Final = """\
You may call functions to help with the user's request. The functions, as JSON, one a line:
<tools>
{tools}
</tools>
{notation}"""
_USUAL_NOTATION: Final = """\
For each call, answer with a JSON object within <tool_call></tool_call> tags, and nothing after the last one:
<tool_call>
{"name": <function-name>, "arguments": <arguments-object>}
</tool_call>"""
_OWN_NOTATION: Final = "To call functions, write calls as in this example, and nothing after the last one:\n"
_EXAMPLES: Final = (
    WrittenCall("function_name", {"argument_name": "value"}, 0, "a1b2c3d4e5"),
    WrittenCall("other_function_name", {"argument_name": "value"}, 1, "f6g7h8i9j0"),
)

# Text of a result that consists of media only, and of an answer between a result and its media.
SHOWN_NEXT: Final = "(shown in the next message)"


def unchanged(messages: Messages) -> Messages:
    """Return the messages unchanged, for most templates."""
    return messages


def arguments_as_json(messages: Messages) -> Messages:
    """Convert arguments to JSON text, for templates that concatenate a call's arguments with other text."""
    return [
        {**message, "tool_calls": [_stringify(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def calls_in_content(messages: Messages, family: str) -> Messages:
    """Write calls into the content, in the family's notation, for templates that render results but no calls."""
    written: Messages = []
    number = 0
    for message in messages:
        calls = message.get("tool_calls") or ()
        if calls:
            content, text = (
                message.get("content"),
                call_text(family, [_written(call, number + at) for at, call in enumerate(calls)]),
            )
            message = {key: value for key, value in message.items() if key != "tool_calls"}
            message["content"] = joined([content, text], "\n") if content else text
        number += len(calls)
        written.append(message)
    return written


def calls_in_text(messages: Messages, family: str) -> Messages:
    """Write calls into the content, and results as messages of the user, for templates that render neither."""
    return [_result_in_text(message) for message in calls_in_content(messages, family)]


def numbered_ids(messages: Messages) -> Messages:
    """Make ids of the names of calls and their numbers in the conversation, as Kimi K2 writes them, for templates that
    render the id in place of the name."""
    return _numbered(messages, is_by_turn=False)


def numbered_ids_of_turns(messages: Messages) -> Messages:
    """The same with the number of a call in its turn, for templates that write such an id without the call's own."""
    return _numbered(messages, is_by_turn=True)


def _numbered(messages: Messages, *, is_by_turn: bool) -> Messages:
    numbered: Messages = []
    ids: dict[str, str] = {}
    number = 0
    for message in messages:
        if message.get("tool_calls"):
            number = 0 if is_by_turn else number
            calls: Messages = []
            for call in message["tool_calls"]:
                call_id = f"functions.{call['function']['name']}:{number}"
                ids[call.get("id") or ""] = call_id
                calls.append({**call, "id": call_id})
                number += 1
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            call_id = message.get("tool_call_id") or ""
            message = {**message, "tool_call_id": ids.get(call_id, call_id)}
        numbered.append(message)
    return numbered


def with_ids(messages: Messages) -> Messages:
    """Give ids to calls without an id or with that of another call of their turn, and to their results, which are in
    the order of the calls."""
    given: Messages = []
    # Ids of the calls that have no result yet, as they were sent and as they are now.
    waiting: list[tuple[str, str]] = []
    sent_ids = {call.get("id") for message in messages for call in message.get("tool_calls") or ()}
    # In the form of Mistral's ids, which its templates demand.
    free = (call_id for number in count() if (call_id := f"call{number:05}") not in sent_ids)
    for message in messages:
        if message.get("tool_calls"):
            waiting, calls = [], list[Message]()
            for call in message["tool_calls"]:
                sent = call.get("id") or ""
                is_own = sent and all(sent != other for other, _ in waiting)
                waiting.append((sent, sent if is_own else next(free)))
                calls.append({**call, "id": waiting[-1][1]})
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            sent = message.get("tool_call_id") or ""
            call = next((call for call in waiting if call[0] == sent), waiting[0] if waiting and not sent else None)
            if call is not None:
                waiting.remove(call)
                message = {**message, "tool_call_id": call[1]}
        given.append(message)
    return given


def reasoning_in_fields(messages: Messages, names: Sequence[str]) -> Messages:
    """Send reasoning under further names, for templates that read these."""
    return [
        {**message, **dict.fromkeys(names, message["reasoning_content"])}
        if message.get("reasoning_content")
        else message
        for message in messages
    ]


def reasoning_in_parts(messages: Messages) -> Messages:
    """Send reasoning as a part of the content, for templates such as Mistral's."""
    return [
        {**message, "content": [_thinking_part(message), *parts(message.get("content"))]}
        if message.get("reasoning_content")
        else message
        for message in messages
    ]


def reasoning_in_blocks(messages: Messages) -> Messages:
    """Send answers as blocks of thoughts and text, if any has reasoning, for Apertus' template."""
    if not any(message.get("reasoning_content") for message in messages):
        return messages
    return [
        {**message, "content": {"blocks": _blocks(message)}}
        if message["role"] == "assistant" and not isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _thinking_part(message: Message) -> Message:
    return {"type": "thinking", "thinking": message["reasoning_content"]}


def _blocks(message: Message) -> Messages:
    thought, text = message.get("reasoning_content"), message.get("content") or ""
    thoughts = [{"type": "thoughts", "text": thought}] if thought else []
    return [*thoughts, *([{"type": "response", "text": text}] if text or not thoughts else [])]


def one_call_each(messages: Messages) -> Messages:
    """Split messages into messages of one call, each followed by its result, for templates that allow one call per
    message."""
    split: Messages = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            split.append(message)
            continue
        results: Messages = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for index, call in enumerate(calls):
            kept = message if not index else {"role": message["role"], "content": ""}
            split.append({**kept, "tool_calls": [call]})
            answer = next((result for result in results if result.get("tool_call_id") == call.get("id")), None)
            if answer is not None:
                results.remove(answer)
                split.append(answer)
        split += results
    return split


def words_in_reasoning(messages: Messages) -> Messages:
    """Move content into the reasoning, for templates that render only one of them beside calls, such as Harmony's."""
    return [
        {**message, "content": "", "reasoning_content": f"{message['reasoning_content']}\n\n{message['content']}"}
        if message.get("tool_calls") and _is_text(message.get("content")) and message.get("reasoning_content")
        else message
        for message in messages
    ]


def words_as_reasoning(messages: Messages) -> Messages:
    """Move content into the reasoning, also where there is none yet, for templates that render only reasoning beside
    calls."""
    return [
        {**message, "content": "", "reasoning_content": message["content"]}
        if message.get("tool_calls") and _is_text(message.get("content"))
        else message
        for message in words_in_reasoning(messages)
    ]


def words_apart(messages: Messages) -> Messages:
    """Move content into a message before its calls, for templates that drop content beside calls."""
    split: Messages = []
    for message in messages:
        if message.get("tool_calls") and message.get("content"):
            split.append({key: value for key, value in message.items() if key != "tool_calls"})
            message = {"role": message["role"], "content": "", "tool_calls": message["tool_calls"]}
        split.append(message)
    return split


def nine_character_ids(messages: Messages) -> Messages:
    """Shorten call ids to Mistral's nine letters and digits; equal ids stay equal."""

    def short(call_id: str) -> str:
        return hashlib.blake2b(call_id.encode(), digest_size=16).hexdigest()[:9]

    def shortened(message: Message) -> Message:
        if message.get("tool_call_id"):
            message = {**message, "tool_call_id": short(message["tool_call_id"])}
        if message.get("tool_calls"):
            calls = [{**call, "id": short(call.get("id") or "")} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        return message

    return [shortened(message) for message in messages]


def one_system(messages: Messages) -> Messages:
    """Merge leading system messages and turn later ones into user messages, for templates that allow one at the
    start.
    """
    lead = 0
    while lead < len(messages) and messages[lead]["role"] == "system":
        lead += 1
    heads = joined(message.get("content") for message in messages[:lead])
    head = [{"role": "system", "content": heads}] if lead else []
    return head + [
        {**message, "role": "user"} if message["role"] == "system" else message for message in messages[lead:]
    ]


def alternating(messages: Messages) -> Messages:
    """Merge adjacent messages of one role, for templates that require user and assistant to alternate."""
    merged: Messages = []
    for message in one_system(messages):
        is_plain = message["role"] in ("user", "assistant") and not message.get("tool_calls")
        if is_plain and merged and merged[-1]["role"] == message["role"] and not merged[-1].get("tool_calls"):
            merged[-1] = {**merged[-1], "content": joined((merged[-1].get("content"), message.get("content")))}
        else:
            merged.append(message)
    return merged


def without_system(messages: Messages) -> Messages:
    """Merge the system message into the first user message, for templates without a system role."""
    merged = one_system(messages)
    if not merged or merged[0]["role"] != "system":
        return alternating(merged)
    return alternating([{**merged[0], "role": "user"}, *merged[1:]])


def as_parts(messages: Messages) -> Messages:
    """Convert contents to lists, for templates that render no other contents."""
    return [{**message, "content": parts(message.get("content"))} for message in messages]


def media_to_users(messages: Messages, roles: frozenset[str], bridge: str = "") -> Messages:
    """Move media of these roles to a user message after them, for templates that drop or refuse media there.

    Consecutive tool results stay together, and their media follow the last of them. `bridge` is an assistant message in
    between, for templates that require one before the next user message.
    """
    moved: Messages = []
    waiting: list[Message] = []
    for message in [*messages, None]:
        if waiting and (message is None or message["role"] != "tool"):
            if bridge and moved[-1]["role"] == "tool":
                moved.append({"role": "assistant", "content": bridge})
            moved.append({"role": "user", "content": waiting})
            waiting = []
        if message is None:
            break
        pictures = media(message.get("content")) if message["role"] in roles else []
        if pictures:
            message = {**message, "content": words(message.get("content")) or SHOWN_NEXT}
            waiting = [*waiting, *pictures]
        moved.append(message)
    return moved


CALL_SHAPES: Final[tuple[Callable[[Messages], Messages], ...]] = (
    unchanged,
    one_call_each,
    words_in_reasoning,
    lambda messages: one_call_each(words_in_reasoning(messages)),
    words_as_reasoning,
    lambda messages: one_call_each(words_as_reasoning(messages)),
    words_apart,
    lambda messages: one_call_each(words_apart(messages)),
)
"""In the order in which they are tried, for turns with more than one call, or with text next to them."""

ADAPTATIONS: Final[tuple[Callable[[Messages], Messages], ...]] = (
    unchanged,
    one_system,
    alternating,
    without_system,
    nine_character_ids,
    lambda messages: nine_character_ids(alternating(messages)),
    lambda messages: nine_character_ids(without_system(messages)),
)
"""In the order in which they are tried, the least change first."""


CALL_IDS: Final[tuple[Callable[[Messages], Messages], ...]] = (unchanged, numbered_ids, numbered_ids_of_turns)
"""In the order in which they are tried, for templates that render ids in place of names."""


def tools_in_text(messages: Messages, tools: Sequence[dict[str, Any]], family: str) -> Messages:
    """Write tools in the system message, and how the family writes calls, for templates that render no tools."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    if family == USUAL_TOOL_FAMILY:
        notation = _USUAL_NOTATION
    else:
        notation = _OWN_NOTATION + call_text(family, _EXAMPLES[: 1 if family in SINGLE else 2])
    text = TOOLS_PROMPT.format(tools=lines, notation=notation)
    prompt = [{"role": "system", "content": text}] if tools else []
    lead = 1 if messages and messages[0]["role"] == "system" else 0
    return one_system([*messages[:lead], *prompt, *messages[lead:]])


def _result_in_text(message: Message) -> Message:
    if message["role"] != "tool":
        return message
    return {"role": "user", "content": wrapped("<tool_response>\n", message.get("content"), "\n</tool_response>")}


def _is_text(content: Any) -> bool:
    return isinstance(content, str) and bool(content)


def _written(call: Message, number: int) -> WrittenCall:
    function = call["function"]
    return WrittenCall(function["name"], function["arguments"], number, call.get("id") or "")


def _stringify(call: Message) -> Message:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}

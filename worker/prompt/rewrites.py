"""Rewrites of chat messages for templates: pure functions from messages to messages.

Messages are in OpenAI's format: their content is a string, or a list if there are media, and tool arguments are
objects.

Contents of messages: text, or a list of text and media in order.

Chats with which a chat template is probed at load, to choose the rewrites that it needs.

Repairs of conversations whose turns a template refuses or drops: pure functions from messages to messages.

Clients interrupt calls, trim histories and put text behind results. Each repair changes only the turns that need it and
works from left to right, so that a longer conversation keeps its rendered beginning.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, Final

from worker.structured.tool_grammar.call_text import WrittenCall, call_text
from worker.structured.tool_grammar.formats import SINGLE

Part = dict[str, Any]
Content = str | list[Part] | None


def words(content: Content) -> str:
    """Return the text of a content, without its media."""
    if isinstance(content, list):
        return "".join(str(part["text"]) for part in content if part["type"] == "text")
    return content or ""


def media(content: Content) -> list[Part]:
    """Return the parts of a content that are not text."""
    return [part for part in content if part["type"] != "text"] if isinstance(content, list) else []


def parts(content: Content) -> list[Part]:
    """Return a content as a list of parts; empty text gives an empty list."""
    return content if isinstance(content, list) else _text(content or "")


def joined(contents: Iterable[Content], between: str = "\n\n") -> Content:
    """Join contents. The result is text if all are text, otherwise a list in which adjacent texts are merged."""
    contents = list(contents)
    if not any(isinstance(content, list) for content in contents):
        return between.join(words(content) for content in contents)
    result: list[Part] = []
    for index, content in enumerate(contents):
        for part in [*(_text(between) if index else []), *parts(content)]:
            if part["type"] == "text" and result and result[-1]["type"] == "text":
                result[-1] = {"type": "text", "text": result[-1]["text"] + part["text"]}
            else:
                result.append(part)
    return result


def wrapped(before: str, content: Content, after: str) -> Content:
    """Return the content between two texts."""
    return joined((before, content, after), "")


def _text(text: str) -> list[Part]:
    return [{"type": "text", "text": text}] if text else []


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


def _tool(properties: dict[str, Any], name: str = "probe") -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


TOOL: Final = _tool({})
LISTED_TOOL: Final = _tool({"listed": {"type": "string", "description": ""}})
NAMED_TOOL: Final = _tool({}, "words0")
CALL: Final[dict[str, Any]] = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "probe", "arguments": {"quoted": "word"}},
}

QUESTION: Final[dict[str, Any]] = {"role": "user", "content": "x"}
CALLING: Final[dict[str, Any]] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT: Final[dict[str, Any]] = {"role": "tool", "tool_call_id": "call00000", "name": "probe", "content": "y"}
WORD: Final = re.compile(r"words\d")
# Words of a probed turn with calls: the arguments of two calls, and the text beside them.
CALLED_WORDS: Final = ("word1", "word2", "said")
SHOWN_RESULT: Final[Messages] = [
    QUESTION,
    CALLING,
    {**RESULT, "content": [{"type": "text", "text": "word1"}, {"type": "image", "media": 0}]},
]

# Turns whose words show whether the template renders the turn: a call, its result, an answer and a question.
ASKED: Final[Message] = {
    **CALLING,
    "tool_calls": [{**CALL, "function": {"name": "probe", "arguments": {"n": "words1"}}}],
}
ANSWERED: Final[Message] = {**RESULT, "content": "words2"}
SAID: Final[Message] = {"role": "assistant", "content": "words4"}
ASKED_NEXT: Final[Message] = {"role": "user", "content": "words5"}

# A chat whose calls have names and ids that only they show.
NAMED_CALLS: Final[Messages] = [
    message
    for number in (1, 2)
    for message in (
        {**QUESTION},
        {
            **CALLING,
            "tool_calls": [
                {
                    **CALL,
                    "id": f"call0000{number}",
                    "function": {"name": "probed_name", "arguments": {"quoted": f"word{number}"}},
                }
            ],
        },
        {**ANSWERED, "tool_call_id": f"call0000{number}", "name": "probed_name"},
        SAID,
    )
]
REASONED: Final[tuple[Messages, ...]] = tuple(
    [QUESTION, {**ASKED, "content": content, "reasoning_content": "words6"}, ANSWERED] for content in ("", "words3")
)

PROBED_TURNS: Final[tuple[Messages, ...]] = (
    [QUESTION, ASKED, ANSWERED, ASKED_NEXT],
    [QUESTION, ASKED, ASKED_NEXT],
    [QUESTION, ASKED, ASKED_NEXT, ANSWERED, QUESTION],
    [QUESTION, ASKED, SAID, ANSWERED, ASKED_NEXT],
    [QUESTION, ANSWERED, ASKED_NEXT],
    [QUESTION, ASKED, ANSWERED, {**RESULT, "tool_call_id": "call00001", "content": "words3"}, ASKED_NEXT],
    [SAID, ASKED_NEXT],
)
"""Chats with turns that templates refuse or drop. A repair is not used if the template then drops a word of one."""


# Texts of turns that no client has sent: a user's before the first turn of the assistant, the assistant's between a
# result or an unanswered call and the next turn of the user, and the result of an unanswered call.
START: Final = "(start of the conversation)"
UNDERSTOOD: Final = "Understood."
INTERRUPTED: Final = "(interrupted)"
NO_RESULT: Final = "(no result)"
# Name of the tool of a made-up call, if its result has none.
_UNKNOWN_TOOL: Final = "unknown"

_STARTED: Final[Message] = {"role": "user", "content": START}

Repair = Callable[[Messages], Messages]


def results_in_order(messages: Messages) -> Messages:
    """Put the results of several calls in the order of the calls, with a result for a call that has none before another
    one's: templates that write no ids show by the order alone which result is which call's.
    """
    ordered: Messages = []
    results: Messages = []
    calls: dict[str, Message] = {}
    for message in [*messages, None]:
        if message is not None and message["role"] == "tool":
            results.append(message)
            continue
        ordered += _in_order(results, calls)
        if message is not None:
            ordered.append(message)
            results = []
            calls = {call.get("id") or "": call for call in message.get("tool_calls") or ()}
    return ordered


def _in_order(results: Messages, calls: Mapping[str, Message]) -> Messages:
    given = {result.get("tool_call_id") or "": result for result in results}
    if len(calls) < 2 or len(given) < len(results) or not given or not given.keys() <= calls.keys():
        return results
    ids = list(calls)
    answered = ids[: 1 + max(map(ids.index, given))]
    return [given.get(call_id) or _no_result(calls[call_id]) for call_id in answered]


def words_apart_before_answers(messages: Messages) -> Messages:
    """Move content into a message before its calls, but not after the last answer, for templates that drop what stands
    beside the calls of earlier turns, such as Harmony's."""
    last = max((at for at, message in enumerate(messages) if _is_answer(message)), default=0)
    return [*words_apart(messages[:last]), *messages[last:]]


def results_after_calls(messages: Messages) -> Messages:
    """Put a call before results that are neither after a call nor after another result."""
    return _with_calls(messages, is_own=False)


def results_after_own_calls(messages: Messages) -> Messages:
    """Put a call before each result that is not among the results of its own call's message."""
    return _with_calls(messages, is_own=True)


def calls_answered(messages: Messages) -> Messages:
    """Add a result for each call that has none, before the next turn."""
    answered: Messages = []
    waiting: Messages = []
    for message in messages:
        if message["role"] == "tool":
            waiting = [call for call in waiting if call.get("id") != message.get("tool_call_id")]
        else:
            answered += map(_no_result, waiting)
            waiting = list(message.get("tool_calls") or ())
        answered.append(message)
    return [*answered, *map(_no_result, waiting)]


def last_calls_answered(messages: Messages) -> Messages:
    """Add results for the calls of the last message, for templates that drop calls at the end of a conversation."""
    return [*messages[:-1], *calls_answered(messages[-1:])]


def opened_before_calls(messages: Messages) -> Messages:
    """Put a user's turn before calls that begin a conversation, for templates that take the first message for a user's
    and put the tools there, such as Llama's."""
    # A second system message would itself be taken for the user's.
    lead = min(_lead(messages), 1)
    is_call = len(messages) > lead and messages[lead].get("tool_calls")
    return [*messages[:lead], _STARTED, *messages[lead:]] if is_call else messages


def opened_before_calls_alone(messages: Messages) -> Messages:
    """Begin a conversation of calls and results alone with the user, for templates that show the tools beside the
    last message of a user, such as Mistral's."""
    turns = messages[_lead(messages) :]
    is_alone = turns != [] and all(turn["role"] == "tool" or turn.get("tool_calls") for turn in turns)
    return _opened(one_system(messages)) if is_alone else messages


def taking_turns(messages: Messages) -> Messages:
    """Let user and assistant alternate, calls and results aside.

    Empty turns are left out, a turn of the assistant joins the calls after it, and a short turn stands where none can
    join.
    """
    turns: Messages = []
    # Index of the last turn that is neither a call nor a result.
    said = -1
    for message in alternating([message for message in messages if not _is_empty(message)]):
        if message["role"] in ("user", "assistant") and not message.get("tool_calls"):
            if said >= 0 and turns[said]["role"] == message["role"]:
                if message["role"] == "user":
                    turns.append({"role": "assistant", "content": _bridge(turns[-1], message)})
                elif turns[said + 1].get("tool_calls"):
                    earlier = turns.pop(said)
                    both = [part for part in (earlier["content"], turns[said].get("content")) if part]
                    turns[said] = {**turns[said], "content": joined(both)}
            said = len(turns)
        turns.append(message)
    return _opened(turns)


DROPPED_TURNS: Final[tuple[tuple[Repair, Messages], ...]] = (
    (
        words_apart_before_answers,
        [QUESTION, {**ASKED, "content": "words3"}, ANSWERED, SAID, ASKED_NEXT],
    ),
    (last_calls_answered, [QUESTION, ASKED]),
)
"""Repairs of turns that a few templates drop without an error, each with a chat whose words show whether they do."""

OPENED_TURNS: Final[tuple[tuple[Repair, Messages], ...]] = (
    (opened_before_calls, [ASKED, ANSWERED, ASKED_NEXT]),
    (opened_before_calls_alone, [ASKED, ANSWERED]),
)
"""The same for turns that are dropped, or drop the tools, where tools are given and no user has begun."""

REFUSED_TURNS: Final[tuple[Repair, ...]] = (
    unchanged,
    results_after_calls,
    results_after_own_calls,
    taking_turns,
    lambda messages: taking_turns(without_system(messages)),
    lambda messages: taking_turns(calls_answered(results_after_own_calls(messages))),
    lambda messages: taking_turns(without_system(calls_answered(results_after_own_calls(messages)))),
)
"""In the order in which they are tried if a template refuses the messages, the least change first."""


def _with_calls(messages: Messages, *, is_own: bool) -> Messages:
    repaired: Messages = []
    known: dict[str, Message] = {}
    asked: set[str] = set()
    for message in messages:
        if message["role"] == "tool":
            call_id = message.get("tool_call_id") or "call_0"
            follows = bool(repaired) and (repaired[-1]["role"] == "tool" or bool(repaired[-1].get("tool_calls")))
            if not follows or (is_own and call_id not in asked):
                function = {"name": message.get("name") or _UNKNOWN_TOOL, "arguments": {}}
                call = known.get(call_id) or {"id": call_id, "type": "function", "function": function}
                repaired.append({"role": "assistant", "content": "", "tool_calls": [call]})
                asked = {call_id}
        else:
            calls = {call.get("id") or "": call for call in message.get("tool_calls") or ()}
            known |= calls
            asked = set(calls)
        repaired.append(message)
    return repaired


def _no_result(call: Message) -> Message:
    return {"role": "tool", "tool_call_id": call.get("id"), "name": call["function"]["name"], "content": NO_RESULT}


def _bridge(before: Message, after: Message) -> str:
    """Return the assistant's text before a turn of the user that would follow a call or its result."""
    if before.get("tool_calls"):
        return INTERRUPTED
    return SHOWN_NEXT if parts(after.get("content"))[:1] == media(after.get("content"))[:1] else UNDERSTOOD


def _opened(turns: Messages) -> Messages:
    """Begin the conversation with the user: with the system message, if there is one, as `without_system` does."""
    said = (turn["role"] for turn in turns if turn["role"] in ("user", "assistant") and not turn.get("tool_calls"))
    if next(said, "assistant") == "user":
        return turns
    lead = _lead(turns)
    return [{**turns[0], "role": "user"}, *turns[1:]] if lead else [_STARTED, *turns]


def _lead(messages: Messages) -> int:
    """Return the number of system messages at the beginning."""
    return next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))


def _is_answer(message: Message) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls")


def _is_empty(message: Message) -> bool:
    return _is_answer(message) and not message.get("content")

"""Repairs of conversations whose turns a template refuses or drops: pure functions from messages to messages.

Clients interrupt calls, trim histories and put text behind results. Each repair changes only the turns that need it and
works from left to right, so that a longer conversation keeps its rendered beginning.
"""

from collections.abc import Callable, Mapping
from typing import Final

from worker.prompt.contents import joined, media, parts
from worker.prompt.probe_chats import ANSWERED, ASKED, ASKED_NEXT, QUESTION, SAID
from worker.prompt.rewrites import (
    SHOWN_NEXT,
    Message,
    Messages,
    alternating,
    one_system,
    unchanged,
    without_system,
    words_apart,
)

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

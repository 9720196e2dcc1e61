"""Chats with which a chat template is probed at load, to choose the rewrites that it needs."""

import re
from typing import Any, Final

from worker.prompt.rewrites import Message, Messages


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

"""A scripted worker for agents: a user message holds all of its turns, after the word SCRIPT.

`SCRIPT [[["tool", "f", "{}"], ["finish", "tool_calls"]], [["text", "Done"], ["finish", "stop"]]]`: turn n is said after
n turns of the assistant. A request without a script (a title, a summary) gets a short text.
"""

import json
import sys
from typing import Any

from scripted import PROMPT_TOKENS, Scripted, main
from talkative import events

from protocol.messages import Accepted, ChatPrompt, Generate

MARK = "SCRIPT "
SMALL_TALK = [["text", "A short text."], ["finish", "stop"]]


class Agent(Scripted):
    def generate(self, request: Generate) -> None:
        assert isinstance(request.prompt, ChatPrompt)
        self.send(Accepted(request.rid, PROMPT_TOKENS))
        tools = 0
        for index, event in enumerate(_turn(request.prompt.messages)):
            deltas, tools = events(request.rid, event, tools, index)
            for delta in deltas:
                self.send_step([delta])


def _turn(messages: list[dict[str, Any]]) -> list[list[str]]:
    for index in range(len(messages) - 1, -1, -1):
        content = str(messages[index]["content"])
        if messages[index]["role"] == "user" and MARK in content:
            turns = json.JSONDecoder().raw_decode(content.partition(MARK)[2])[0]
            said = sum(message["role"] == "assistant" for message in messages[index:])
            return turns[min(said, len(turns) - 1)]
    return SMALL_TALK


if __name__ == "__main__":
    sys.exit(main(Agent))

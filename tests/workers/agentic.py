"""A scripted worker that plays the model of an agent: it calls a tool of the client's, then says what came of it.

What is between `<<<` and `>>>` in a user message is said as it is, or is a JSON list of turns, each a list of events as
`talkative.py` has them. Without that and without tools there is a short text. With tools and no result of one yet, the
likeliest to show a file is called; with a result, the answer repeats it, so that whoever reads the client's output
knows that the result went all the way.
"""

import json
import re
import sys
from typing import Any, Final

from scripted import PROMPT_TOKENS, Scripted, main
from talkative import events

from protocol.from_worker import Accepted
from protocol.to_worker import ChatPrompt, Generate

FILE: Final = "proof.txt"
# What clients call the tool that runs a command or reads a file, the likeliest first.
NAMES: Final = ("bash", "shell", "exec_command", "run_shell_command", "local_shell", "read", "read_file")
COMMAND: Final = f"cat {FILE}"
# How a result looks when a client tells it in its own words, as a user's.
TOLD: Final = re.compile(r"^(?:Observation|<tool_response>)")


class Agentic(Scripted):
    def generate(self, request: Generate) -> None:
        assert isinstance(request.prompt, ChatPrompt)
        self.send(Accepted(request.rid, PROMPT_TOKENS))
        tools = 0
        for index, event in enumerate(script(request.prompt)):
            deltas, tools = events(request.rid, event, tools, index)
            for delta in deltas:
                self.send_step([delta])


def script(prompt: ChatPrompt) -> list[Any]:
    """The next turn of the model."""
    tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in prompt.tools}
    if (told := _told(prompt.messages)) is not None:
        return told
    result = _result(prompt.messages)
    if result is not None and "final_answer" in tools:
        return [_call("final_answer", tools["final_answer"], result), ["finish", "tool_calls"]]
    if result is not None:
        return [["reasoning", "There it is."], ["text", f"It says: {result}"], ["finish", "stop"]]
    if not tools:
        return [["text", "A file"], ["finish", "stop"]]
    name = next((n for known in NAMES for n in tools if n.lower() == known), next(iter(tools)))
    return [["reasoning", "Look."], ["text", "Looking."], _call(name, tools[name]), ["finish", "tool_calls"]]


def _told(messages: list[dict[str, Any]]) -> list[Any] | None:
    """Text that the newest user message with a quotation asks for."""
    for at in range(len(messages) - 1, -1, -1):
        quoted = re.search("<<<(.*?)>>>", str(messages[at]["content"]), re.DOTALL)
        if messages[at]["role"] == "user" and quoted is not None:
            if not quoted[1].startswith("[[["):
                return [["text", quoted[1]], ["finish", "stop"]]
            turns = json.loads(quoted[1])
            said = sum(message["role"] == "assistant" for message in messages[at:])
            return turns[min(said, len(turns) - 1)]
    return None


def _result(messages: list[dict[str, Any]]) -> str | None:
    """The newest result of a tool since the user spoke."""
    newest = messages[-1]
    if newest["role"] == "tool" or (newest["role"] == "user" and TOLD.match(str(newest["content"]))):
        return str(newest["content"])
    return None


def _call(name: str, schema: dict[str, Any], text: str = COMMAND) -> list[str]:
    """A call with everything that the tool requires."""
    properties: dict[str, Any] = schema.get("properties", {})
    wanted = schema.get("required", list(properties))
    return ["tool", name, json.dumps({key: _argument(key, properties.get(key, {}), text) for key in wanted})]


def _argument(key: str, schema: dict[str, Any], text: str) -> Any:
    if "path" in key.lower():
        return FILE
    match schema.get("type"):
        case "array":
            return text.split()
        case "integer" | "number":
            return 1
        case "boolean":
            return False
        case "object":
            return {}
        case _:
            return text


if __name__ == "__main__":
    sys.exit(main(Agentic))

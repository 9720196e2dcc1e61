"""Ollama's own package with a tool: `with_ollama.py URL`."""

import sys
from pathlib import Path

from ollama import Client

client = Client(host=sys.argv[1])
assert "m" in [model.model for model in client.list().models]
assert "completion" in client.show("m").capabilities
client.generate("m")  # loads it
assert [model.name for model in client.ps().models] == ["m"]


def read_file(path: str) -> str:
    """Read a file.

    Args:
      path: Where it is.
    """
    return Path(path).read_text()


def ask(messages, is_stream):
    """The newest turn, and its text."""
    if not is_stream:
        return client.chat("m", messages=messages, tools=[read_file], keep_alive="5m").message.model_dump()
    whole = {"role": "assistant", "content": "", "thinking": "", "tool_calls": []}
    for piece in client.chat("m", messages=messages, tools=[read_file], stream=True):
        whole["content"] += piece.message.content or ""
        whole["thinking"] += piece.message.thinking or ""
        whole["tool_calls"] += [call.model_dump() for call in piece.message.tool_calls or ()]
    assert piece.done
    assert piece.eval_count is not None
    return whole


for is_stream in (False, True):
    messages = [{"role": "user", "content": "What does proof.txt say?"}]
    messages.append(ask(messages, is_stream))
    for call in messages[-1]["tool_calls"]:
        function = call["function"]
        messages.append({"role": "tool", "tool_name": function["name"], "content": read_file(**function["arguments"])})
    print("streamed" if is_stream else "", ask(messages, is_stream)["content"])

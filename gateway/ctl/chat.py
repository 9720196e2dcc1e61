"""`mlxctl chat`: a conversation in the terminal."""

import sys
from typing import Any, TextIO

from msgspec import Struct

from gateway.ctl.client import stream_chat
from gateway.ctl.printing import harmless
from gateway.failed import Failed

DIM = "\x1b[2m"
RESET = "\x1b[0m"


class Answer(Struct, frozen=True):
    """One answer. `reasoning` is empty for a model that does not think aloud."""

    content: str
    reasoning: str


def whole(request: dict[str, Any]) -> Answer:
    """One answer, when it is complete. Raises `Failed`."""
    deltas = list(stream_chat(request))
    content, reasoning = ("".join(delta.get(key) or "" for delta in deltas) for key in ("content", "reasoning_content"))
    return Answer(content, reasoning)


def answer(request: dict[str, Any], out: TextIO) -> str:
    """Stream one answer to `out` and return its text. Ctrl-C ends the answer, not the conversation."""
    text: list[str] = []
    shown = harmless if out.isatty() else str
    # Reasoning is shown to people only: what is piped on is the answer.
    shows_reasoning = out.isatty()
    is_dim = False
    try:
        for delta in stream_chat(request):
            if shows_reasoning and (reasoning := delta.get("reasoning_content")):
                out.write(("" if is_dim else DIM) + shown(reasoning))
                is_dim = True
            if content := delta.get("content"):
                out.write((f"{RESET}\n\n" if is_dim else "") + shown(content))
                is_dim = False
                text.append(content)
            out.flush()
    except KeyboardInterrupt:
        pass
    finally:
        out.write(f"{RESET}\n" if is_dim else "\n")
        out.flush()
    return "".join(text)


def converse(request: dict[str, Any], messages: list[dict[str, str]]) -> None:
    """Ask and answer until the end of input; `/new` forgets the conversation."""
    opening = list(messages)
    print("Ctrl-D or /exit ends, /new starts over, Ctrl-C stops an answer.", file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return
        if line in ("/exit", "/quit"):
            return
        if line == "/new":
            messages = list(opening)
        elif line:
            messages = [*messages, {"role": "user", "content": line}]
            try:
                said = answer(request | {"messages": messages}, sys.stdout)
            except Failed as error:
                print(f"mlxctl: {error}", file=sys.stderr)
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": said})

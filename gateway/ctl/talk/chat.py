"""`mlxctl chat`: a conversation in the terminal."""

import sys
from typing import Annotated, Any, TextIO

import typer
from msgspec import Struct

from gateway.ctl.client import stream_chat
from gateway.ctl.printing import harmless, print_json
from gateway.failed import CommandFailed

System = Annotated[str | None, typer.Option(help="System message.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens in an answer.")]
Temperature = Annotated[float | None, typer.Option(help="Sampling temperature; 0 is deterministic.")]

DIM = "\x1b[2m"
RESET = "\x1b[0m"


class ChatAnswer(Struct, frozen=True):
    """One answer of a model. `reasoning` is empty for a model without reasoning output."""

    content: str
    reasoning: str


class ChatOptions(Struct, frozen=True):
    """Options of a conversation, as on the command line; None means the model's default."""

    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None


def talk(model: str, prompt: str | None, options: ChatOptions, *, json: bool = False) -> None:
    """Print the answer to a prompt or to piped input. If there is neither, hold a conversation. Raises
    `CommandFailed`.
    """
    sampling = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    request: dict[str, Any] = {"model": model, "stream": True}
    request |= {name: value for name, value in sampling.items() if value is not None}
    messages = [{"role": "system", "content": options.system}] if options.system else []
    if prompt is None and (json or not sys.stdin.isatty()):
        prompt = sys.stdin.read()
    if prompt is None:
        converse(request, messages)
        return
    messages.append({"role": "user", "content": prompt})
    request["messages"] = messages
    if json:
        print_json(whole(request))
    else:
        answer(request, sys.stdout)


def whole(request: dict[str, Any]) -> ChatAnswer:
    """Return one complete answer. Raises `CommandFailed`."""
    deltas = list(stream_chat(request))
    content, reasoning = ("".join(delta.get(key) or "" for delta in deltas) for key in ("content", "reasoning_content"))
    return ChatAnswer(content, reasoning)


def answer(request: dict[str, Any], out: TextIO) -> str:
    """Stream one answer to `out` and return its text. Ctrl-C ends the answer but not the conversation."""
    text: list[str] = []
    shown = harmless if out.isatty() else str
    # Reasoning is shown only on a terminal; a pipe gets only the answer.
    shows_reasoning = out.isatty()
    is_dim = is_begun = False
    try:
        for delta in stream_chat(request):
            is_begun = True
            if shows_reasoning and (reasoning := delta.get("reasoning_content")):
                out.write(("" if is_dim else DIM) + shown(reasoning))
                is_dim = True
            if content := delta.get("content"):
                out.write((f"{RESET}\n\n" if is_dim else "") + shown(content))
                is_dim = False
                text.append(content)
            out.flush()
    except KeyboardInterrupt:
        is_begun = True
    finally:
        # A request that was refused has no line to end.
        if is_begun:
            out.write(f"{RESET}\n" if is_dim else "\n")
            out.flush()
    return "".join(text)


def converse(request: dict[str, Any], messages: list[dict[str, str]]) -> None:
    """Hold a conversation until the end of input; `/new` starts it over."""
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
                text = answer(request | {"messages": messages}, sys.stdout)
            except CommandFailed as error:
                print(f"mlxctl: {error}", file=sys.stderr)
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": text})

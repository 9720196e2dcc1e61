"""Command `python -m worker.output.parsers.cli`: prints the events of a raw model output as JSON lines."""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, cast

from protocol.from_worker import DeltaKind
from worker.output.parsers.channels import Channels
from worker.output.parsers.events import Event
from worker.output.parsers.families import FAMILIES, UnknownFamily, resolve, start_in_reasoning
from worker.output.parsers.parser import make_parser

_TYPES: Final = {
    DeltaKind.TEXT: "content",
    DeltaKind.REASONING: "reasoning",
    DeltaKind.TOOL_BEGIN: "tool_begin",
    DeltaKind.TOOL_ARGS: "tool_args",
    DeltaKind.TOOL_END: "tool_end",
}
_HI: Final = [{"role": "user", "content": "Hi"}]


class BrokenTemplate(ValueError):
    """Raised when the template does not render."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse a file and print its events. Returns the exit status: 2 for a usage error."""
    options = _options().parse_args(argv)
    try:
        family = resolve(options.parser)
        # The file is read as bytes, because text mode would change line breaks.
        raw = sys.stdin.buffer.read() if options.file == "-" else Path(options.file).read_bytes()
        text = raw.decode("utf-8", errors="replace")
        tools = _tools(options.tools)
        is_open = _start(family, text, tools, options)
    except (UnknownFamily, OSError, ValueError) as error:
        print(f"parse: {error}", file=sys.stderr)
        return 2
    parser = make_parser(family, tools=tools, start_in_reasoning=is_open)
    for piece in _pieces(text, options.split, options.seed):
        _print(parser.feed(piece))
    _print(parser.finish())
    reason = "length" if parser.is_broken else "tool_calls" if parser.saw_tool_call else "stop"
    print(json.dumps({"type": "finish", "text": reason, "malformed": parser.malformed}))
    return 0


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="mlxctl parse", description="Print the events of a raw model output.")
    options.add_argument("--parser", required=True, metavar="NAME", help="the model family, or an alias of it")
    options.add_argument("--tools", metavar="FILE", help="a JSON list of the tools that the request declared")
    start = options.add_mutually_exclusive_group()
    start.add_argument("--template", metavar="FILE", help="the chat template, to see whether it opens the reasoning")
    start.add_argument("--start-in-reasoning", action="store_true", help="the prompt ended inside of the reasoning")
    options.add_argument("--split", metavar="N|random", default="", help="feed N characters at a time, or some")
    options.add_argument("--seed", type=int, default=0, help="for --split random")
    options.add_argument("file", nargs="?", default="-", help="the raw output; - is standard input")
    return options


def _tools(path: str | None) -> list[dict[str, Any]]:
    if not path:
        return []
    tools = json.loads(Path(path).read_text(encoding="utf-8"))
    if isinstance(tools, dict):
        tools = cast("dict[str, Any]", tools).get("tools", [tools])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in cast("list[Any]", tools)):
        raise ValueError(f"{path}: expected a JSON list of tools")
    return cast("list[dict[str, Any]]", tools)


def _start(family: str, text: str, tools: list[dict[str, Any]], options: argparse.Namespace) -> bool | None:
    """Return whether the output begins inside reasoning; None leaves the choice to the family.

    The whole output is available. If the family does not decide, an end of reasoning before any start shows that the
    output begins inside.
    """
    if options.start_in_reasoning:
        return True
    grammar = FAMILIES[family].grammar
    think = None if isinstance(grammar, Channels) else grammar.think
    ends = [at for word in think.ends if (at := text.find(word)) >= 0] if think else []
    starts = [at for word in think.starts if (at := text.find(word)) >= 0] if think else []
    is_closed = bool(ends) and min(ends) < min(starts, default=len(text))
    if options.template:
        template = Path(options.template).read_text(encoding="utf-8")
        try:
            prompts = [render(template, _HI, tools, thinking=thinking) for thinking in (True, False)]
        except BrokenTemplate as error:
            print(f"parse: {options.template}: {error}", file=sys.stderr)
        else:
            opens = [start_in_reasoning(family, prompt) for prompt in prompts]
            # If the template can render both, the templates do not show which one this output used.
            return opens[0] if opens[0] == opens[1] else is_closed
    if is_closed and think and not think.is_explicit:
        return True
    return None


def render(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    *,
    thinking: bool,
    opens_answer: bool = True,
) -> str:
    """Render messages without a tokenizer, with every common switch for thinking set. Raises `BrokenTemplate`."""
    # These imports are local because they cost more than the rest of the package.
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    switches = dict.fromkeys(("enable_thinking", "thinking", "reasoning"), thinking)
    tokens = {"bos_token": "", "eos_token": ""}
    try:
        rendered, _ = render_jinja_template(
            conversations=[messages],
            tools=cast(Any, tools or None),
            chat_template=template,
            add_generation_prompt=opens_answer,
            **tokens,
            **switches,
        )
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise BrokenTemplate(f"the template does not render: {error}") from error
    return str(rendered[0])


def _pieces(text: str, split: str, seed: int) -> Iterator[str]:
    if not split:
        yield text
        return
    rng = random.Random(seed)
    if split != "random" and (not split.isdecimal() or int(split) < 1):
        raise SystemExit("parse: --split takes a positive number or `random`")
    at = 0
    while at < len(text):
        size = rng.randint(1, 12) if split == "random" else int(split)
        yield text[at : at + size]
        at += size


def _print(events: list[Event]) -> None:
    for event in events:
        line = {"type": _TYPES[event.kind]}
        if event.kind in (DeltaKind.TEXT, DeltaKind.REASONING, DeltaKind.TOOL_ARGS):
            line["text"] = event.text
        if event.tool is not None:
            line["id"] = event.tool.call_id
            if event.kind is DeltaKind.TOOL_BEGIN:
                line["name"] = event.tool.name
        print(json.dumps(line, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(main())

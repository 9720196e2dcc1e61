"""Markup of a model's family: the parser of its reasoning and tool calls, and the control tokens for that parser."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Final

from msgspec import structs

from protocol.chat_templates import ChatTemplates
from protocol.failures import Code
from protocol.prompts import ChatPrompt
from worker.errors import LoadFailed
from worker.model.loader import LoadedModel
from worker.output.parsers.channels import Channels
from worker.output.parsers.controls import NO_CONTROLS, Controls, is_markup
from worker.output.parsers.detect import detect_family, reasoning_end, start_in_reasoning
from worker.output.parsers.families import FAMILIES, UnknownFamily, resolve
from worker.output.parsers.parser import Parser, call_ids, make_parser
from worker.structured.tool_grammar.build import has_calls, next_message

# Reasoning effort with the least thinking, for families that cannot disable thinking completely.
_LEAST_EFFORT: Final = {"harmony": "low", "solar_open": "low"}


class ModelFamily:
    """Family of a model, detected from its template and vocabulary unless its configuration names one."""

    def __init__(self, loaded: LoadedModel, plain_chat: str, knows_tools: bool, wanted: str) -> None:
        """`plain_chat` is a rendered chat without reasoning or tools: its control tokens only mark turns."""
        tokenizer = loaded.tokenizer
        templates = ChatTemplates.of(tokenizer.chat_template)
        try:
            self.family = (
                resolve(wanted) if wanted else detect_family(templates, tokenizer.get_vocab(), loaded.model_type)
            )
        except UnknownFamily as error:
            raise LoadFailed(Code.BAD_CONFIG, str(error)) from error
        # Tools for a template without tools are written as text, in the format that the `hermes` parser reads.
        self.tool_family = self.family if knows_tools and has_calls(self.family) else "hermes"
        self.closing_ids = _ids(loaded, _closing(self.family))
        # Tokens that end the reasoning if a call is required: a message to a tool must follow it.
        self.calling_ids = _ids(loaded, next_message(self.family)) or self.closing_ids
        self.visible = self._visible(tokenizer, "".join(templates.texts), plain_chat)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        controls = {token: entry for token, entry in added.items() if is_markup(entry.content, entry.special)}
        self._controls = Controls({entry.content: entry.special for entry in controls.values()})
        # Ids and texts of the control tokens that parsers receive; all other special tokens have no text.
        self.controls: dict[int, str] = {
            token: entry.content
            for token, entry in controls.items()
            if not entry.special or entry.content in self.visible
        }

    def with_effort(self, prompt: ChatPrompt) -> ChatPrompt:
        """Translate a prompt's thinking options to those that the family's templates support."""
        least = _LEAST_EFFORT.get(self.family, "") if prompt.thinking is False and not prompt.effort else ""
        return structs.replace(prompt, effort=least) if least else prompt

    def thinking_budget(self, prompt: ChatPrompt, wanted: int | None) -> int | None:
        """Return the thinking budget in tokens. If a request disables thinking but the template cannot, the budget is
        0.

        Prompts with tools are excepted in families that write messages: closing the message of reasoning would also
        decide that no tool is called.
        """
        if prompt.thinking is not False or (prompt.tools and isinstance(FAMILIES[self.family].grammar, Channels)):
            return wanted
        return 0

    def parser(self, prompt: ChatPrompt, rendered: str, is_ruled: bool = False, *, id_seed: str) -> tuple[Parser, bool]:
        """Make the parser of one answer, and return whether the answer begins inside reasoning.

        The ids of the answer's calls derive from `id_seed`, so that a successor of this worker generates the same ids.
        `is_ruled` means that a grammar constrains the output. A grammar matches characters, not tokens, so the parser
        then ignores control tokens too.
        """
        is_reasoning = start_in_reasoning(self.family, rendered)
        parser = make_parser(
            self.tool_family if prompt.tools else self.family,
            tools=prompt.tools,
            start_in_reasoning=is_reasoning,
            parse_tools=bool(prompt.tools),
            controls=NO_CONTROLS if is_ruled else self._controls,
            new_id=call_ids(id_seed),
        )
        return parser, is_reasoning

    def _visible(self, tokenizer: Any, template: str, plain_chat: str) -> frozenset[str]:
        """Return the special tokens that parsers receive: tokens in the family's markers, and tokens that the template
        uses for more than turns."""
        markers = [marker for marker in _strings([FAMILIES[self.family], FAMILIES[self.tool_family]]) if marker.strip()]
        special = [entry.content for entry in getattr(tokenizer, "added_tokens_decoder", {}).values() if entry.special]
        return frozenset(
            token
            for token in special
            if any(token in marker for marker in markers) or (token in template and token not in plain_chat)
        )


def answer_opening(family: str, rendered: str) -> str:
    """Return the markup that a rendered prompt needs, so that its next token is the first of the answer's text."""
    end = _closing(family)
    if start_in_reasoning(family, rendered):
        return end
    if not isinstance(FAMILIES[family].grammar, Channels):
        return ""
    header = end[end.index("<|start|>") :]
    written = next(at for at in range(len(header), -1, -1) if rendered.endswith(header[:at]))
    return header[written:]


def _closing(family: str) -> str:
    """Return the markup that ends reasoning and begins the answer; empty for a family without reasoning."""
    end = reasoning_end(family)
    is_message = isinstance(FAMILIES[family].grammar, Channels)
    return end if is_message or not end else f"\n{end}\n\n"


def _ids(loaded: LoadedModel, text: str) -> tuple[int, ...]:
    """Encode `text`; () if an id is beyond the model's vocabulary, because MLX checks no bounds."""
    ids = tuple(loaded.tokenizer.encode(text, add_special_tokens=False))
    return ids if max(ids, default=0) < loaded.vocab_size else ()


def _strings(value: Any) -> Iterator[str]:
    """Yield every string in nested dataclasses and tuples."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _strings(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _strings(getattr(value, field.name))

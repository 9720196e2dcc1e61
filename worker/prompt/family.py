"""Markup of a model's family: the parser of its reasoning and tool calls, and the control tokens for that parser."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from protocol.checkpoint import ChatTemplates
from protocol.failures import Code
from protocol.to_worker import ChatPrompt, Generate, NextTurnPrompt
from worker.engine.row import RowText, Thinking
from worker.errors import LoadFailed
from worker.model.loader import LoadedModel
from worker.output.detokenize import Vocabulary
from worker.output.parsers.channels import Channels
from worker.output.parsers.families import (
    FAMILIES,
    UnknownFamily,
    detect_family,
    reasoning_end,
    resolve,
    start_in_reasoning,
    vocabulary_families,
)
from worker.output.parsers.parser import Parser, call_ids, make_parser
from worker.output.parsers.reader import NO_CONTROLS, Controls, is_markup
from worker.prompt.rewrites import USUAL_TOOL_FAMILY
from worker.structured.tool_grammar.build import has_calls, next_message


class ModelFamily:
    """Family of a model, detected from its template and vocabulary unless its configuration names one."""

    def __init__(self, loaded: LoadedModel, plain_chat: str, family: str, tool_family: str) -> None:
        """`plain_chat` is a rendered chat without reasoning or tools: its control tokens only mark turns. For the
        families see `families_of`."""
        tokenizer = loaded.tokenizer
        templates = ChatTemplates.of(tokenizer.chat_template)
        self.family = family
        self.tool_family = tool_family
        self.closing_ids = _ids(loaded, _closing(self.family))
        # Tokens that end the reasoning if a call is required: a message to a tool must follow it.
        self.calling_ids = _ids(loaded, next_message(self.family)) or self.closing_ids
        visible = self._visible(tokenizer, "".join(templates.texts), plain_chat)
        self.vocabulary = Vocabulary(tokenizer)
        # Vocabulary of the answers of chats, in which markup that parsers receive has text.
        self.chat_vocabulary = Vocabulary(tokenizer, visible)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        controls = {token: entry for token, entry in added.items() if is_markup(entry.content, entry.special)}
        self._controls = Controls({entry.content: entry.special for entry in controls.values()})
        # Ids and texts of the control tokens that parsers receive; all other special tokens have no text.
        self.controls: dict[int, str] = {
            token: entry.content for token, entry in controls.items() if not entry.special or entry.content in visible
        }

    def answer(
        self, request: Generate, ids: Sequence[int], rendered: str, *, is_ruled: bool
    ) -> tuple[RowText, Thinking]:
        """Return the text and the reasoning of an answer that has not begun. The text hides special tokens unless the
        request shows them. For `is_ruled` see `parser`."""
        prompt = request.prompt
        usual = self.chat_vocabulary if isinstance(prompt, ChatPrompt | NextTurnPrompt) else self.vocabulary
        text = RowText.of(request, ids, self.vocabulary.with_special if request.shows_special else usual)
        if not isinstance(prompt, ChatPrompt) or request.questions:
            return text, Thinking()
        seed = f"{request.rid}:{request.sampling.seed}"
        text.parser, is_open = self.parser(prompt, rendered, is_ruled, id_seed=seed)
        budget = request.thinking_budget
        # If a request disables thinking but the template cannot, the budget is 0. Prompts with tools are excepted in
        # families that write messages: closing the message of reasoning would also decide that no tool is called.
        if prompt.thinking is False and not (prompt.tools and isinstance(FAMILIES[self.family].grammar, Channels)):
            budget = 0
        return text, Thinking(is_open, budget=budget, closing_ids=self.closing_ids)

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


def families_of(loaded: LoadedModel, wanted: str) -> tuple[str, str]:
    """Return the family of a model and the one whose parser reads its calls. Raises `LoadFailed`.

    `wanted` is the family in the model's configuration, or empty.
    """
    if wanted:
        try:
            family = resolve(wanted)
        except UnknownFamily as error:
            raise LoadFailed(Code.BAD_CONFIG, str(error)) from error
        return family, family if has_calls(family) else USUAL_TOOL_FAMILY
    templates, vocab = ChatTemplates.of(loaded.tokenizer.chat_template), loaded.tokenizer.get_vocab()
    family = detect_family(templates, vocab, loaded.model_type)
    return family, calling_family(templates, vocab, loaded.model_type)


def calling_family(templates: ChatTemplates, vocab: Container[str] = (), model_type: str = "") -> str:
    """Return the family whose notation a model's calls have: its own, else one whose tokens are in its vocabulary, else
    the one that most models have seen."""
    family = detect_family(templates, vocab, model_type)
    if has_calls(family):
        return family
    think = getattr(FAMILIES[family].grammar, "think", None)
    others = (other for other in vocabulary_families(vocab) if has_calls(other))
    fitting = (other for other in others if think in (None, getattr(FAMILIES[other].grammar, "think", None)))
    return next(fitting, USUAL_TOOL_FAMILY)


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

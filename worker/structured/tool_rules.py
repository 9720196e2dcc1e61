"""Rules of tool calls: the calls that a chat requires, as a grammar in the model's own markup."""

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from protocol.failures import Code
from protocol.to_worker import ChatPrompt, Constraint, ConstraintKind
from worker.errors import RequestInvalid
from worker.output.parsers.channels import Channels
from worker.output.parsers.families import FAMILIES
from worker.output.parsers.reader import is_markup
from worker.structured.grammar_compiler import CompiledGrammar
from worker.structured.row_constraint import EarlyFinish, Prologue, Rule, Rules
from worker.structured.schema_checks import SchemaInvalid, check, dangling, modern, repaired
from worker.structured.tool_grammar.build import HEADS, CallGrammar, Calls, call_grammar, rest_of_call, strict_grammar
from worker.structured.tool_grammar.lark import MarkupTokens

log = logging.getLogger("mlxd.worker")

# Limit of the tokens of required calls if the request sets none.
DEFAULT_CALL_TOKENS: Final = 8192
_MAX_CACHED: Final = 64


@dataclass(frozen=True, slots=True)
class _CompiledCalls:
    text: str
    grammar: CompiledGrammar
    finish: EarlyFinish
    reserve: int


class ToolRules:
    """Factory of the tool rules of one model. Safe to call from threads that may wait for a compiler."""

    def __init__(self, rules: Rules, tokenizer: Any, family: str, eos_ids: Sequence[int]) -> None:
        """`family` selects the notation of calls; `tokenizer` is a tokenizer of transformers."""
        self._rules = rules
        self._family = family
        self._vocabulary: dict[str, int] = tokenizer.get_vocab()
        self._added = [(token.content, at) for at, token in getattr(tokenizer, "added_tokens_decoder", {}).items()]
        self._eos_ids = tuple(eos_ids)
        self._lock = threading.Lock()
        self._marks: MarkupTokens | None = None
        self._compiled: OrderedDict[tuple[str, frozenset[str], tuple[str, ...]], _CompiledCalls] = OrderedDict()

    def make(self, prompt: ChatPrompt, prompt_end: str, room: int) -> Rule | None:
        """Return the rule for an answer of `room` tokens; None if nothing is enforced. Raises `RequestInvalid`."""
        self._check_strict(prompt)
        if prompt.must_call:
            return self._forced(prompt, prompt_end, room)
        return self._strict(prompt) if prompt.strict_tools else None

    def optional(self, answer: Rule, constraint: Constraint, prompt: ChatPrompt, prompt_end: str) -> Rule:
        """Return a rule for calls, or for the `answer` to which `constraint` alone applies. Raises `RequestInvalid`."""
        self._check_strict(prompt)
        if isinstance(FAMILIES[self._family].grammar, Channels):
            if self._family not in HEADS or not answer.prologue.is_open:
                return answer
            # The header of each message, which names its recipient, selects the grammar.
            by_marker = self._by_head(prompt.tools, prompt.strict_tools)
            ends = (*answer.prologue.ends, *by_marker)
            return replace(answer, prologue=replace(answer.prologue, ends=ends), by_marker=by_marker)
        calls = Calls(prompt.tools, is_parallel=not prompt.one_call)
        marks = self._known_marks()
        compiled = self._compile(
            lambda calls: call_grammar(self._family, calls, marks, prompt_end), calls, prompt.strict_tools
        )
        grammar = self._rules.grammars.compile(constraint, compiled.text)
        deviations = tuple(dict.fromkeys((*compiled.grammar.deviations, *grammar.deviations)))
        return replace(answer, grammar=replace(grammar, deviations=deviations))

    def _check_strict(self, prompt: ChatPrompt) -> None:
        """Refuse a strict tool whose schema cannot be enforced."""
        for tool in prompt.tools:
            schema = tool["function"].get("parameters")
            if _name(tool) not in prompt.strict_tools or not schema:
                continue
            try:
                self._rules.grammars.compile(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))
            except RequestInvalid as error:
                message = f"The tool '{_name(tool)}' is strict, but {error}"
                raise RequestInvalid(error.failure.code, message, param="tools") from error

    def _forced(self, prompt: ChatPrompt, prompt_end: str, room: int) -> Rule:
        tools = _named(prompt.tools, prompt.callable_tools)
        calls, strict = Calls(tools, is_parallel=not prompt.one_call), prompt.strict_tools
        marks = self._known_marks()
        compiled = self._compile(lambda calls: call_grammar(self._family, calls, marks, prompt_end), calls, strict)
        is_messages = isinstance(FAMILIES[self._family].grammar, Channels)
        # The grammar already includes the reasoning in families that write messages.
        prologue = Prologue() if is_messages else self._rules.prologue(prompt_end)
        rule = self._rules.of_grammar(compiled.grammar, prologue)
        return replace(rule, finish=compiled.finish, room=room, reserve=compiled.reserve)

    def _strict(self, prompt: ChatPrompt) -> Rule | None:
        """Return the rule for calls of strict tools, which applies once a call has begun; other tools take any
        arguments.
        """
        marks = self._known_marks()
        loose = tuple(name for name in map(_name, prompt.tools) if name not in prompt.strict_tools)
        calls = Calls(prompt.tools, is_parallel=not prompt.one_call, loose_names=loose)
        grammar = strict_grammar(self._family, calls, marks)
        if grammar is None:
            return self._strict_by_head(prompt) if self._family in HEADS else None
        strict = prompt.strict_tools
        compiled = self._compile(lambda calls: strict_grammar(self._family, calls, marks) or grammar, calls, strict)
        rule = self._rules.of_grammar(compiled.grammar, Prologue((grammar.trigger.encode(),), is_open=True))
        return replace(rule, is_lazy=True)

    def _strict_by_head(self, prompt: ChatPrompt) -> Rule:
        """Return the rule for strict tools in a format without a common marker of calls.

        Each call begins with a head that names the tool. The heads serve as the rule's markers, each with the grammar
        of its tool.
        """
        by_marker = self._by_head(_named(prompt.tools, prompt.strict_tools), prompt.strict_tools)
        rule = self._rules.of_grammar(next(iter(by_marker.values())), Prologue(tuple(by_marker), is_open=True))
        return replace(rule, is_lazy=True, by_marker=by_marker)

    def _by_head(self, tools: Sequence[Mapping[str, Any]], strict: Sequence[str]) -> dict[bytes, CompiledGrammar]:
        """Return the grammar that follows each possible head of a call."""
        marks, family = self._known_marks(), self._family
        by_marker: dict[bytes, CompiledGrammar] = {}
        for tool in tools:
            name = _name(tool)
            compiled = self._compile(
                lambda calls: rest_of_call(family, calls, marks), Calls([tool]), (name,) if name in strict else ()
            )
            by_marker |= {marker.encode(): compiled.grammar for marker in HEADS[family].triggers(name)}
        return by_marker

    def _compile(self, write: Callable[[Calls], CallGrammar], calls: Calls, strict: Sequence[str]) -> _CompiledCalls:
        """Compile the grammar without the faults of schemas; if that fails, compile a grammar that enforces only the
        `strict` tools. Raises `RequestInvalid`.
        """
        calls, faults = _repaired(calls)
        written = write(calls)
        for name in written.unheld.intersection(strict):
            message = (
                f"The tool '{name}' is strict, but its schema cannot be enforced in the way this model writes calls"
            )
            raise RequestInvalid(Code.INVALID_REQUEST, message, param="tools")
        # Equal texts may have different strict tools, and the fallback below depends on them.
        key = (written.text, frozenset(strict), faults)
        with self._lock:
            if cached := self._compiled.get(key):
                self._compiled.move_to_end(key)
                return cached
        try:
            compiled = self._try(written, faults)
        except RequestInvalid as error:
            # A tool without `strict` stays usable if no grammar can enforce its schema.
            log.warning("tool calls are not constrained by their schemas: %s", error)
            loose = tuple(name for name in map(_name, calls.tools) if name not in strict)
            compiled = self._try(write(replace(calls, loose_names=loose)), ("everything but an object",))
        with self._lock:
            self._compiled[key] = compiled
            if len(self._compiled) > _MAX_CACHED:
                self._compiled.popitem(last=False)
        return compiled

    def _try(self, written: CallGrammar, deviations: Sequence[str]) -> _CompiledCalls:
        grammar = self._rules.grammars.compile(
            Constraint(ConstraintKind.GRAMMAR, written.text, param="tools"), is_of_calls=True
        )
        grammar = replace(grammar, deviations=(*deviations, *grammar.deviations))
        finish = EarlyFinish(self._encode, grammar.vocab_size, self._eos_ids, written.value_ends, written.ends)
        return _CompiledCalls(written.text, grammar, finish, finish.shortest(grammar.walk()))

    def _encode(self, text: str) -> list[int]:
        table = self._rules.grammars.table()
        ids: list[int] = []
        for piece in self._known_marks().pieces(text):
            ids += [piece] if isinstance(piece, int) else table.tokenize_str(piece)
        return ids

    def _known_marks(self) -> MarkupTokens:
        if self._marks is None:
            table = self._rules.grammars.table()
            specials = {content: at for content, at in self._added if table.is_special_token(at)}
            tokens = [content for content, _ in self._added if is_markup(content, content in specials)]
            self._marks = MarkupTokens(self._vocabulary, specials, self._eos_ids, tokens)
        return self._marks


def _named(tools: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Mapping[str, Any]]:
    return [tool for tool in tools if not names or _name(tool) in names]


def _repaired(calls: Calls) -> tuple[Calls, tuple[str, ...]]:
    """Return the calls with tuples of older drafts and faults of schemas repaired, and the keywords at fault."""
    tools: list[Mapping[str, Any]] = []
    faults: set[str] = set()
    for tool in calls.tools:
        schema = tool["function"].get("parameters")
        if isinstance(schema, dict):
            schema, found = _repaired_schema(cast(dict[str, Any], schema))
            faults.update(found)
            tool = {**tool, "function": {**tool["function"], "parameters": schema}}
        tools.append(tool)
    return replace(calls, tools=tools), tuple(sorted(faults))


def _repaired_schema(schema: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    schema = modern(schema)
    with suppress(SchemaInvalid):
        check(schema)
        return repaired(schema, dangling(schema))
    return schema, ()


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool["function"]["name"])

"""Constraint of one request's output: its grammar, and the reasoning that may come before it.

Early finish: the shortest way to the end of a grammar, for an answer that is close to its token limit.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from protocol.checkpoint import ChatTemplates
from protocol.to_worker import Constraint
from worker.output.parsers.channels import Channels
from worker.output.parsers.families import FAMILIES, start_in_reasoning
from worker.structured.grammar_compiler import Allowed, CompiledGrammar, GrammarFailed, Grammars, GrammarWalk

# Texts that close JSON values, tried in this order. A comma or a quote continues the value where no bracket may close
# it yet.
_JSON_CLOSERS: Final = ("}", "]", ")", ",", '"')
# If all of these letters are allowed next, the grammar is inside a string.
_STRING_PROBES: Final = ("Z", "q", "~")
_MAX_COUNTED_STEPS: Final = 2000
# Number of tokens that is added to the length of the shortest complete answer, because values may be open when the
# finish begins.
_OPEN_VALUES_TOKENS: Final = 24
# Number of calls that a value may quote within each other, each of which must be ended.
_OPEN_CALLS: Final = 2


class EarlyFinish:
    """Finisher of answers in one vocabulary; shared by all rows of a grammar.

    `value_ends` are texts that end a value, in addition to JSON's; `ends` are texts that end a call or a list of calls.
    They are tried in order. Texts that `encode` writes with ids from `vocab_size` on are skipped: the model has no such
    outputs.
    """

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        vocab_size: int,
        eos_ids: Collection[int],
        value_ends: Sequence[str],
        ends: Sequence[str],
    ) -> None:
        self._eos_ids = list(eos_ids)

        def spelled(texts: Sequence[str]) -> list[tuple[int, ...]]:
            spellings = [tuple(encode(text)) for text in texts]
            return [tokens for tokens in spellings if tokens and max(tokens) < vocab_size]

        closers = spelled(value_ends)
        self._open_calls_tokens = _OPEN_CALLS * max(map(len, closers), default=0)
        self._texts = [*closers, *spelled(('"',))]
        self._marks = spelled((*ends, *value_ends, *_JSON_CLOSERS))
        self._letters = [tokens[0] for tokens in spelled(_STRING_PROBES) if len(tokens) == 1]

    def way(self, walk: GrammarWalk, allowed: Allowed) -> Sequence[int]:
        """Return the tokens to continue with; empty if no allowed token is preferred."""
        ends = [token for token in self._eos_ids if allowed[token]]
        if ends:
            return ends[:1]
        is_text = bool(self._letters) and all(allowed[token] for token in self._letters)
        return next((tokens for tokens in (self._texts if is_text else self._marks) if walk.fits(tokens)), ())

    def shortest(self, walk: GrammarWalk) -> int:
        """Return the approximate token count of the shortest answer. Advances `walk` to the end of the answer."""
        steps = 0
        while steps < _MAX_COUNTED_STEPS:
            allowed = walk.allowed()
            way = self.way(walk, allowed) or (int(np.flatnonzero(allowed)[0]),)
            if way[0] in self._eos_ids:
                break
            walk.take(way)
            steps += len(way)
        return steps + _OPEN_VALUES_TOKENS + self._open_calls_tokens


@dataclass(frozen=True, slots=True)
class Prologue:
    """Text allowed before the constrained text.

    `ends` are the markers after which the answer begins. With `is_open`, the answer begins only after one of them;
    until then the row is free, but may not end. `openers` are tokens that open a free block if they come first.
    """

    ends: tuple[bytes, ...] = ()
    is_open: bool = False
    openers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """Constraint of one request. `anything` is the mask of a free block: every token except the end-of-sequence tokens.

    With `finish`, an answer that has used all but `reserve` tokens of its `room` takes the shortest way to its end. A
    lazy rule applies after each occurrence of its prologue's marker; all other text is free. `by_marker` holds the
    grammars of those markers that have a grammar of their own.
    """

    grammar: CompiledGrammar
    prologue: Prologue
    eos_ids: tuple[int, ...]
    anything: Allowed
    token_bytes: Callable[[int], bytes]
    ignore_eos: bool = False
    is_lazy: bool = False
    by_marker: Mapping[bytes, CompiledGrammar] = field(default_factory=dict[bytes, CompiledGrammar])
    finish: EarlyFinish | None = None
    room: int = 0
    reserve: int = 0


class Guide:
    """Progress of one row through its rule. Its methods run on one thread at a time."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._walk = rule.grammar.walk()
        self._is_free = rule.prologue.is_open
        self._is_start = True
        self._is_over = False
        # Whether the row has just left a free block, so that the answer has no text yet.
        self._has_opened = False
        self._tail = b""
        self._left = rule.room
        # Next tokens of an early finish.
        self._finishing: Sequence[int] = ()
        self._keep = max((len(end) for end in rule.prologue.ends), default=1) - 1

    def fork(self) -> "Guide":
        """Return an independent guide at the same position."""
        twin = copy(self)
        twin._walk = self._walk.fork()
        return twin

    def forced(self) -> list[int]:
        """Return the tokens that the grammar forces next; empty in a free block."""
        return [] if self._is_over or self._is_free else self._walk.forced()

    def take(self, token: int) -> None:
        """Advance by one token. Raises `GrammarFailed`."""
        is_start, self._is_start = self._is_start, False
        self._left -= 1
        if token in self._rule.eos_ids:
            self._is_over = True
        elif self._is_free:
            self._scan(token)
        elif is_start and token in self._rule.prologue.openers:
            self._is_free = True
        elif not (self._has_opened and self._is_gap(token)):
            self._walk.take([token])
            self._has_opened = False
            if self._rule.is_lazy and self._walk.is_complete:
                self._release()

    def allowed(self) -> Allowed | None:
        """Return the allowed next tokens; None if all are. Raises `GrammarFailed`."""
        rule = self._rule
        if self._is_over:
            return None
        if self._is_free:
            return None if rule.is_lazy else rule.anything
        allowed = self._walk.allowed()
        if rule.finish is not None and self._left <= rule.reserve:
            return self._finish(rule.finish, allowed)
        if self._is_start:
            allowed[list(rule.prologue.openers)] = True
        if rule.ignore_eos:
            longer = allowed & rule.anything
            return longer if longer.any() else allowed
        return allowed

    def _finish(self, finish: EarlyFinish, allowed: Allowed) -> Allowed:
        """Return a mask that allows only the next token of an early finish. Return `allowed` itself if no token leads
        to the end."""
        way = self._finishing or finish.way(self._walk, allowed)
        if not way:
            return allowed
        self._finishing = way[1:]
        only = np.zeros_like(allowed)
        only[way[0]] = True
        return only

    def _scan(self, token: int) -> None:
        """Look for the end of the free block; text after the end within the same token belongs to the answer."""
        text = self._tail + self._rule.token_bytes(token)
        hits = [(at, end) for end in self._rule.prologue.ends if (at := text.find(end)) >= 0]
        if not hits:
            self._tail = text[-self._keep :] if self._keep else b""
            return
        at, end = min(hits)
        if end in self._rule.by_marker:
            self._walk = self._rule.by_marker[end].walk()
        self._is_free, self._has_opened = False, not self._rule.is_lazy
        rest = text[at + len(end) :]
        if rest := rest if self._rule.is_lazy else rest.lstrip():
            self._begin(rest)
            self._has_opened = False

    def _begin(self, text: bytes) -> None:
        try:
            self._walk.take_bytes(text)
        except GrammarFailed:
            if not self._rule.is_lazy:
                raise
            self._release()  # the marker was ordinary text

    def _release(self) -> None:
        """Stop constraining the text until the next marker."""
        self._walk, self._is_free, self._tail = self._rule.grammar.walk(), True, b""

    def _is_gap(self, token: int) -> bool:
        """Return whether the token is whitespace that the grammar does not allow here."""
        return self._rule.token_bytes(token).isspace() and not self._walk.fits([token])


class Rules:
    """Factory of the rules of requests, for one model. Safe to call from threads that may wait for a compiler."""

    def __init__(
        self,
        tokenizer: Any,
        family: str,
        vocab_size: int,
        eos_ids: Sequence[int],
        token_bytes: Callable[[int], bytes],
    ) -> None:
        """`tokenizer` is a tokenizer of transformers; `family` selects the model's markers of reasoning."""
        self.grammars = Grammars(tokenizer, vocab_size, eos_ids)
        self._family = family
        self._vocabulary: dict[str, int] = tokenizer.get_vocab()
        self._template = "".join(ChatTemplates.of(getattr(tokenizer, "chat_template", None)).texts)
        self._eos_ids = tuple(eos_ids)
        self._token_bytes = token_bytes
        self._anything = np.arange(vocab_size) < len(tokenizer)
        self._anything[list(eos_ids)] = False

    def make(self, constraint: Constraint, prompt_end: str, *, ignore_eos: bool = False) -> Rule:
        """Return the rule for an answer to a prompt that ends with `prompt_end`. Raises `RequestInvalid`."""
        prologue = self.prologue(prompt_end) if constraint.after_reasoning else Prologue()
        return replace(self.of_grammar(self.grammars.compile(constraint), prologue), ignore_eos=ignore_eos)

    def of_grammar(self, grammar: CompiledGrammar, prologue: Prologue) -> Rule:
        """Return a rule for a compiled grammar."""
        return Rule(grammar, prologue, self._eos_ids, self._anything, self._token_bytes)

    def prologue(self, prompt_end: str) -> Prologue:
        """Return the prologue for a prompt: open if the prompt opens the reasoning, absent if the prompt closes it,
        otherwise optional.
        """
        grammar = FAMILIES[self._family].grammar
        if isinstance(grammar, Channels):
            return self._channels(prompt_end)
        if grammar.think is None:
            return Prologue()
        ends = tuple(end.encode() for end in grammar.think.ends)
        if start_in_reasoning(self._family, prompt_end):
            return Prologue(ends, is_open=True)
        if prompt_end.rstrip().endswith(grammar.think.ends):
            return Prologue()
        # A model begins with reasoning only if it was trained to, so its template must contain the marker.
        starts = [start for start in grammar.think.starts if start in self._template]
        return Prologue(ends, openers=self._single(starts))

    def _channels(self, prompt_end: str) -> Prologue:
        """Return Harmony's prologue: each message names its channel, and the answer is the message in `final`."""
        final = "<|channel|>final<|message|>"
        if len(self._single(("<|channel|>", "<|message|>"))) < 2 or prompt_end.endswith(final):
            return Prologue()
        return Prologue((final.encode(),), is_open=True)

    def _single(self, markers: Sequence[str]) -> tuple[int, ...]:
        """Return the ids of those markers that are a single token which the model can generate."""
        ids = (self._vocabulary.get(marker) for marker in markers)
        return tuple(at for at in ids if at is not None and at < len(self._anything))

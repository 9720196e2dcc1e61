"""Compiler of constraints into grammars. Thread-safe; its calls may take seconds.

Clients may send any constraint: its size is bounded before llguidance gets it, llguidance's own limits bound every
later step, and a grammar is tried for a few tokens before a request may use it.
"""

import hashlib
import json
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Final, assert_never, cast

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from protocol.failures import Code, Failure
from protocol.to_worker import Constraint, ConstraintKind
from worker.errors import RequestInvalid
from worker.output.stops import encodable
from worker.structured.schema_checks import SchemaInvalid, bound, check, dangling, exact, loosened, modern, repaired

Allowed = npt.NDArray[np.bool_]
"""`[vocab]`: which tokens may come next."""

MAX_BYTES: Final = 256 * 1024
MAX_CHOICES: Final = 10_000
MAX_CACHED: Final = 128
# Maximum CPU time of one mask in the trial. A slower mask would delay its row at every token.
MAX_TRIAL_S: Final = 0.5
TRIAL_WALKS: Final = 2
TRIAL_TOKENS: Final = 12
# Everyday schemas are far below these limits. A grammar at the limits takes tens of milliseconds for its slowest mask.
_LEXER_FUEL: Final = 100_000
# Masks at the start of a call that a value quotes need more: up to 200,000 with 40 tools, in one family more.
_CALLS_LEXER_FUEL: Final = 500_000


def _limits(step_lexer_fuel: int) -> LLParserLimits:
    return LLParserLimits(
        step_lexer_fuel=step_lexer_fuel,
        step_max_items=25_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


# Only one space is allowed where JSON allows any whitespace: a weak model would otherwise generate newlines forever.
_JSON_OPTIONS: Final[dict[str, Any]] = {
    "whitespace_flexible": True,
    "whitespace_pattern": "[ ]",
    "lenient": False,
    "coerce_one_of": False,
}
# Keys may use every escape except `\\u`: llguidance would accept `"\\u0061"` as a second key "a", of any type.
_PLAIN_KEYS: Final[dict[str, Any]] = {"json_allowed_escapes": 'bfnrt\\"'}
_MULTIPLE: Final = re.compile(r'"multipleOf"\s*:\s*([-+0-9.eE]{1,40})')
_JSON_RULE: Final = re.compile(r"%json\s*(?=\{)")
_QUOTED: Final = re.compile(r'"([^"]*)"')
_decoder: Final = json.JSONDecoder()
_MAX_MESSAGE: Final = 400


class GrammarFailed(Exception):
    """Raised when a grammar reaches a limit, or when it allows no token."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """Compiled grammar. `prototype` is never advanced; each sequence uses a copy.

    `deviations` names the parts of a schema that the grammar does not enforce; a strict schema must have none.
    """

    table: LLTokenizer
    prototype: LLMatcher
    vocab_size: int
    deviations: tuple[str, ...] = ()

    def walk(self) -> "GrammarWalk":
        return GrammarWalk(self.table, self.prototype.deep_copy(), self.vocab_size)


class GrammarWalk:
    """Position of one sequence in its grammar. Used by one thread at a time; the GIL is free while it works."""

    __slots__ = ("_matcher", "_table", "_vocab_size", "_words")

    def __init__(self, table: LLTokenizer, matcher: LLMatcher, vocab_size: int) -> None:
        self._table = table
        self._vocab_size = vocab_size
        self._matcher = matcher
        self._words = np.zeros(-(-table.vocab_size // 32), dtype=np.uint32)

    def take(self, tokens: Sequence[int]) -> None:
        """Advance by these tokens. Raises `GrammarFailed` if the grammar does not allow them."""
        if not self._matcher.consume_tokens(list(tokens)):
            raise GrammarFailed(_reason(self._matcher.get_error()))

    def fork(self) -> "GrammarWalk":
        """Return an independent walk at the same position."""
        return GrammarWalk(self._table, self._matcher.deep_copy(), self._vocab_size)

    def forced(self) -> list[int]:
        """Return the tokens that the grammar forces next; often there are none.

        The list ends before an id that only the tokenizer has, because a model must not get such an id.
        """
        tokens: list[int] = self._matcher.compute_ff_tokens()
        beyond = (at for at, token in enumerate(tokens) if token >= self._vocab_size)
        return tokens[: next(beyond, len(tokens))]

    @property
    def is_complete(self) -> bool:
        """Whether the text so far completely matches the grammar."""
        return self._matcher.is_accepting()

    def fits(self, tokens: Sequence[int]) -> bool:
        """Return whether these tokens may come next, in this order."""
        return self._matcher.validate_tokens(list(tokens)) == len(tokens)

    def take_bytes(self, text: bytes) -> None:
        """Advance by text that is only a part of a token."""
        self.take(self._table.tokenize_bytes(text))

    def allowed(self) -> Allowed:
        """Return the allowed next tokens, at least one. Raises `GrammarFailed`."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if self._matcher.is_error():
            raise GrammarFailed(_reason(self._matcher.get_error()))
        bits = np.unpackbits(self._words.view(np.uint8), count=self._vocab_size, bitorder="little")
        if not bits.any():
            raise GrammarFailed("no token of this model fits")
        return bits.view(np.bool_)


@dataclass(slots=True)
class _Entry:
    """Cache entry of one constraint; its lock is held while the constraint is compiled."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    outcome: CompiledGrammar | Failure | None = None


class Grammars:
    """Compiler of constraints for one tokenizer, with a cache of compiled grammars and of refused constraints."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """`tokenizer` is a tokenizer of transformers; ids from its size up to `vocab_size` are never allowed."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._table_lock = threading.Lock()
        self._table: LLTokenizer | None = None

    def compile(self, constraint: Constraint, calls: str = "", *, is_of_calls: bool = False) -> CompiledGrammar:
        """Return the grammar of `constraint`; equal constraints share one. Raises `RequestInvalid`.

        `calls` is a Lark grammar, or empty. If it is given, the output may match either grammar. `is_of_calls` is set
        if `constraint` is a grammar of calls that mlxd wrote: its masks may take longer than those of a client's.
        """
        limits = _limits(_CALLS_LEXER_FUEL if calls or is_of_calls else _LEXER_FUEL)
        entry = self._entry(constraint, calls, is_of_calls=is_of_calls)
        with entry.lock:
            if entry.outcome is None:
                entry.outcome = self._try(constraint, calls, limits)
        if isinstance(entry.outcome, CompiledGrammar):
            return entry.outcome
        raise RequestInvalid(entry.outcome.code, entry.outcome.message, param=constraint.param)

    def _entry(self, constraint: Constraint, calls: str, *, is_of_calls: bool) -> _Entry:
        text = f"{constraint.kind:d}\0{constraint.is_strict:d}\0{is_of_calls:d}\0{calls}\0{constraint.text}"
        key = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            if len(self._entries) > MAX_CACHED:
                self._entries.popitem(last=False)
        return entry

    def _try(self, constraint: Constraint, calls: str, limits: LLParserLimits) -> CompiledGrammar | Failure:
        try:
            if constraint.is_strict or constraint.kind is not ConstraintKind.JSON_SCHEMA:
                grammar = self._make(_source(constraint), calls, limits)
            else:
                grammar = self._make_loosely(constraint, calls, limits)
        except GrammarFailed as error:
            what = constraint.kind.name.lower().replace("_", " ")
            return Failure(Code.INVALID_REQUEST, encodable(f"this {what} cannot be enforced: {error}"))
        except RequestInvalid as error:
            return error.failure
        except BaseException as error:  # PyO3 raises a Rust panic as a BaseException; it fails this grammar only
            if type(error).__name__ != "PanicException":
                raise
            return Failure(Code.INVALID_REQUEST, "this grammar cannot be enforced: it is too complex", repr(error))
        return grammar

    def _make(self, source: str, calls: str, limits: LLParserLimits, deviations: Sequence[str] = ()) -> CompiledGrammar:
        table = self.table()
        matcher = LLMatcher(table, _either(calls, source) if calls else source, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarFailed(_reason(matcher.get_error()))
        grammar = CompiledGrammar(table, matcher, self._vocab_size, (*deviations, *_skipped(matcher)))
        _try_out(grammar, self._eos_ids)
        return grammar

    def _make_loosely(self, constraint: Constraint, calls: str, limits: LLParserLimits) -> CompiledGrammar:
        """Compile as much of a schema as possible: all of it, all but its faults or some keywords, its shape, or any
        object."""
        schema = _schema(constraint.text)
        without_faults, faults = repaired(schema, dangling(schema))
        ways = [(False, schema, ()), *((True, way, (*faults, *lacks)) for way, lacks in loosened(without_faults))]
        for is_lenient, way, deviations in ways:
            try:
                return self._make(_json_schema(way, is_lenient=is_lenient), calls, limits, deviations)
            except GrammarFailed:
                continue
        return self._make(_json('{"type": "object"}', _JSON_OPTIONS), calls, limits, ("everything but an object",))

    def table(self) -> LLTokenizer:
        """Return the tokenizer in llguidance's format. Raises `RequestInvalid`."""
        with self._table_lock:
            if self._table is None:
                try:
                    # Some tokenizers have more ids than the output of their model.
                    size = max(self._vocab_size, len(self._tokenizer))
                    self._table = LLTokenizer(_serialized(self._tokenizer), n_vocab=size, eos_token=self._eos_ids)
                except ValueError as error:
                    message = "this model's tokenizer cannot be constrained"
                    raise RequestInvalid(Code.UNSUPPORTED, message, detail=str(error)) from error
            return self._table


def _serialized(tokenizer: Any) -> str:
    """Serialize a tokenizer as JSON, with the added tokens that its `tokenizer.json` may lack. Raises ValueError."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("it is not of the tokenizers library")
    backend = copy(backend)
    backend.no_padding()
    backend.no_truncation()
    return backend.to_str()


def _source(constraint: Constraint) -> str:
    """Return the source for llguidance. Raises `GrammarFailed` for constraints that are visibly invalid."""
    text = constraint.text
    if len(text) > MAX_BYTES or len(text.encode(errors="surrogatepass")) > MAX_BYTES:
        raise GrammarFailed(f"it is larger than {MAX_BYTES} bytes")
    if "\0" in text or (not text.isprintable() and _has_surrogate(text)):
        raise GrammarFailed("it holds characters that are not text")
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return _json('{"type": "object"}', _JSON_OPTIONS)
        case ConstraintKind.JSON_SCHEMA:
            return _json_schema(_schema(text))
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(text)
        case ConstraintKind.GRAMMAR:
            _check_schemas(text)
            return LLMatcher.grammar_from_lark(_lark(text))
        case ConstraintKind.CHOICE:
            # All choices are one terminal, because llguidance takes at most 2,000 alternatives in a rule.
            choices = " | ".join(json.dumps(each) for each in _choices(text))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case _:
            assert_never(constraint.kind)


def _either(calls: str, answer: str) -> str:
    """Join two grammars as alternatives. `answer` is the output of `_source`: Lark, or a JSON list of grammars."""
    inner = json.loads(answer)["grammars"][0] if answer.startswith('{"grammars"') else {"lark_grammar": answer}
    start = {"lark_grammar": "start: @calls | @answer"}
    return json.dumps({"grammars": [start, {"name": "calls", "lark_grammar": calls}, {**inner, "name": "answer"}]})


def lark_json(schema: dict[str, Any]) -> str:
    """Return the Lark rule of a JSON value that matches `schema`. Whitespace is restricted by `_JSON_OPTIONS`.

    Schema keywords that cannot be enforced are skipped.
    """
    options = {**_JSON_OPTIONS, "lenient": True}
    with suppress(SchemaInvalid, RecursionError, OverflowError):
        check(schema)
        rewrite = exact(schema)
        schema, options = rewrite.schema, options | (_PLAIN_KEYS if rewrite.has_loose_keys else {})
    return "%json " + json.dumps({**schema, "x-guidance": options})


def _json(schema: str, options: dict[str, Any]) -> str:
    # The options are overrides, so that a schema's own `x-guidance` cannot make it lenient.
    return LLMatcher.grammar_from_json_schema(schema, overrides=cast(Any, options))


def _skipped(matcher: LLMatcher) -> Iterator[str]:
    """Yield the keywords and formats that a lenient grammar does not enforce."""
    for warning in matcher.get_grammar_warnings():
        what, _, names = warning.partition(": ")
        if what == "Unimplemented keys":
            yield from _QUOTED.findall(names)
        elif what == "Unknown format":
            yield f"format {names}"


def _schema(text: str) -> dict[str, Any]:
    """Parse a JSON schema. Raises `GrammarFailed`."""
    with _refusing():
        schema: Any = json.loads(text)
        schema = modern(cast(dict[str, Any], schema)) if isinstance(schema, dict) else schema
        check(schema)
        if isinstance(schema, bool):
            raise SchemaInvalid("it is not an object")
        return schema


def _json_schema(schema: dict[str, Any], *, is_lenient: bool = False) -> str:
    with _refusing():
        rewrite = exact(schema)
        written = json.dumps(rewrite.schema, ensure_ascii=False, allow_nan=False)
        written.encode()
    options = _JSON_OPTIONS | {"lenient": is_lenient}
    return _json(written, options | _PLAIN_KEYS if rewrite.has_loose_keys else options)


@contextmanager
def _refusing() -> Generator[None]:
    """Translate errors from reading a schema to `GrammarFailed`."""
    try:
        yield
    except SchemaInvalid as error:
        raise GrammarFailed(str(error)) from error
    except UnicodeEncodeError as error:
        raise GrammarFailed("it holds characters that are not text") from error
    except RecursionError as error:
        raise GrammarFailed("it is nested too deeply") from error
    except OverflowError as error:
        raise GrammarFailed("it holds a number that is too large") from error
    except ValueError as error:
        raise GrammarFailed(f"it is not JSON: {error}") from error


def _check_schemas(text: str) -> None:
    """Apply the bounds of JSON schemas to the schemas inside a Lark grammar."""
    try:
        for written in _MULTIPLE.findall(text):
            check({"multipleOf": json.loads(written)})
        for match in _JSON_RULE.finditer(text):
            schema, _ = _decoder.raw_decode(text, match.end())
            check(schema)
            bound(schema)
    except SchemaInvalid as error:
        raise GrammarFailed(f"a schema in it: {error}") from error
    except (ValueError, RecursionError, OverflowError) as error:
        raise GrammarFailed("a schema in it cannot be read") from error


def _lark(text: str) -> str:
    try:
        return any_to_lark(text)
    except Exception as error:  # llguidance's GBNF parser is plain Python and raises many types of errors
        raise GrammarFailed(f"it is neither Lark nor GBNF: {error}") from error


def _choices(text: str) -> list[str]:
    try:
        choices: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarFailed(f"it is not JSON: {error}") from error
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) and each for each in choices):
        raise GrammarFailed("it is not a list of texts")
    if len(choices) > MAX_CHOICES:
        raise GrammarFailed(f"it has more than {MAX_CHOICES} entries")
    return cast(list[str], choices)


def _try_out(grammar: CompiledGrammar, eos_ids: Sequence[int]) -> None:
    """Advance a few tokens along random paths, to refuse a grammar that allows no text or is too slow."""
    for seed in range(TRIAL_WALKS):
        rng, walk = random.Random(seed), grammar.walk()
        for _ in range(TRIAL_TOKENS):
            started = time.thread_time()
            allowed = np.flatnonzero(walk.allowed())
            if time.thread_time() - started > MAX_TRIAL_S:
                raise GrammarFailed("it takes too long to follow")
            token = int(allowed[rng.randrange(len(allowed))])
            if token in eos_ids:
                break
            walk.take([token])


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


def _reason(error: str) -> str:
    """Return an error message of llguidance without the state and stack that it appends."""
    for end in ("\n<state>", "<non-verbose/>", "\n<backtrace>", "<backtrace>"):
        error = error.partition(end)[0]
    if error.startswith("panic"):
        return "it is too complex"
    if error.startswith("NoExtension"):
        return "no text fits it"
    return " ".join(error.split())[:_MAX_MESSAGE] or "it is too complex"

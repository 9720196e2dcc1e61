"""Compiling constraints: remembered, bounded, and never fatal."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.utils import load_tokenizer

from protocol import codec
from protocol.failures import Code
from protocol.from_worker import Rejected
from protocol.to_worker import Constraint, ConstraintKind
from tests.support.scale import patient
from worker.errors import RequestInvalid
from worker.structured import grammar_compiler as grammars
from worker.structured.grammar_compiler import GrammarFailed, Grammars, GrammarWalk
from worker.structured.schema_checks import SchemaInvalid, check

KIND = ConstraintKind
VOCAB = 512


@pytest.fixture(scope="module")
def tokenizer(model_folder: Callable[[str], Path]) -> Any:
    return load_tokenizer(model_folder("qwen3"))


def made(tokenizer: Any, vocab_size: int = VOCAB) -> Grammars:
    return Grammars(tokenizer, vocab_size, sorted(tokenizer.eos_token_ids))


def regex(text: str) -> Constraint:
    return Constraint(KIND.REGEX, text)


def schema(document: dict[str, Any]) -> Constraint:
    return Constraint(KIND.JSON_SCHEMA, json.dumps(document))


def test_a_constraint_is_compiled_once_whoever_asks(tokenizer: Any) -> None:
    compiler = made(tokenizer)
    first = compiler.compile(regex("[a-c]{4}"))
    assert compiler.compile(Constraint(KIND.REGEX, "[a-c]{4}", param="guided_regex")) is first
    assert compiler.compile(Constraint(KIND.GRAMMAR, 'start: "[a-c]{4}"')) is not first


def test_threads_that_ask_at_once_share_one_compilation(tokenizer: Any) -> None:
    compiler = made(tokenizer)
    gate = threading.Barrier(6)
    grammars_seen: list[object] = []

    def ask() -> None:
        gate.wait(patient(10))
        grammars_seen.append(compiler.compile(regex("(foo|bar){3}")))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(grammars_seen) == 6
    assert len(set(map(id, grammars_seen))) == 1


def test_a_refusal_is_remembered_too_and_names_each_askers_parameter(tokenizer: Any) -> None:
    compiler = made(tokenizer)
    messages: list[str] = []
    for param in ("guided_regex", "structured_outputs.regex"):
        with pytest.raises(RequestInvalid) as caught:
            compiler.compile(Constraint(KIND.REGEX, "(", param=param))
        assert caught.value.failure.code is Code.INVALID_REQUEST
        assert caught.value.failure.param == param
        messages.append(caught.value.failure.message)
    assert messages[0] is messages[1]


def test_the_least_recently_used_grammar_is_forgotten(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_CACHED", 2)
    compiler = made(tokenizer)
    first, second, *others = [compiler.compile(regex(text)) for text in ("a", "b", "a", "c", "a")]
    assert others[0] is others[2] is first
    assert compiler.compile(regex("b")) is not second


def test_ids_that_the_tokenizer_does_not_have_are_never_allowed(tokenizer: Any) -> None:
    padded = made(tokenizer, vocab_size=700)
    allowed = padded.compile(regex("(?s:.*)")).walk().allowed()
    assert allowed.shape == (700,)
    assert allowed.any()
    assert not allowed[len(tokenizer) :].any()


def test_a_tokenizer_with_more_ids_than_its_model_is_cut(tokenizer: Any) -> None:
    small = made(tokenizer, vocab_size=400)
    allowed = small.compile(regex("(?s:.*)")).walk().allowed()
    assert allowed.shape == (400,)
    assert allowed.any()


def test_tokens_that_a_grammar_forces_end_before_one_that_the_model_lacks(tokenizer: Any) -> None:
    grammar = made(tokenizer).compile(regex("to demira miantode"))
    first, second, _ = forced = grammar.walk().forced()
    assert forced == tokenizer.encode("to demira miantode")
    assert first < second
    assert GrammarWalk(grammar.table, grammar.prototype.deep_copy(), second).forced() == [first]


def test_control_tokens_are_allowed_only_where_a_grammar_names_them(tokenizer: Any) -> None:
    compiler = made(tokenizer)
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert not compiler.compile(regex("(?s:.*)")).walk().allowed()[start]
    assert np.flatnonzero(compiler.compile(Constraint(KIND.GRAMMAR, f"start: <[{start}]>")).walk().allowed()) == [start]


def test_walks_on_one_grammar_are_independent(tokenizer: Any) -> None:
    grammar = made(tokenizer).compile(regex("ab|ba"))
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    one, other = grammar.walk(), grammar.walk()
    one.take([a])
    other.take([b])
    assert list(np.flatnonzero(one.allowed())) == [b]
    assert list(np.flatnonzero(other.allowed())) == [a]
    with pytest.raises(GrammarFailed):
        one.take([a])


HOSTILE: list[tuple[str, Constraint]] = [
    ("deep schema", Constraint(KIND.JSON_SCHEMA, '{"items":' * 20_000 + "{}" + "}" * 20_000)),
    ("deep array", Constraint(KIND.CHOICE, "[" * 100_000)),
    ("deep regex", regex("(" * 50_000 + "a" + ")" * 50_000)),
    ("deep lark", Constraint(KIND.GRAMMAR, "start: " + "(" * 50_000 + '"a"' + ")" * 50_000)),
    ("counted regex", regex("((a{100}){100}){1000}")),
    ("long counted regex", regex("a{1000000}")),
    ("many properties", schema({"type": "object", "properties": {f"p{at}": {} for at in range(8000)}})),
    ("remainders", Constraint(KIND.JSON_SCHEMA, '{"type": "integer", "multipleOf": 99999989}')),
    ("remainders in lark", Constraint(KIND.GRAMMAR, 'start: %json {"type": "integer", "multipleOf": 99999989}')),
    ("product", schema({"allOf": [{"anyOf": [{"properties": {f"a{at}": {}}} for at in range(10)]}] * 5})),
    ("null bytes", regex("a\0b")),
    ("half a character", Constraint(KIND.CHOICE, '["\\ud800"]')),
    ("an endless loop", Constraint(KIND.GRAMMAR, "start: start")),
    ("no text", regex("")),
]  # fmt: skip


@pytest.mark.parametrize("constraint", [case[1] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_hostile_constraints_are_refused_or_bounded(constraint: Constraint, tokenizer: Any) -> None:
    compiler = made(tokenizer)
    started = time.thread_time()
    with suppress(RequestInvalid, GrammarFailed):
        walk = compiler.compile(constraint).walk()
        for _ in range(20):
            step = time.thread_time()
            allowed = np.flatnonzero(walk.allowed())
            if (token := int(allowed[-1])) in tokenizer.eos_token_ids:
                break
            walk.take([token])
            assert time.thread_time() - step < 1.0
    assert time.thread_time() - started < 30.0


def test_a_refusal_is_short_and_holds_no_stack(tokenizer: Any) -> None:
    for constraint in (regex("((a{100}){100}){1000}"), regex("(?=" * 500), Constraint(KIND.GRAMMAR, "start: start")):
        try:
            made(tokenizer).compile(constraint)
        except RequestInvalid as refusal:
            message = refusal.failure.message
            assert_short(message)


def assert_short(message: str) -> None:
    assert len(message) < 600
    assert "backtrace" not in message
    assert "<state>" not in message


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "exclusiveMaximum": True},
        {"minLength": -1},
        {"minItems": 1.5},
        {"type": []},
        {"enum": []},
        {"anyOf": {}},
        {"properties": {"a": {"items": 3}}},
        {"required": ["a", 1]},
        {"$defs": {"x": {"multipleOf": 0}}},
        {"multipleOf": True},
        [],
        None,
    ],
)
def test_what_is_no_schema_is_found(schema: Any) -> None:
    with pytest.raises(SchemaInvalid):
        check(schema)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"enum": [{"minLength": -1}], "default": {"type": 3}},
        {"properties": {"minLength": {"type": "string"}, "items": {"const": -1}}},
        {"multipleOf": 0.01, "items": {"multipleOf": 5}},
        {"maxLength": 5.0},
    ],
)
def test_what_is_a_schema_is_left_alone(schema: Any) -> None:
    check(schema)


@pytest.mark.parametrize(
    "broken",
    [
        '{"properties": {"\\ud800": {"type": 5}}}',
        '{"properties": {"\\ud800": 5}}',
        '{"properties": {"\\ud800": {"const": 1e300}}}',
        '{"properties": {"\\ud800": {"pattern": "[a-z&&[^b]]"}}}',
        '{"properties": {"\\ud800": {"minProperties": 2}}}',
    ],
)
@pytest.mark.parametrize("kind", [KIND.JSON_SCHEMA, KIND.GRAMMAR])
def test_a_refusal_that_quotes_half_a_surrogate_can_be_sent(tokenizer: Any, kind: ConstraintKind, broken: str) -> None:
    text = broken if kind is KIND.JSON_SCHEMA else f"start: %json {broken}"
    with pytest.raises(RequestInvalid) as caught:
        made(tokenizer).compile(Constraint(kind, text))
    codec.encode(Rejected(1, caught.value.failure))


@pytest.mark.parametrize("pattern", ["[" * 250_000, "[" * 250_000 + "\\", "[\\" * 120_000])
def test_a_long_pattern_of_brackets_that_are_never_closed_is_refused_at_once(tokenizer: Any, pattern: str) -> None:
    text = json.dumps({"type": "string", "pattern": pattern})
    with pytest.raises(RequestInvalid):  # a search for the end of each would hold all threads for minutes
        made(tokenizer).compile(Constraint(KIND.JSON_SCHEMA, text))


def test_as_many_choices_as_are_allowed_can_be_held(tokenizer: Any) -> None:
    choices = ["a", "ab", 'né"\n', *(f"{at} of many" for at in range(grammars.MAX_CHOICES - 3))]
    walker = made(tokenizer).compile(Constraint(KIND.CHOICE, json.dumps(choices)))

    def holds(text: str) -> bool:
        walk = walker.walk()
        with suppress(GrammarFailed):
            walk.take_bytes(text.encode())
            return walk.is_complete
        return False

    assert all(holds(text) for text in ("a", "ab", 'né"\n', "0 of many", "9996 of many"))
    assert not any(holds(text) for text in ("", "abc", "9997 of many", "0 of man"))


def test_one_choice_more_is_refused_in_a_sentence_about_choices(tokenizer: Any) -> None:
    choices = [str(at) for at in range(grammars.MAX_CHOICES + 1)]
    with pytest.raises(RequestInvalid, match="it has more than 10000 entries"):
        made(tokenizer).compile(Constraint(KIND.CHOICE, json.dumps(choices)))


# As pydantic writes a model with a set, a path, bytes and a pattern that looks ahead.
PYDANTIC: dict[str, Any] = {
    "properties": {
        "tags": {"items": {"type": "string"}, "type": "array", "uniqueItems": True},
        "file": {"format": "path", "type": "string"},
        "raw": {"format": "binary", "type": "string"},
        "when": {"format": "date", "type": "string"},
        "count": {"type": "integer", "minimum": 1},
    },
    "required": ["tags", "file", "raw", "when", "count"],
    "title": "Found",
    "type": "object",
    "additionalProperties": False,
}
FOUND = '{"tags": ["a"], "file": "/x", "raw": "y", "when": "2026-01-31", "count": 1}'


def loose(document: Any) -> Constraint:
    return Constraint(KIND.JSON_SCHEMA, json.dumps(document), is_strict=False)


def accepts(compiler: Grammars, constraint: Constraint, text: str) -> bool:
    walk = compiler.compile(constraint).walk()
    with suppress(GrammarFailed):
        walk.take_bytes(text.encode())
        return walk.is_complete
    return False


def test_what_of_a_schema_cannot_be_held_is_left_out_and_named_where_it_need_not_be_strict(tokenizer: Any) -> None:
    compiler = made(tokenizer)
    assert set(compiler.compile(loose(PYDANTIC)).deviations) == {"uniqueItems", "format path", "format binary"}
    assert accepts(compiler, loose(PYDANTIC), FOUND)
    for old, new in (('["a"]', "[1]"), ('"/x"', "1"), ("2026-01-31", "today"), ('"count": 1', '"count": 0')):
        assert not accepts(compiler, loose(PYDANTIC), FOUND.replace(old, new))
    with pytest.raises(RequestInvalid, match="cannot be enforced"):
        compiler.compile(schema(PYDANTIC))


def test_a_schema_that_can_be_held_is_held_to_the_letter_though_it_need_not_be(tokenizer: Any) -> None:
    compiler = made(tokenizer)
    document = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x+$"}}, "required": ["a"]}
    assert compiler.compile(loose(document)).deviations == ()
    assert accepts(compiler, loose(document), '{"a": "xx"}')
    assert not accepts(compiler, loose(document), '{"a": "y"}')


@pytest.mark.parametrize(
    ("fields", "deviations", "right", "wrong"),
    [
        ({"type": "string", "pattern": "(?=x)x+"}, ("pattern",), '"y"', "1"),
        ({"type": "number", "minimum": 2**70}, ("minimum",), "1", '"y"'),
        ({"type": "integer", "pattern": "(?=x)", "maximum": -(2**70)}, ("pattern", "maximum"), "1", "1.5"),
    ],
)
def test_where_a_keyword_spoils_a_schema_its_shape_is_held(
    tokenizer: Any, fields: dict[str, Any], deviations: tuple[str, ...], right: str, wrong: str
) -> None:
    document = {"type": "object", "properties": {"a": fields}, "required": ["a"]}
    compiler = made(tokenizer)
    assert compiler.compile(loose(document)).deviations == deviations
    assert accepts(compiler, loose(document), f'{{"a": {right}}}')
    assert not accepts(compiler, loose(document), f'{{"a": {wrong}}}')


@pytest.mark.parametrize("document", [{"type": 5}, {"properties": 1}, True, [1], {"required": "a"}])
def test_what_is_no_schema_is_refused_also_where_it_need_not_be_strict(tokenizer: Any, document: Any) -> None:
    with pytest.raises(RequestInvalid):
        made(tokenizer).compile(loose(document))

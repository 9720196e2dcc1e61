"""Schemas of older drafts are enforced as they are meant, and one fault in a schema costs only its keyword."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from protocol.to_worker import ChatPrompt, Constraint, ConstraintKind
from tests.support.calls import CALLING, Called, check, tool
from tests.support.scale import scaled
from tests.worker.structured.test_grammar_compiler import accepts, made
from tests.worker.structured.test_tool_grammar import make, walk
from worker.errors import RequestInvalid
from worker.structured.schema_checks import dangling, modern, repaired


@pytest.fixture(scope="module")
def tokenizer(model_folder: Callable[[str], Path]) -> Any:
    return load_tokenizer(model_folder("qwen3"))


def constraint(document: dict[str, Any], is_strict: bool) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(document), is_strict=is_strict)


INTEGER: dict[str, Any] = {"type": "integer"}
# As zod writes z.tuple in draft 7, with a reference to an item that it has seen before.
TUPLE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "at": {"type": "array", "minItems": 2, "maxItems": 2, "items": [INTEGER, {"enum": ["a", "b"]}]},
        "more": {"type": "array", "items": [INTEGER], "additionalItems": {"type": "string"}},
        "one": {"$ref": "#/properties/at/items/1"},
    },
    "required": ["at", "more", "one"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"at": [1, "a"], "more": [1, "x", "y"], "one": "b"}', True),
        ('{"at": [1, "a"], "more": [], "one": "b"}', True),
        ('{"at": [""], "more": [1], "one": "b"}', False),
        ('{"at": ["a", 1], "more": [1], "one": "b"}', False),
        ('{"at": [1, "a", 2], "more": [1], "one": "b"}', False),
        ('{"at": [1, "a"], "more": [1, 2], "one": "b"}', False),
        ('{"at": [1, "a"], "more": [1], "one": 1}', False),
    ],
)
def test_a_tuple_of_draft_7_is_enforced(tokenizer: Any, text: str, fits: bool, is_strict: bool) -> None:
    compiler = made(tokenizer)
    assert compiler.compile(constraint(TUPLE, is_strict)).deviations == ()
    assert accepts(compiler, constraint(TUPLE, is_strict), text) is fits


def test_only_places_of_schemas_are_rewritten() -> None:
    plain = {"properties": {"items": {"const": {"items": [1]}}}, "enum": [{"items": [{}]}], "default": {"items": [{}]}}
    assert modern(plain) == plain
    assert modern({"items": [], "additionalItems": False}) == {"items": False}
    assert modern({"additionalItems": False}) == {"additionalItems": False}


def whole(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"n": INTEGER, **properties}, "required": ["n"]}


FAULTS: list[tuple[dict[str, Any], tuple[str, ...], list[str]]] = [
    (whole(x={"$ref": "#/$defs/gone"}), ("$ref",), ['{"n": 1, "x": "any"}']),
    (whole(x={"$ref": "https://x.example/y.json"}), ("$ref",), ['{"n": 1, "x": [1]}']),
    (whole(x={"$ref": "#gone"}), ("$ref",), ['{"n": 1, "x": 1}']),
    (whole(x={"type": "array", "items": {"$ref": "#/$defs/gone"}}), ("$ref",), ['{"n": 1, "x": [1]}']),
    (whole(x={"type": "date"}), ("type",), ['{"n": 1, "x": "today"}']),
    ({"type": "OBJECT", "properties": {"n": {"type": "Integer"}}, "required": ["n"]}, ("type",), ['{"n": 1}']),
    ({"type": "dict", "properties": {"n": INTEGER}, "required": ["n"]}, ("type",), ['{"n": 1}']),
    ({**whole(), "required": ["n", "m"], "additionalProperties": False}, ("required",), ['{"n": 1}']),
    (
        {**whole(x={"$ref": "#/gone", "type": "NULL"}), "required": ["n", "m"], "additionalProperties": False},
        ("$ref", "required", "type"),
        ['{"n": 1, "x": null}'],
    ),
    (whole(x={"$ref": "#/gone"}, y={"type": "string", "pattern": "(?=a)"}), ("$ref", "pattern"), ['{"n": 1, "y": ""}']),
]


@pytest.mark.parametrize(("document", "deviations", "right"), FAULTS)
def test_one_fault_relaxes_only_its_keyword_and_is_named(
    tokenizer: Any, document: dict[str, Any], deviations: tuple[str, ...], right: list[str]
) -> None:
    compiler, loose = made(tokenizer), constraint(document, is_strict=False)
    assert compiler.compile(loose).deviations == deviations
    assert all(accepts(compiler, loose, text) for text in right)
    assert not any(accepts(compiler, loose, text.replace('"n": 1', '"n": "1"')) for text in right)
    assert not accepts(compiler, loose, '"n"')
    with pytest.raises(RequestInvalid, match="cannot be enforced"):
        compiler.compile(constraint(document, is_strict=True))


def test_a_whole_that_refers_to_nothing_is_still_an_object(tokenizer: Any) -> None:
    compiler, loose = made(tokenizer), constraint({"$ref": "#/definitions/gone"}, is_strict=False)
    assert compiler.compile(loose).deviations == ("$ref",)
    assert accepts(compiler, loose, '{"a": 1}')
    assert not accepts(compiler, loose, "1")


@pytest.mark.parametrize(
    "document",
    [
        {"$ref": "#"},
        {"$defs": {"a": INTEGER}, "properties": {"x": {"$ref": "#/$defs/a"}, "y": {"$ref": "#/properties/x"}}},
        {"properties": {"x": {"$anchor": "a"}, "y": {"$ref": "#a"}}},
        {"properties": {"x": {"$id": "https://x.example/a"}, "y": {"$ref": "https://x.example/a"}}},
        {"required": ["x1"], "patternProperties": {"^x": {}}, "additionalProperties": False},
        {"required": ["x"], "properties": {"x": {}}, "type": ["object", "null"]},
    ],
)
def test_a_schema_without_faults_is_left_alone(document: dict[str, Any]) -> None:
    assert repaired(document, dangling(document)) == (document, ())


@pytest.mark.parametrize("family", CALLING)
def test_required_calls_hold_tuples_and_the_rest_of_a_schema_with_faults(family: str) -> None:
    pair = {"type": "array", "items": [INTEGER, {"type": "boolean"}], "minItems": 2, "maxItems": 2}
    held: dict[str, Any] = {"type": "object", "properties": {"at": pair, "n": INTEGER}, "required": ["at", "n"]}
    faulty = {**held, "required": ["at", "n", "m"], "properties": {**held["properties"], "x": {"$ref": "#/gone"}}}
    rule = make(family, ChatPrompt([], [tool("f", faulty)], must_call=True, one_call=True))
    assert "$ref" in rule.grammar.deviations
    assert "everything but an object" not in rule.grammar.deviations
    # A walk through a value of any type may come to no end.
    texts = [text for seed in range(scaled(8, 4)) if (text := walk(rule, seed)) is not None]
    assert texts
    for text in texts:
        called = Called.read(family, text, [tool("f", modern(faulty))])
        check(called.calls, [tool("f", modern(held))])
        assert all("m" in json.loads(arguments) for _, arguments in called.calls)

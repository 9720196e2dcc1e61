"""Structured output in every spelling that clients use, as one constraint on the wire."""

import json
from itertools import count
from typing import Any

import pytest

from gateway.api.openai.lowering import lower_chat, lower_completion
from gateway.api.openai.request import decode_chat, decode_completion
from gateway.config.settings import ModelConfig
from gateway.errors import BadRequest
from protocol.to_worker import Constraint, ConstraintKind

KIND = ConstraintKind
MODEL = ModelConfig(name="m", path="m")
SCHEMA = {"type": "object", "properties": {"né": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, ensure_ascii=False)


def chat(**fields: Any) -> Constraint | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    request, unknown = decode_chat(json.dumps(body).encode())
    assert unknown == []
    made = lower_chat(request, MODEL, count(1).__next__, 7)
    assert len({generate.constraint for generate in made}) == 1
    return made[0].constraint


def completion(**fields: Any) -> Constraint | None:
    request, unknown = decode_completion(json.dumps({"model": "m", "prompt": "x", **fields}).encode())
    assert unknown == []
    return lower_completion(request, MODEL, count(1).__next__, 7)[0].constraint


SPELLINGS: list[tuple[dict[str, Any], tuple[ConstraintKind, str, str]]] = [
    ({"response_format": {"type": "json_object"}}, (KIND.JSON_OBJECT, "", "response_format")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}},
        (KIND.JSON_SCHEMA, TEXT, "response_format.json_schema.schema"),
    ),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        (KIND.JSON_SCHEMA, TEXT, "response_format.schema"),
    ),
    ({"response_format": {"type": "grammar", "grammar": "g"}}, (KIND.GRAMMAR, "g", "response_format.grammar")),
    ({"guided_json": SCHEMA}, (KIND.JSON_SCHEMA, TEXT, "guided_json")),
    ({"guided_json": TEXT}, (KIND.JSON_SCHEMA, TEXT, "guided_json")),
    ({"guided_regex": "[a-z]+"}, (KIND.REGEX, "[a-z]+", "guided_regex")),
    ({"guided_grammar": "start: 'x'"}, (KIND.GRAMMAR, "start: 'x'", "guided_grammar")),
    ({"guided_choice": ["a", "né"]}, (KIND.CHOICE, '["a", "né"]', "guided_choice")),
    ({"grammar": "g", "regex": "", "ebnf": ""}, (KIND.GRAMMAR, "g", "grammar")),
    ({"ebnf": "g", "grammar": ""}, (KIND.GRAMMAR, "g", "ebnf")),
    ({"regex": "[a-z]+", "json_schema": None}, (KIND.REGEX, "[a-z]+", "regex")),
    ({"json_schema": SCHEMA}, (KIND.JSON_SCHEMA, TEXT, "json_schema")),
    ({"json_schema": TEXT}, (KIND.JSON_SCHEMA, TEXT, "json_schema")),
    (
        {"response_format": {"type": "json_object", "value": SCHEMA}},
        (KIND.JSON_SCHEMA, TEXT, "response_format.value"),
    ),
    (
        {"response_format": {"type": "json_object", "json_schema": {"strict": True, "schema": SCHEMA}}},
        (KIND.JSON_SCHEMA, TEXT, "response_format.json_schema.schema"),
    ),
    ({"response_format": {"type": "json", "value": SCHEMA}}, (KIND.JSON_SCHEMA, TEXT, "response_format.value")),
    ({"response_format": {"type": "regex", "value": "a+"}}, (KIND.REGEX, "a+", "response_format.value")),
    ({"structured_outputs": {"json": SCHEMA}}, (KIND.JSON_SCHEMA, TEXT, "structured_outputs.json")),
    ({"structured_outputs": {"regex": "a", "json": None}}, (KIND.REGEX, "a", "structured_outputs.regex")),
    ({"structured_outputs": {"grammar": "g"}}, (KIND.GRAMMAR, "g", "structured_outputs.grammar")),
    ({"structured_outputs": {"choice": ["a"]}}, (KIND.CHOICE, '["a"]', "structured_outputs.choice")),
    ({"structured_outputs": {"json_object": True}}, (KIND.JSON_OBJECT, "", "structured_outputs.json_object")),
]


@pytest.mark.parametrize(("fields", "wanted"), SPELLINGS)
def test_every_spelling_becomes_a_constraint(fields: dict[str, Any], wanted: tuple[ConstraintKind, str, str]) -> None:
    for made, spares_reasoning in ((chat(**fields), True), (completion(**fields), False)):
        assert made is not None
        assert (made.kind, made.text, made.param) == wanted
        assert made.after_reasoning is spares_reasoning
        assert made.is_strict


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}}, {"guided_json": None}]
)
def test_without_a_wish_there_is_no_constraint(fields: dict[str, Any]) -> None:
    assert chat(**fields) is None
    assert completion(**fields) is None


def test_all_choices_share_the_constraint() -> None:
    assert chat(n=3, guided_regex="a") is not None


@pytest.mark.parametrize(("strict", "is_strict"), [(True, True), (None, False), (False, False)])
def test_a_schema_of_response_format_is_strict_only_if_told_so(strict: bool | None, is_strict: bool) -> None:
    made = chat(response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": strict}})
    assert made is not None
    assert made.is_strict is is_strict


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
            "response_format.json_schema.strict",
        ),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"json_object": {}}}, "structured_outputs.json_object"),
        ({"response_format": {"type": "json_object", "schema": [None], "value": {}}}, "response_format"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "regex"}}, "response_format.pattern"),
        ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format"),
        ({"grammar": 5}, "grammar"),
        ({"json_schema": 5}, "json_schema"),
        ({"json_schema": {}, "grammar": "g"}, "grammar"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_bad_shapes_and_conflicts_name_their_parameter(fields: dict[str, Any], param: str) -> None:
    for call in (chat, completion):
        with pytest.raises(BadRequest) as caught:
            call(**fields)
        assert caught.value.param == param

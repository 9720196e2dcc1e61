"""Text becomes the JSON that a schema asks for."""

from typing import Any

import pytest

from worker.output.parsers.schema import Tools, coerced, json_text


def types(schema: dict[str, Any], defs: dict[str, Any] | None = None) -> frozenset[str]:
    tool = {"name": "f", "parameters": {"properties": {"p": schema}, "$defs": defs or {}}}
    return Tools([tool]).parameters("f").types("p")


@pytest.mark.parametrize(
    ("schema", "text", "found"),
    [
        ({"type": "string"}, "12", '"12"'),
        ({"type": "string"}, "null", '"null"'),
        ({"type": "integer"}, " -14 ", "-14"),
        ({"type": "integer"}, "42.0", "42"),
        ({"type": "integer"}, "forty", '"forty"'),
        ({"type": "integer"}, '"7"', "7"),
        ({"type": "integer"}, "9" * 40, "9" * 40),
        ({"type": "number"}, "3", "3"),
        ({"type": "number"}, "1e400", "1e400"),
        ({"type": "boolean"}, "TRUE", "true"),
        ({"type": "null"}, "None", "null"),
        ({"type": ["null", "string"]}, "null", "null"),
        ({"type": ["null", "string"]}, "12", '"12"'),
        ({"type": ["string", "object"]}, '{"a": 1}', '{"a": 1}'),
        ({"type": ["string", "integer"]}, "7", "7"),
        ({"type": "integer", "nullable": True}, "null", "null"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", "null"),
        ({"enum": ["a", "b"]}, "1", '"1"'),
        ({"enum": [1, 2]}, "1", "1"),
        ({"$ref": "#/$defs/n"}, "1", "1"),
        ({"$ref": "#/$defs/loop"}, "1", "1"),
        ({"$ref": "#/$defs/wide"}, '"1"', "1"),
        ({"$ref": "#/$defs/a~1b~01%20c"}, "true", '"true"'),
        ({"$ref": "#/$defs/none"}, "true", "true"),
        ({"type": "array"}, "['a', (1, None)]", '["a", [1, null]]'),
        ({"type": "object"}, "{'a': {'b': True}}", '{"a": {"b": true}}'),
        ({"type": "string"}, 'say "x"\n\t🙂\x01', '"say \\"x\\"\\n\\t🙂\\u0001"'),
        ({}, "02134", '"02134"'),
        ({}, "+41", '"+41"'),
        ({}, "2.50", "2.50"),
        ({}, '"quoted"', '"\\"quoted\\""'),
        ({}, "[1, 2", '"[1, 2"'),
        ({"type": ["string", "integer"]}, "42", "42"),
        ({"type": ["string", "integer"]}, "+4930123456", '"+4930123456"'),
        ({"type": ["string", "integer"]}, "0xdeadbeef", '"0xdeadbeef"'),
        ({"type": ["string", "integer"]}, "1_000", '"1_000"'),
        ({"type": ["string", "integer"]}, "1e10", '"1e10"'),
        ({"type": ["string", "integer"]}, "1.0", '"1.0"'),
        ({"type": "integer"}, "null", "null"),
        ({"type": "array"}, "None", "null"),
    ],
)
def test_text_is_coerced(schema: dict[str, Any], text: str, found: str) -> None:
    wide = {"anyOf": [*[{"$ref": "#/$defs/wide"}] * 20, {"type": "integer"}]}
    defs = {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}, "wide": wide, "a/b~1 c": {"type": "string"}}
    assert coerced(text, types(schema, defs)) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": [1, 2.5e3, true, null, "x\\u00e9"]}', '{"a": [1, 2.5e3, true, null, "x\\u00e9"]}'),
        ("{1: 'a', (2): 'b'}", None),
        ("{'a', 'b'}", '["a", "b"]'),
        ("()", "[]"),
        ("{}", "{}"),
        ("'it\\'s'", '"it\'s"'),
        ("'\\x41\\U0001f642\\q'", '"\\u0041🙂\\\\q"'),
        ("0x1F", "31"),
        ("1_000", "1000"),
        (".5", "0.5"),
        ("NaN", "null"),
        ("[1 2]", None),
        ("{'a' 1}", None),
        ("1 2", None),
        ("", None),
        ("[" * 5000, None),
    ],
)
def test_json_and_python_values_become_strict_json(text: str, found: str | None) -> None:
    assert json_text(text) == found

"""Lowering of constraints on an answer's form to one `protocol.Constraint`. OpenAI and other servers have different
fields for them.
"""

import json
from typing import Annotated, Any, Final, cast

from msgspec import Struct, structs

from gateway.api.common.request_fields import NULL, TEXT, shape, typed
from gateway.errors import BadRequest, Unsupported
from protocol.to_worker import Constraint, ConstraintKind

_KINDS = {
    "json": ConstraintKind.JSON_SCHEMA,
    "regex": ConstraintKind.REGEX,
    "grammar": ConstraintKind.GRAMMAR,
    "choice": ConstraintKind.CHOICE,
}

_OBJECT: Final = {"type": "object"}
_TEXT: Final = {"anyOf": [TEXT, NULL]}
_SCHEMA: Final = {"type": ["object", "string", "null"]}
_JSON: Final = {"type": ["object", "string"]}
# Schemas for the OpenAPI document.
RESPONSE_FORMAT: Final = {
    "anyOf": [
        typed("text"),
        typed("json_object", "json", schema={"type": ["object", "null"]}, value={"type": ["object", "null"]}),
        {**typed("regex", value=TEXT), "required": ["type", "value"]},
        {
            **typed(
                "json_schema",
                json_schema={
                    "type": "object",
                    "properties": {"schema": _OBJECT, "strict": {"type": ["boolean", "null"]}},
                    "required": ["schema"],
                },
            ),
            "required": ["type", "json_schema"],
        },
        {**typed("grammar", grammar=TEXT), "required": ["type", "grammar"]},
        NULL,
    ]
}
STRUCTURED_OUTPUTS: Final = {
    "anyOf": [
        {"type": "object", "properties": {name: schema}, "required": [name], "additionalProperties": False}
        for name, schema in (
            ("json", _JSON),
            ("regex", TEXT),
            ("grammar", TEXT),
            ("choice", {"type": "array", "items": TEXT, "minItems": 1}),
            ("json_object", {"const": True}),
        )
    ]
    + [NULL]
}


# Maps the fields of vLLM's older clients, llama.cpp and SGLang to kinds of constraints.
_KIND_OF_FIELD: Final = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "json_schema": "json",
    "grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
}
# An empty text in one of these fields is no constraint, as in llama.cpp's server.
_NONE_IF_EMPTY: Final = frozenset({"grammar", "regex", "ebnf"})


class FormatFields(Struct, frozen=True, kw_only=True):
    """Request fields of OpenAI, vLLM, llama.cpp and SGLang that constrain the form of an answer."""

    response_format: Annotated[Any, shape(RESPONSE_FORMAT)] = None
    structured_outputs: Annotated[Any, shape(STRUCTURED_OUTPUTS)] = None
    guided_json: Annotated[Any, shape(_SCHEMA)] = None
    guided_regex: Annotated[Any, shape(_TEXT)] = None
    guided_grammar: Annotated[Any, shape(_TEXT)] = None
    guided_choice: Annotated[Any, shape({"anyOf": [{"type": "array", "items": TEXT, "minItems": 1}, NULL]})] = None
    json_schema: Annotated[Any, shape(_SCHEMA)] = None
    grammar: Annotated[Any, shape(_TEXT)] = None
    regex: Annotated[Any, shape(_TEXT)] = None
    ebnf: Annotated[Any, shape(_TEXT)] = None


def lower_constraint(request: FormatFields, *, after_reasoning: bool) -> Constraint | None:
    """Return the constraint of a request, or None. Raises `BadRequest`, also if there are two constraints."""
    given = [response_format(request.response_format), _structured_outputs(request.structured_outputs)]
    for name, kind in _KIND_OF_FIELD.items():
        value = getattr(request, name)
        given.append(_guided(kind, None if value == "" and name in _NONE_IF_EMPTY else value, name))
    constraints = [each for each in given if each is not None]
    if len(constraints) > 1:
        names = " and ".join(f"'{each.param}'" for each in constraints)
        raise BadRequest(f"{names} exclude each other.", constraints[1].param, "invalid_value")
    return structs.replace(constraints[0], after_reasoning=after_reasoning) if constraints else None


def response_format(value: Any) -> Constraint | None:
    """Lower `text`, `json_object` (with Together's `schema`), `json_schema`, Fireworks' `grammar`, and TGI's forms
    (`json`, `json_object` and `regex` with a `value`). Raises `BadRequest`."""
    if value is None:
        return None
    fields = _object(value, "response_format")
    match fields.get("type"):
        case "text":
            return None
        case "json_object" | "json":
            given = [name for name in ("schema", "value", "json_schema") if fields.get(name) is not None]
            if not given:
                return Constraint(ConstraintKind.JSON_OBJECT)
            if len(given) > 1:
                raise _invalid("response_format", "an object with one schema")
            if given == ["json_schema"]:
                return response_format({**fields, "type": "json_schema"})
            return _schema(fields[given[0]], f"response_format.{given[0]}")
        case "regex":
            wanted = "pattern" if fields.get("value") is None else "value"
            return _guided("regex", fields.get(wanted) or "", f"response_format.{wanted}")
        case "json_schema":
            inner = _object(fields.get("json_schema"), "response_format.json_schema")
            strict = inner.get("strict")
            if strict is not None and not isinstance(strict, bool):
                raise _invalid("response_format.json_schema.strict", "true or false")
            return _schema(inner.get("schema"), "response_format.json_schema.schema", is_strict=strict is True)
        case "grammar":
            return _guided("grammar", fields.get("grammar") or "", "response_format.grammar")
        case "structural_tag":
            raise Unsupported("'response_format' of type 'structural_tag' is not supported.", "response_format")
        case _:
            raise _invalid("response_format.type", "'text', 'json_object' or 'json_schema'")


def _structured_outputs(value: Any) -> Constraint | None:
    """Lower vLLM's `structured_outputs`, which has exactly one of json, regex, grammar, choice and json_object."""
    if value is None:
        return None
    fields = {name: each for name, each in _object(value, "structured_outputs").items() if each not in (None, False)}
    for name in fields:
        if name not in _KINDS and name != "json_object":
            raise Unsupported(f"'structured_outputs.{name}' is not supported.", f"structured_outputs.{name}")
    if len(fields) != 1:
        raise _invalid("structured_outputs", "exactly one of json, regex, grammar, choice and json_object")
    ((name, given),) = fields.items()
    param = f"structured_outputs.{name}"
    if name != "json_object":
        return _guided(name, given, param)
    if given is not True:
        raise _invalid(param, "true")
    return Constraint(ConstraintKind.JSON_OBJECT, param=param)


def _guided(name: str, value: Any, param: str) -> Constraint | None:
    if value is None:
        return None
    if name == "json":
        return _schema(value, param)
    if name == "choice":
        choices = cast(list[Any], value) if isinstance(value, list) else []
        if not choices or not all(isinstance(each, str) and each for each in choices):
            raise _invalid(param, "a list of texts")
        return Constraint(_KINDS[name], json.dumps(choices, ensure_ascii=False), param=param)
    if not isinstance(value, str) or not value:
        raise _invalid(param, "a text")
    return Constraint(_KINDS[name], value, param=param)


def _schema(value: Any, param: str, *, is_strict: bool = True) -> Constraint:
    """Lower a schema, which is an object or, as in vLLM, the JSON text of an object."""
    if isinstance(value, str) and not param.startswith("response_format"):
        return Constraint(ConstraintKind.JSON_SCHEMA, value, param=param, is_strict=is_strict)
    try:
        text = json.dumps(_object(value, param), ensure_ascii=False)
    except RecursionError:
        raise _invalid(param, "a schema that is less deep") from None
    return Constraint(ConstraintKind.JSON_SCHEMA, text, param=param, is_strict=is_strict)


def _object(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _invalid(param, "an object")
    return cast(dict[str, Any], value)


def _invalid(param: str, expected: str) -> BadRequest:
    return BadRequest(f"Invalid value for '{param}': expected {expected}.", param, "invalid_value")

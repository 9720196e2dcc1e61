"""Constraints on an answer's form, in OpenAI's words and in vLLM's, as one `protocol.Constraint`."""

import json
from typing import Any, Final, Protocol, cast

from gateway.api.common.doc_hints import NULL, TEXT, typed
from gateway.errors import BadRequest, Unsupported
from protocol.messages import Constraint, ConstraintKind

_KINDS = {
    "json": ConstraintKind.JSON_SCHEMA,
    "regex": ConstraintKind.REGEX,
    "grammar": ConstraintKind.GRAMMAR,
    "choice": ConstraintKind.CHOICE,
}

_OBJECT: Final = {"type": "object"}
_JSON: Final = {"type": ["object", "string"]}
# As the document tells of them.
RESPONSE_FORMAT: Final = {
    "anyOf": [
        typed("text"),
        typed("json_object", schema={"type": ["object", "null"]}),
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
        {"type": "object", "properties": {name: one}, "required": [name], "additionalProperties": False}
        for name, one in (
            ("json", _JSON),
            ("regex", TEXT),
            ("grammar", TEXT),
            ("choice", {"type": "array", "items": TEXT, "minItems": 1}),
            ("json_object", {"const": True}),
        )
    ]
    + [NULL]
}


class Wishes(Protocol):
    """The fields of a request that ask for a structure."""

    @property
    def response_format(self) -> Any: ...
    @property
    def structured_outputs(self) -> Any: ...
    @property
    def guided_json(self) -> Any: ...
    @property
    def guided_regex(self) -> Any: ...
    @property
    def guided_grammar(self) -> Any: ...
    @property
    def guided_choice(self) -> Any: ...


def lower_constraint(request: Wishes, *, after_reasoning: bool) -> Constraint | None:
    """The one constraint of a request, None if it has none. Raises `BadRequest`, also for two at once."""
    wishes = [
        _response_format(request.response_format),
        _structured_outputs(request.structured_outputs),
        _guided("json", request.guided_json, "guided_json"),
        _guided("regex", request.guided_regex, "guided_regex"),
        _guided("grammar", request.guided_grammar, "guided_grammar"),
        _guided("choice", request.guided_choice, "guided_choice"),
    ]
    constraints = [each for each in wishes if each is not None]
    if len(constraints) > 1:
        names = " and ".join(f"'{each.param}'" for each in constraints)
        raise BadRequest(f"{names} exclude each other.", constraints[1].param, "invalid_value")
    if not constraints:
        return None
    constraint = constraints[0]
    return Constraint(constraint.kind, constraint.text, after_reasoning, constraint.param, constraint.is_strict)


def _response_format(value: Any) -> Constraint | None:
    """`text`, `json_object` (with Together's `schema`), `json_schema`, and Fireworks' `grammar`."""
    if value is None:
        return None
    fields = _object(value, "response_format")
    match fields.get("type"):
        case "text":
            return None
        case "json_object" if fields.get("schema") is None:
            return Constraint(ConstraintKind.JSON_OBJECT)
        case "json_object":
            return _schema(fields["schema"], "response_format.schema")
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
    """vLLM's: exactly one of json, regex, grammar, choice and json_object."""
    if value is None:
        return None
    fields = {name: one for name, one in _object(value, "structured_outputs").items() if one not in (None, False)}
    for name in fields:
        if name not in _KINDS and name != "json_object":
            raise Unsupported(f"'structured_outputs.{name}' is not supported.", f"structured_outputs.{name}")
    if len(fields) != 1:
        raise _invalid("structured_outputs", "exactly one of json, regex, grammar, choice and json_object")
    ((name, one),) = fields.items()
    param = f"structured_outputs.{name}"
    if name != "json_object":
        return _guided(name, one, param)
    if one is not True:
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
    """A schema as an object, or as its JSON text, as vLLM takes it."""
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

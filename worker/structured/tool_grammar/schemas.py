"""Tools' JSON schemas prepared for a grammar: closed, bounded, and validated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from worker.output.parsers.schema import Schema, mapping, referred

# Largest integer up to which JSON clients with doubles represent every integer.
INTEGER_MAX: Final = 2**53 - 1
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MAPS: Final = ("properties", "$defs", "definitions")
# Schema keywords that restrict values.
_VALIDATING: Final = frozenset(
    {
        "$ref", "additionalProperties", "allOf", "anyOf", "const", "enum", "format", "items", "maxItems", "maxLength",
        "maxProperties", "minItems", "minLength", "minProperties", "oneOf", "pattern", "patternProperties",
        "prefixItems", "properties", "required", "type", *_BOUNDS,
    }
)  # fmt: skip
# Schema keywords that restrict nothing.
_ANNOTATIONS: Final = frozenset({"description", "title", "default", "examples", "$schema", "$comment"})
_MAX_DEPTH: Final = 64
_NO_PARAMETERS: Final[Schema] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """Name and parameters of a tool that may be called."""

    name: str
    parameters: Schema

    @property
    def properties(self) -> Schema:
        return mapping(self.parameters.get("properties"))

    @property
    def required(self) -> frozenset[str]:
        return names(self.parameters.get("required"))

    @property
    def is_plain(self) -> bool:
        """Return whether the schema has no conditions except those on single parameters."""
        of_keys = ("type", "properties", "required", "additionalProperties", "patternProperties")
        return only(self.parameters, *of_keys) and self.required <= self.properties.keys()


def tool_of(declared: Mapping[str, Any]) -> ToolSchema:
    """Read a tool in OpenAI's form."""
    function = mapping(declared.get("function")) or declared
    parameters = mapping(function.get("parameters"))
    if not parameters.keys() & {"properties", "anyOf", "oneOf", "allOf", "$ref", "additionalProperties"}:
        return ToolSchema(str(function.get("name")), _NO_PARAMETERS)
    return ToolSchema(str(function.get("name")), {"type": "object", **mapping(closed(parameters))})


def anything(tool: ToolSchema) -> ToolSchema:
    """Return the tool with a schema that allows any arguments: any type where a format names the arguments, otherwise
    any object."""
    open_ = {key: {} for key in tool.properties}
    return ToolSchema(tool.name, {"type": "object", "properties": open_, "additionalProperties": True})


def closed(schema: Any, depth: int = 0) -> Any:
    """Return the schema without undeclared parameters. Integers are limited to those that JSON clients can
    represent."""
    if isinstance(schema, list):
        return [closed(item, depth + 1) for item in cast("list[Any]", schema)]
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return schema
    fields = {key: value for key, value in cast(Schema, schema).items() if key not in _ANNOTATIONS}
    if (
        isinstance(every := fields.get("allOf"), list)
        and len(cast("list[Any]", every)) == 1
        and fields.keys() == {"allOf"}
    ):
        return closed(every[0], depth + 1)
    for key, value in fields.items():
        if key in _MAPS:
            fields[key] = {name: closed(inner, depth + 1) for name, inner in mapping(value).items()}
        elif key in ("items", "anyOf", "oneOf", "prefixItems", "additionalProperties"):
            fields[key] = closed(value, depth + 1)
    if "properties" in fields and not fields.keys() & {"additionalProperties", "patternProperties", "allOf"}:
        fields["additionalProperties"] = False
    if fields.get("type") == "integer" and not fields.keys() & {*_BOUNDS, "enum", "const"}:
        fields |= {"minimum": -INTEGER_MAX, "maximum": INTEGER_MAX}
    return fields


def resolved(schema: Any, root: Schema) -> Schema:
    """Resolve local `$ref`s. An unresolved reference allows any value."""
    target = mapping(schema)
    for _ in range(_MAX_DEPTH):
        if not isinstance(ref := target.get("$ref"), str):
            return target
        target = referred(ref, root)
    return {}


def types_of(schema: Schema) -> tuple[str, ...]:
    """Return the declared types; empty if any type is allowed."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return (declared,)
    if isinstance(declared, Sequence):
        return tuple(str(each) for each in cast("Sequence[Any]", declared))
    if "properties" in schema:
        return ("object",)
    return ("array",) if "items" in schema else ()


def only(schema: Schema, *keywords: str) -> bool:
    """Return whether only these keywords restrict the schema."""
    return schema.keys() & _VALIDATING <= set(keywords)


def constants(schema: Schema) -> list[Any]:
    """Return the values of `const` or `enum` that have a declared type; all values if none of them has one."""
    if "const" in schema:
        values: list[Any] = [schema["const"]]
    else:
        values = list(cast("list[Any]", schema["enum"])) if isinstance(schema["enum"], list) else []
    kinds = types_of(schema) if "type" in schema else ()
    return [value for value in values if not kinds or any(_is_of(kind, value) for kind in kinds)] or values or [None]


def _is_of(kind: str, value: Any) -> bool:
    match kind:
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "string":
            return isinstance(value, str)
        case "integer" | "number":
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return is_number and (kind == "number" or float(value).is_integer())
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, Mapping)
        case _:
            return True


def is_bounded(schema: Schema) -> bool:
    return bool(schema.keys() & set(_BOUNDS))


def count(schema: Schema, key: str) -> int | None:
    value = schema.get(key)
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else None


def quantifier(schema: Schema) -> str:
    """Return the regex quantifier for a text's number of characters."""
    low, high = count(schema, "minLength") or 0, count(schema, "maxLength")
    return f"{{{low},{'' if high is None else high}}}" if low or high is not None else "*"


def names(found: Any) -> frozenset[str]:
    return frozenset(str(each) for each in cast("list[Any]", found)) if isinstance(found, list) else frozenset()

"""Simplified tools for chat templates that support only plain schemas: one type per parameter, descriptions, no
references.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from worker.output.parsers.schema import Schema, mapping, referred

_MAX_DEPTH: Final = 12


def simple_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return simplified tools in OpenAI's format: keywords other than types, names and descriptions are dropped."""
    return [{"type": "function", "function": _function(mapping(tool.get("function")))} for tool in tools]


def _function(function: Schema) -> dict[str, Any]:
    parameters = mapping(function.get("parameters"))
    return {
        "name": function.get("name"),
        "description": function.get("description") or "",
        "parameters": _simple({**parameters, "type": "object"}, parameters, 0),
    }


def _simple(schema: Any, root: Schema, depth: int) -> dict[str, Any]:
    fields = _chosen(mapping(schema), root)
    kind = _kind(fields)
    simple: dict[str, Any] = {"type": kind, "description": str(fields.get("description") or "")}
    if isinstance(fields.get("enum"), list):
        simple["enum"] = fields["enum"]
    if depth >= _MAX_DEPTH:
        return simple
    if kind == "array":
        simple["items"] = _simple(fields.get("items"), root, depth + 1)
    if kind == "object":
        inner = mapping(fields.get("properties"))
        simple["properties"] = {name: _simple(each, root, depth + 1) for name, each in inner.items()}
        simple["required"] = [name for name in fields.get("required") or () if name in inner]
        simple["additionalProperties"] = {"type": "string", "description": ""}
    return simple


def _chosen(schema: Schema, root: Schema) -> Schema:
    """Resolve references, and choose the first alternative that is not null."""
    for _ in range(_MAX_DEPTH):
        ref = schema.get("$ref")
        options = next((schema[key] for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list)), None)
        if isinstance(ref, str):
            following = referred(ref, root)
        elif options:
            real = [mapping(option) for option in options if mapping(option).get("type") != "null"]
            following = real[0] if real else {}
        else:
            break
        schema = {**{key: schema[key] for key in ("description",) if key in schema}, **following}
    return schema


def _kind(fields: Schema) -> str:
    declared = fields.get("type")
    kinds = cast("list[Any]", declared) if isinstance(declared, list) else [declared]
    first = next((kind for kind in kinds if isinstance(kind, str) and kind != "null"), None)
    return first or ("object" if "properties" in fields else "array" if "items" in fields else "string")

"""Arguments by the tools' JSON schemas: the expected types, and text converted to them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast
from urllib.parse import unquote

from worker.parsers.literal import is_padded, number, quoted, value
from worker.parsers.reader import Malformed, Reader

Schema = Mapping[str, Any]
Types = frozenset[str]

ANY: Final[Types] = frozenset()
STRING: Final[Types] = frozenset({"string"})
_NAMES: Final = {
    "string": "string", "str": "string", "text": "string", "enum": "string", "varchar": "string", "char": "string",
    "integer": "integer", "int": "integer", "long": "integer", "number": "number", "float": "number",
    "double": "number", "boolean": "boolean", "bool": "boolean", "null": "null", "none": "null",
    "array": "array", "list": "array", "object": "object", "dict": "object",
}  # fmt: skip
_LITERALS: Final[dict[type, str]] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}
_MAX_DEPTH: Final = 16


class Tools:
    """The declared tools by name. Takes OpenAI's shape, with or without the outer `function`."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._schemas: dict[str, Schema] = {}
        for tool in tools:
            function = mapping(tool.get("function")) or tool
            name = function.get("name")
            if isinstance(name, str):
                self._schemas[name] = mapping(function.get("parameters") or function.get("input_schema"))

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def __bool__(self) -> bool:
        return bool(self._schemas)

    def declared(self, name: str) -> str:
        """The name that is meant by `name`: a template that lists tools as `name.*` makes models double it."""
        head, _, tail = name.partition(".")
        return head if head == tail and head in self and name not in self else name

    def parameters(self, name: str) -> "Parameters":
        return Parameters(self._schemas.get(name, {}))


class Parameters:
    """One tool's parameters, or the properties of one object inside of them."""

    def __init__(self, schema: Schema, root: Schema | None = None) -> None:
        self._root = schema if root is None else root
        self.names: Schema = mapping(schema.get("properties"))

    def types(self, name: str) -> Types:
        """The JSON types that parameter `name` may have; empty when nothing is known."""
        return _types(self.names.get(name), self._root, 0)

    def item_types(self, name: str) -> Types:
        """The types of the items of the array that parameter `name` is."""
        return _types(mapping(self.names.get(name)).get("items"), self._root, 0)

    def below(self, name: str) -> "Parameters":
        """The properties of the object, or of the array's objects, that parameter `name` is."""
        schema = mapping(self.names.get(name))
        return Parameters(mapping(schema.get("items")) or schema, self._root)


def mapping(value: Any) -> Schema:
    """`value` if it is a JSON object, else an empty one."""
    return cast(Schema, value) if isinstance(value, Mapping) else {}


def referred(ref: str, root: Schema) -> Schema:
    """Target of a `$ref` into the same document (RFC 6901); empty, and so any value, if there is none."""
    target = root
    for step in unquote(ref).removeprefix("#").split("/")[1:]:
        target = mapping(target.get(step.replace("~1", "/").replace("~0", "~")))
    return target


def _types(found: Any, root: Schema, depth: int) -> Types:
    schema = mapping(found)
    if depth > _MAX_DEPTH:
        return ANY
    if isinstance(ref := schema.get("$ref"), str):
        return _types(referred(ref, root), root, depth + 1)
    declared = schema.get("type")
    if isinstance(declared, str | list):
        names = cast("list[Any]", [declared] if isinstance(declared, str) else declared)
        types = {_NAMES.get(str(name).lower(), "") for name in names}
        if "" in types:
            return ANY
        return frozenset(types | {"null"} if schema.get("nullable") is True else types)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(options := schema.get(key), list) and options:
            parts = [_types(option, root, depth + 1) for option in cast("list[Any]", options)]
            return frozenset[str]().union(*parts) if all(parts) else ANY
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(_LITERALS.get(cast("type[Any]", type(item)), "object") for item in cast("list[Any]", values))
    if "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else ANY


def json_text(text: str) -> str | None:
    """`text` as strict JSON if it is one JSON or Python value, else None."""
    reader, parts = Reader(), list[str]()
    reader.push(text)
    reader.ended = True
    try:
        for _ in value(reader, parts.append):
            pass
    except Malformed:
        return None
    return "".join(parts) if not reader.buf[reader.at :].strip() else None


def json_type(text: str) -> str:
    """The JSON type of strict JSON `text`."""
    simple = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}.get(text[0])
    return simple or ("number" if set(text) & set(".eE") else "integer")


def coerced(text: str, types: Types) -> str:
    """The JSON for a parameter written as plain `text`: the first of its types that fits, else a string."""
    if types == STRING:
        return quoted(text)
    bare = text.strip()
    literal = json_text(bare)
    if literal is not None and "string" in types and is_padded(bare):
        return quoted(text)
    if literal is not None:
        kind = json_type(literal)
        if kind == "string":
            # Quotes around a string belong to it, unless no string is wanted there.
            return quoted(text) if not types or "string" in types else coerced_string(literal, types)
        if not types:
            # A guess: `+41` and `1_000` are not meant as numbers.
            is_plain = kind in ("array", "object") or bare in (literal, "True", "False", "None")
            return literal if is_plain else quoted(text)
        if kind in types or (kind == "integer" and "number" in types):
            return literal
        if kind == "number" and "integer" in types and (whole := _whole(literal)):
            return whole
    if "string" not in types:
        if "boolean" in types and bare.lower() in ("true", "false"):
            return bare.lower()
        if "null" in types and bare.lower() in ("null", "none", ""):
            return "null"
    return quoted(text)


def coerced_string(found: str, types: Types) -> str:
    """The JSON string `found`, where the schema wants something else: what is in it, if that fits."""
    inner: str = json.loads(found)
    if types == ANY or "string" in types:
        return found
    better = coerced(inner, types)
    return found if better.startswith('"') else better


def _whole(text: str) -> str:
    try:
        number_ = float(text)
    except OverflowError:
        return ""
    return number(str(int(number_))) if number_.is_integer() else ""

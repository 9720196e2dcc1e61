"""Conversion of arguments by the tools' JSON schemas: expected types, and text converted to them.

Names of tools as models write them: with a namespace, an index, another case, or dashes for underscores.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, NamedTuple, cast
from urllib.parse import unquote

from worker.output.parsers.literal import is_padded, number, quoted, value
from worker.output.parsers.reader import Malformed, MarkupReader

# Prefixes that models put before any name. The separator after the first may be missing: Kimi K2 writes
# `functionsshell5` when a client has removed the dots from the ids of earlier calls (sglang#21377).
_PREFIX: Final = re.compile(r"functions(?:__|[.:/_\-])?|(?:function|tools?|default_api)(?:__|[.:/_\-])")
_NAMESPACE: Final = re.compile(r"[.:/]|__")
_INDEX: Final = re.compile(r"(?<=\w)[.:_\-]?[0-9]+$")
# The tools of MCP servers are declared as `mcp__server__name`.
_SERVER: Final = re.compile(r"mcp__(?=.+__)")
# Maximum number of namespaces of a name; each leaves another candidate.
_NAMESPACES_MAX: Final = 8


class _BareName(NamedTuple):
    """Rest of a written name, and which parts were removed from it."""

    name: str
    lost_namespace: bool
    lost_index: bool


def declared_name(written: str, declared: Collection[str]) -> str:
    """Return the declared name that `written` stands for: itself, or the only one that fits without decoration.

    Decoration is a namespace, a trailing index, the case, and dashes for underscores. If no declared name fits, or
    several do, `written` is returned: clients refuse an unknown tool, but would run a wrong one.
    """
    if written in declared:
        return written
    forms = list(_forms(written))
    for spell in (str, _plain):
        spelled = {spell(form.name): form for form in reversed(forms)}
        fits = {
            name: spelled[each]
            for name in declared
            for each in (spell(_SERVER.sub("", name)), spell(name))
            if each in spelled
        }
        if fits:
            name, form = next(iter(fits.items()))
            return name if len(fits) == 1 and not _tells_apart(form, name, declared) else written
    return written


def _forms(written: str) -> Iterator[_BareName]:
    """Yield what may remain of a written name, the least changed first."""
    prefix = _PREFIX.match(written)
    rest = written[prefix.end() :] if prefix else written
    names = [(written, False), (rest, False), *((tail, True) for tail in _tails(rest))]
    yield from (_BareName(name, lost_namespace, False) for name, lost_namespace in names)
    yield from (_BareName(_INDEX.sub("", name), lost_namespace, True) for name, lost_namespace in names)


def _tails(name: str) -> Iterator[str]:
    for match, _ in zip(_NAMESPACE.finditer(name), range(_NAMESPACES_MAX), strict=False):
        yield name[match.end() :]


def _plain(name: str) -> str:
    """Return the spelling that the variants of a name share."""
    return _NAMESPACE.sub(":", name).replace("-", "_").casefold()


def _tells_apart(form: _BareName, name: str, declared: Collection[str]) -> bool:
    """Return whether declared tools differ from `name` only in what `form` has lost, which therefore has a meaning."""
    others = [other for other in declared if other != name]
    return (form.lost_index and any(_INDEX.sub("", other) == name for other in others)) or (
        form.lost_namespace and any(name in _tails(other) for other in others)
    )


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
_UNIONS: Final = ("anyOf", "oneOf", "allOf")
_OPEN: Final = frozenset({*_UNIONS, "$ref", "if", "patternProperties"})
_MAX_DEPTH: Final = 16
# Maximum number of alternatives of one value; schemas come from clients.
_ALTERNATIVES_MAX: Final = 64


class Tools:
    """Declared tools by name, in OpenAI's form, with or without the outer `function`."""

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

    @property
    def names(self) -> AbstractSet[str]:
        """Names of the tools."""
        return self._schemas.keys()

    def declared(self, name: str) -> str:
        """Return the declared name that `name` stands for: see `declared_name`. Return `name` if there is none."""
        return declared_name(name, self._schemas)

    def allows(self, name: str, key: str) -> bool:
        """Return whether tool `name` is declared, in any spelling, and may have the argument `key` (or any, if it is
        empty). Without tools, everything is allowed."""
        name = self.declared(name)
        params = self.parameters(name)
        return not self or (name in self and (not key or not params.is_closed or key in params.names))

    def parameters(self, name: str) -> "Parameters":
        return Parameters(self._schemas.get(name, {}))

    def name_and_parameter(self, text: str) -> tuple[str, str] | None:
        """Return the only tool and parameter whose names in a row are `text`; None if there are none or several."""
        pairs = [(name, text[len(name) :].strip()) for name in self._schemas if text.startswith(name)]
        known = [(name, key) for name, key in pairs if key in self.parameters(name).names]
        return known[0] if len(known) == 1 else None


class Parameters:
    """Parameters of one tool."""

    def __init__(self, schema: Schema, root: Schema | None = None) -> None:
        self._root = schema if root is None else root
        self.names: Schema = mapping(schema.get("properties"))
        # Whether the schema names all parameters. A tool without any may have been declared without its schema.
        is_open = schema.get("additionalProperties", False) is not False or not _OPEN.isdisjoint(schema)
        self.is_closed = bool(self.names) and not is_open

    def types(self, name: str) -> Types:
        """Return the JSON types that parameter `name` may have; empty if unknown."""
        return self.value(name).types

    def value(self, name: str) -> "ValueSchema":
        """Return the schema of parameter `name`."""
        return ValueSchema(self.names.get(name), self._root)


class ValueSchema:
    """Schema of a value; its references are resolved in the document `root`."""

    def __init__(self, schema: Any, root: Schema) -> None:
        self._schema = schema
        self._root = root

    @property
    def types(self) -> Types:
        """Return the JSON types that the value may have; empty if unknown."""
        return _types(self._schema, self._root, 0, set()) or ANY

    @property
    def items(self) -> "ValueSchema":
        """Return the schema of the items if the value is an array (any of its alternatives' item schemas may apply)."""
        return self._any_of([form["items"] for form in self._alternatives() if "items" in form])

    def members(self, texts: Mapping[str, str]) -> "dict[str, ValueSchema]":
        """Return the schemas of the members of an object with these keys and texts.

        The schemas come from the alternatives that have all keys, preferably from those whose constants match the
        texts.
        """
        forms = self._alternatives()
        likely = [form for form in forms if _has_members(form, texts.keys())] or forms
        likely = [form for form in likely if _has_constants(form, texts)] or likely
        return {key: self._any_of([each for form in likely for each in _member(form, key)]) for key in texts}

    def _any_of(self, schemas: list[Any]) -> "ValueSchema":
        return ValueSchema(schemas[0] if len(schemas) == 1 else {"anyOf": schemas}, self._root)

    def _alternatives(self) -> list[Schema]:
        """Return the schema and all schemas that its unions and references name, each once."""
        forms: list[Schema] = []
        waiting: list[Any] = [self._schema]
        seen: set[str] = set()
        while waiting and len(forms) < _ALTERNATIVES_MAX:
            schema = mapping(waiting.pop())
            if isinstance(ref := schema.get("$ref"), str):
                if ref not in seen:
                    seen.add(ref)
                    waiting.append(referred(ref, self._root))
                continue
            forms.append(schema)
            for key in _UNIONS:
                if isinstance(options := schema.get(key), list):
                    waiting += cast("list[Any]", options)
        return forms


def mapping(value: Any) -> Schema:
    """Return `value` if it is a JSON object, otherwise an empty object."""
    return cast(Schema, value) if isinstance(value, Mapping) else {}


def referred(ref: str, root: Schema) -> Schema:
    """Return the target of a local `$ref` (RFC 6901); if there is none, an empty schema, which allows any value."""
    target = root
    for step in unquote(ref).removeprefix("#").split("/")[1:]:
        target = mapping(target.get(step.replace("~1", "/").replace("~0", "~")))
    return target


def _has_members(schema: Schema, keys: AbstractSet[str]) -> bool:
    """Return whether a schema that names its keys allows an object with exactly these keys."""
    names, required = mapping(schema.get("properties")), schema.get("required")
    wanted = {str(each) for each in cast("list[Any]", required)} if isinstance(required, list) else set[str]()
    return bool(names) and wanted <= keys <= names.keys()


def _has_constants(schema: Schema, texts: Mapping[str, str]) -> bool:
    """Return whether the members match the constants and enums of a schema, such as the tag of a tagged union."""
    names = mapping(schema.get("properties"))
    for key, text in texts.items():
        member = mapping(names.get(key))
        values = member.get("enum", [member["const"]] if "const" in member else None)
        if isinstance(values, list):
            allowed = {value if isinstance(value, str) else json.dumps(value) for value in cast("list[Any]", values)}
            if text.strip() not in allowed:
                return False
    return True


def _member(schema: Schema, key: str) -> list[Any]:
    names, others = mapping(schema.get("properties")), schema.get("additionalProperties")
    return [names[key]] if key in names else [others] if isinstance(others, Mapping) else []


def _types(found: Any, root: Schema, depth: int, seen: set[str]) -> Types | None:
    """Return the types of a schema. Return None for a reference that was already followed, because it adds no types."""
    schema = mapping(found)
    if depth > _MAX_DEPTH:
        return ANY
    if isinstance(ref := schema.get("$ref"), str):
        if ref in seen:
            return None
        seen.add(ref)
        return _types(referred(ref, root), root, depth + 1, seen)
    declared = schema.get("type")
    if isinstance(declared, str | list):
        names = cast("list[Any]", [declared] if isinstance(declared, str) else declared)
        types = {_NAMES.get(str(name).lower(), "") for name in names}
        if "" in types:
            return ANY
        return frozenset(types | {"null"} if schema.get("nullable") is True else types)
    for key in _UNIONS:
        if isinstance(options := schema.get(key), list) and options:
            every = [_types(option, root, depth + 1, seen) for option in cast("list[Any]", options)]
            parts = [part for part in every if part is not None]
            return frozenset[str]().union(*parts) if all(parts) else ANY
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(_LITERALS.get(cast("type[Any]", type(item)), "object") for item in cast("list[Any]", values))
    if "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else ANY


def json_text(text: str) -> str | None:
    """Return `text` as strict JSON if it is one JSON or Python value, otherwise None."""
    reader, parts = MarkupReader(), list[str]()
    reader.push(text)
    reader.ended = True
    try:
        for _ in value(reader, parts.append):
            pass
    except Malformed:
        return None
    return "".join(parts) if not reader.buf[reader.at :].strip() else None


def json_type(text: str) -> str:
    """Return the JSON type of strict JSON `text`."""
    simple = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}.get(text[0])
    return simple or ("number" if set(text) & set(".eE") else "integer")


def coerced(text: str, types: Types) -> str:
    """Return the JSON of a parameter written as plain `text`, in the first of its types that matches, otherwise as a
    string.
    """
    if types == STRING:
        return quoted(text)
    bare = text.strip()
    literal = json_text(bare)
    if literal is not None and "string" in types and is_padded(bare):
        return quoted(text)
    if literal is not None:
        kind = json_type(literal)
        if kind == "string":
            # The model's quotes are part of a string, unless the parameter cannot be a string.
            return quoted(text) if not types or "string" in types else coerced_string(literal, types)
        if not types:
            # The schema gives no type, so this is a guess: texts such as `+41` and `1_000` are probably not meant as
            # numbers.
            is_plain = kind in ("array", "object") or bare in (literal, "True", "False", "None")
            return literal if is_plain else quoted(text)
        if kind in ("integer", "number") and "string" in types and bare != literal:
            return quoted(text)  # such as the telephone number `+41`
        if kind in types or (kind == "integer" and "number" in types):
            return literal
        if kind == "number" and "integer" in types and "string" not in types and (whole := _whole(literal)):
            return whole
    if "string" not in types:
        if "boolean" in types and bare.lower() in ("true", "false"):
            return bare.lower()
        if bare.lower() in ("null", "none") or (not bare and "null" in types):
            return "null"  # also where the schema does not say that an optional value may be null
    return quoted(text)


def coerced_string(found: str, types: Types) -> str:
    """Convert a JSON string if the schema requires another type and the string's content has that type; otherwise
    return it.
    """
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

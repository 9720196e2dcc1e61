"""Expressions of arguments: each parameter as its schema requires it, in a family's notation of values."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from worker.output.parsers.schema import Schema, mapping
from worker.structured.grammar_compiler import lark_json
from worker.structured.tool_grammar.lark import Lark, either
from worker.structured.tool_grammar.schemas import (
    ToolSchema,
    constants,
    count,
    is_bounded,
    names,
    only,
    quantifier,
    resolved,
    types_of,
)

_INTEGER: Final = r"/-?(0|[1-9][0-9]{0,14})/"
_NUMBER: Final = r"/-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?([eE][+\-]?[0-9]{1,2})?/"
# The pattern excludes escapes of lone surrogates, which cannot be encoded.
_ESCAPE: Final = r"\\([\"\\\/bfnrt]|u([0-9a-cA-Ce-fE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))"
_CHAR: Final = rf"([^\"\\\x00-\x1F\x7F]|{_ESCAPE})"
# Keywords of schemas that llguidance compiles itself.
_COMPILED_BY_LLGUIDANCE: Final = frozenset(
    {"allOf", "patternProperties", "prefixItems", "minProperties", "maxProperties"}
)
_TYPES: Final = ("string", "number", "boolean", "null", "array", "object")


@dataclass(frozen=True, slots=True)
class Style:
    """Notation of values: JSON, or strings quoted by `delimiter` (Gemma), or Python's `words` for constants."""

    delimiter: str = ""
    space: str = " "
    words: tuple[str, str, str] = ("true", "false", "null")


JSON: Final = Style()
PYTHON: Final = Style(words=("True", "False", "None"))


def whole_json(lark: Lark, tool: ToolSchema) -> str:
    """Return the rule of a tool's arguments as one JSON object."""
    return lark.rule(lark_json(dict(tool.parameters)))


class Values:
    """Writer of the values of one tool. The grammar allows no value that contains a `banned` text."""

    def __init__(self, lark: Lark, tool: ToolSchema, style: Style, banned: Sequence[str] = ()) -> None:
        self._lark = lark
        self._name = tool.name
        self._root = tool.parameters
        self._style = style
        self._banned = tuple(banned)
        # Names of the rules of referenced schemas by `$ref`; a rule may refer to itself.
        self._references: dict[str, str] = {}
        self._any = ""

    def value(self, schema: Any) -> str:
        """Return the expression of a value of `schema`."""
        fields = mapping(schema)
        if isinstance(ref := fields.get("$ref"), str):
            return self._reference(ref, schema) if only(fields, "$ref") else self._foreign(fields)
        if "enum" in fields or "const" in fields:
            if not only(fields, "enum", "type") and not only(fields, "const", "type"):
                return self._foreign(fields)
            return either([self._constant(each) for each in constants(fields)])
        for key in ("anyOf", "oneOf"):
            options = fields.get(key)
            if isinstance(options, list) and options:
                if not only(fields, key):
                    return self._foreign(fields)
                return either([self.value(option) for option in cast("list[Any]", options)])
        if (
            fields.keys() & _COMPILED_BY_LLGUIDANCE
            or not names(fields.get("required")) <= mapping(fields.get("properties")).keys()
        ):
            return self._foreign(fields)
        if schema is False:
            self._lark.unheld.add(self._name)
        kinds = types_of(fields)
        return either([self._typed(kind, fields) for kind in kinds]) if kinds else self._anything()

    def members(self, properties: Schema, required: frozenset[str], key: str) -> str:
        """Return the rule of properties in order, separated by commas; `key` is the format of a key, such as `{}=`."""
        comma = self._lark.text("," + self._style.space)
        # The loop runs backwards. `after` is the rest after a written property, `first` is the rest if no property is
        # written yet.
        after, first = "", ""
        for name, schema in reversed(list(properties.items())):
            pair = f"{self._lark.text(key.format(name))} {self.value(schema)}"
            here, begun = f"{comma} {pair} {after}", f"{pair} {after}"
            if name in required:
                after, first = self._lark.rule(here), self._lark.rule(begun)
            else:
                after = self._lark.rule(f"({here})?" if not after else f"{here} | {after}")
                first = self._lark.rule(f"({begun})?" if not first else f"{begun} | {first}")
        return first

    def _reference(self, ref: str, schema: Any) -> str:
        if ref not in self._references:
            self._references[ref] = self._lark.reserve()
            self._lark.define(self._references[ref], self.value(resolved(schema, self._root)))
        return self._references[ref]

    def _typed(self, kind: str, schema: Schema) -> str:
        true, false, null = self._style.words
        match kind:
            case "string":
                return self._string(schema)
            case "integer" | "number" if is_bounded(schema):
                return self._foreign({**schema, "type": kind})
            case "integer":
                return self._lark.terminal(_INTEGER)
            case "number":
                return self._lark.terminal(_NUMBER)
            case "boolean":
                return either([self._lark.text(true), self._lark.text(false)])
            case "null":
                return self._lark.text(null)
            case "array":
                return self._array(schema)
            case "object":
                return self._object(schema)
            case _:
                return self._anything()

    def _string(self, schema: Schema) -> str:
        if self._style.delimiter:
            mark = self._style.delimiter
            if schema.keys() & {"pattern", "format"}:
                self._lark.unheld.add(self._name)
            return f"{self._lark.text(mark)} {self._lark.until(mark, self._banned, body=f'(?s:.{quantifier(schema)})')}"
        if schema.keys() & {"pattern", "format"}:
            return self._foreign({**schema, "type": "string"})
        # The string is one lexeme, including its quotes.
        body = self._lark.without(rf"\"{_CHAR}{quantifier(schema)}\"", self._banned)
        return self._lark.terminal(body)

    def _constant(self, value: Any) -> str:
        if isinstance(value, str) and self._style.delimiter:
            return self._lark.text(self._style.delimiter + value + self._style.delimiter)
        if value is None or isinstance(value, bool):
            return self._lark.text(self._style.words[2 if value is None else 0 if value else 1])
        return self._lark.text(json.dumps(value, ensure_ascii=False))

    def _array(self, schema: Schema) -> str:
        item = self.value(schema.get("items", {}))
        low, high = count(schema, "minItems") or 0, count(schema, "maxItems")
        left, right, comma = self._lark.text("["), self._lark.text("]"), self._lark.text("," + self._style.space)
        if high == 0:
            return f"{left} {right}"
        more = f"({comma} {item}){{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
        inner = item if high == 1 else f"{item} {more}"
        return self._lark.rule(f"{left} {inner if low else f'({inner})?'} {right}")

    def _object(self, schema: Schema) -> str:
        left, right = self._lark.text("{"), self._lark.text("}")
        properties = mapping(schema.get("properties"))
        if properties:
            form = ("{}:" if self._style.delimiter else '"{}": ').replace("{}", "\0")
            inner = self._pairs(properties, names(schema.get("required")), form)
            return self._lark.rule(f"{left} {inner} {right}")
        other = schema.get("additionalProperties", True)
        if other is False:
            return f"{left} {right}"
        value = self.value(other) if other and other is not True else self._anything()
        return self._free(value)

    def _pairs(self, properties: Schema, required: frozenset[str], form: str) -> str:
        keyed = {form.replace("\0", self._key(name)): schema for name, schema in properties.items()}
        wanted = frozenset(form.replace("\0", self._key(name)) for name in required)
        return self.members(keyed, wanted, "{}")

    def _key(self, name: str) -> str:
        return name if self._style.delimiter else json.dumps(name, ensure_ascii=False)[1:-1]

    def _free(self, value: str) -> str:
        """Return the rule of an object with arbitrary keys."""
        plain = Style(space=self._style.space)
        key = Values(self._lark, ToolSchema("", {}), plain, self._banned).value({"type": "string", "minLength": 1})
        colon, comma = self._lark.text(":" + self._style.space), self._lark.text("," + self._style.space)
        pair = f"{key} {colon} {value}"
        return self._lark.rule(f'"{{" ({pair} ({comma} {pair})*)? "}}"')

    def _anything(self) -> str:
        if not self._any:
            self._any = self._lark.reserve()
            body = either([self._typed(kind, {"items": {}} if kind == "array" else {}) for kind in _TYPES])
            self._lark.define(self._any, body)
        return self._any

    def _foreign(self, schema: Schema) -> str:
        """Return the rule of a JSON value that llguidance compiles from the schema."""
        definitions = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return self._lark.rule(lark_json({**definitions, **schema}))

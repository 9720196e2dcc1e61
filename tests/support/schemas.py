"""Random JSON schemas, sound and broken."""

import json
import random
from decimal import Decimal
from typing import Any

import jsonschema
from jsonschema.validators import Draft202012Validator, extend

_FORMATS = ["date", "time", "date-time", "email", "uuid", "ipv4", "hostname", "no-such-format"]
_PATTERNS = ["^[a-z]{1,4}$", "b+", "^(foo|bar)$", r"^\d{2}-\d{2}$", "(", "(?=x)y", "^[^ ]+$"]
_ODD = [None, True, -1, 2.5, "x", [], {}, [1], {"a": 1}, 10**30, "", "object"]


_NULL = {"type": "null"}
_ONE_DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = _ONE_DIGIT
    for _ in range(levels):
        schema = {"type": "array", "items": schema, "maxItems": 1}
    return schema


def doubled(levels: int) -> dict[str, Any]:
    """2^levels copies, were each reference replaced."""
    defs: dict[str, Any] = {f"d{at}": {"allOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(levels)}
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{levels}": _NULL}}


_RARE: list[Any] = [
    {}, True, False, None, 3, "x", [], [_NULL],
    {"type": "any"}, {"type": []}, {"type": ["string", "null"], "maxLength": 3}, {"required": "a"}, {"items": [_NULL]},
    {"$ref": "#"}, {"$ref": "#/$defs/none"}, {"$ref": "#/x", "x": {"type": "integer", "multipleOf": 9999991}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": _ONE_DIGIT}}, {"$ref": "#a", "$defs": {"x": {"$anchor": "a", **_NULL}}},
    {"$ref": "file:///etc/passwd"}, {"$ref": "http://["}, doubled(3), doubled(40),
    {"type": "object", "properties": {"n": {"anyOf": [{"$ref": "#"}, _NULL]}}, "required": ["n"],
     "additionalProperties": False},
    {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"], "additionalProperties": False},
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "prefixItems": [_NULL], "maxItems": 1},
    {"type": "object", "dependencies": {"a": ["b"]}}, {"type": "object", "propertyNames": {"pattern": "^a"}},
    {"if": {"type": "integer"}, "then": {"minimum": 3}}, {"not": {"type": "string"}},
    {"type": "array", "unevaluatedItems": False}, {"x-guidance": {"lenient": True}, "uniqueItems": True},
    {"const": 2**53 + 1}, {"const": 10**30}, {"enum": [1e300, "a"]}, {"const": {"a": [None, 1.5, "né"]}},
    {"type": "integer", "minimum": 2**63, "maximum": 2**63 + 10}, {"type": "integer", "maximum": 10**400},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 0.09},
    {"type": "number", "exclusiveMaximum": -7, "minimum": -7.5},
    {"type": "number", "minimum": 0, "exclusiveMaximum": 1.2000000000000002}, {"type": "number", "minimum": 1e308},
    {"type": "number", "multipleOf": 0.1, "minimum": 0, "maximum": 1}, {"type": "integer", "multipleOf": 99999989},
    {"type": "string", "minLength": 10**9}, {"type": "array", "minItems": 10**6},
    {"type": "string", "maxLength": 10**30},
    {"type": "object", "minProperties": 2, "additionalProperties": _NULL},
    {"type": "object", "minProperties": 2, "required": ["a", "b"], "additionalProperties": _NULL},
    {"type": "object", "properties": {"": _NULL, "🙂": _NULL, 'q"\\\n': _NULL}, "required": ["", "🙂", 'q"\\\n'],
     "additionalProperties": False},
    {"type": "object", "properties": {"\ud800": _NULL}}, {"const": "\x00\x7f"},
    {"type": "object", "properties": {"a": False}, "required": ["a"]}, {"properties": {"a": True}, "type": "object"},
    {"type": "object", "patternProperties": {"^p": _ONE_DIGIT}, "additionalProperties": False},
    {"type": "object", "patternProperties": {"(": {}}}, {"type": "object", "patternProperties": {"^a": {}, "b$": {}}},
    {"type": "string", "pattern": "[a-z&&[^b]]"},
    {"type": "string", "pattern": "(a)\\1"}, {"pattern": "^[ab]{2}$"},
    {"type": "string", "allOf": [{"pattern": f".*a.{{{at}}}"} for at in range(10, 30)]},
    {"allOf": [{"type": "integer", "minimum": 0}, {"maximum": 9}]},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"oneOf": [_ONE_DIGIT, {"type": "string", "maxLength": 2}]}, {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"anyOf": [_NULL, False]}, {"anyOf": [False]}, {"oneOf": [True, True]},
    _nested(20), _nested(70), _nested(300),
    {"type": "object", "properties": {f"p{at}": {"type": "boolean"} for at in range(300)}},
    {"type": "object", "properties": {f"p{at}": {} for at in range(4000)}}, {"enum": list(range(3000))},
    {"type": "array", "prefixItems": [_NULL, {"type": "boolean"}], "items": False, "minItems": 2},
]  # fmt: skip


def _inside(schema: dict[str, Any]) -> dict[str, Any]:
    """The same as the property of an object, with what it refers to."""
    if "$ref" in json.dumps(schema) or "$schema" in schema:
        return schema
    return {"type": "object", "properties": {"it": schema}, "required": ["it"], "additionalProperties": False}


def errors_of(value: Any, schema: Any) -> str | None:
    """Reasons why a value does not fit; its numbers count as they are written, not as binary fractions."""
    try:
        _Validator(schema).validate(value)
    except jsonschema.ValidationError as error:
        return error.message
    return None


def _multiple(_: Any, factor: float, value: Any, __: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool) and Decimal(repr(value)) % Decimal(repr(factor)):
        yield jsonschema.ValidationError(f"{value} is not a multiple of {factor}")


_Validator = extend(Draft202012Validator, {"multipleOf": _multiple})


class Schemas:
    """`make` gives one schema after the other, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def make(self) -> dict[str, Any]:
        """About a third of them are damaged."""
        schema = self._schema(depth=self._rng.randint(0, 3))
        for _ in range(self._rng.choice([0, 0, 0, 0, 1, 2])):
            self._damage(schema)
        return schema

    def make_any(self) -> Any:
        """One of `make`, or one of a sort that few write."""
        if self._rng.random() < 0.6:
            return self.make()
        schema = self._rng.choice(_RARE)
        return schema if self._rng.random() < 0.5 or not isinstance(schema, dict) else _inside(schema)

    def _schema(self, depth: int) -> dict[str, Any]:
        leaves = [self._string, self._number, self._integer, self._choice, lambda: {"type": "boolean"}]
        leaves.append(lambda: {"type": "null"})
        if depth == 0:
            return self._rng.choice(leaves)()
        kind = self._rng.choice([*leaves[:2], self._object, self._object, self._array, self._any, self._refs])
        return kind(depth) if kind in (self._object, self._array, self._any, self._refs) else kind()

    def _string(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        match self._rng.randrange(5):
            case 0:
                schema["maxLength"] = self._rng.choice([0, 1, 5, 40])
                schema["minLength"] = self._rng.choice([0, 0, 1, 6])
            case 1:
                schema["pattern"] = self._rng.choice(_PATTERNS)
            case 2:
                schema["format"] = self._rng.choice(_FORMATS)
            case _:
                schema["maxLength"] = 8
        return schema

    def _number(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "number"}
        if self._rng.random() < 0.5:
            low = self._rng.randint(-100, 100)
            schema |= {
                "minimum": low,
                self._rng.choice(["maximum", "exclusiveMaximum"]): low + self._rng.randint(-1, 50),
            }
        return schema

    def _integer(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "integer", "minimum": self._rng.randint(-5, 5), "maximum": 1000}
        if self._rng.random() < 0.3:
            schema["multipleOf"] = self._rng.choice([1, 3, 7, 100, 0, -2, 1000003])
        return schema

    def _choice(self) -> dict[str, Any]:
        values = [1, "one", None, True, 2.5, "né 🙂", {"a": [1]}, [], 'q"\\']
        if self._rng.random() < 0.3:
            return {"const": self._rng.choice(values)}
        return {"enum": self._rng.sample(values, self._rng.randint(0, 5))}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._rng.sample(["a", "b", "name", "né", "x y", 'q"', ""], self._rng.randint(0, 4))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._schema(depth - 1) for name in names},
            "required": [name for name in names if self._rng.random() < 0.7],
        }
        match self._rng.randrange(6):
            case 0 | 1 | 2:
                schema["additionalProperties"] = False
            case 3:
                schema["additionalProperties"] = self._schema(0)
            case 4:
                schema["patternProperties"] = {"^p[0-9]$": self._schema(0)}
            case _:
                schema[self._rng.choice(["minProperties", "maxProperties"])] = self._rng.randint(0, 3)
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array", "items": self._schema(depth - 1)}
        match self._rng.randrange(6):
            case 0:
                schema["prefixItems"] = [self._schema(0), self._schema(0)]
                schema["maxItems"] = 3
            case 1:
                schema["uniqueItems"] = True
            case 2:
                schema["contains"] = {"type": "string"}
            case _:
                schema["minItems"], schema["maxItems"] = self._rng.choice([(0, 2), (1, 1), (2, 3), (3, 2)])
        return schema

    def _any(self, depth: int) -> dict[str, Any]:
        parts = [self._schema(depth - 1) for _ in range(self._rng.randint(1, 3))]
        return {self._rng.choice(["anyOf", "anyOf", "oneOf", "allOf", "not"]): parts}

    def _refs(self, depth: int) -> dict[str, Any]:
        target = self._rng.choice(["#/$defs/one", "#/$defs/one", "#/$defs/none", "#", "http://example.com/schema"])
        return {
            "$defs": {"one": self._schema(depth - 1)},
            "type": "object",
            "properties": {"it": {"$ref": target}},
            "required": self._rng.choice([[], ["it"]]),
            "additionalProperties": False,
        }

    def _damage(self, schema: dict[str, Any]) -> None:
        """Put something odd in the place of one value, at any depth."""
        holder: Any = schema
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                return
            key = self._rng.choice(keys)
            if isinstance(holder[key], dict | list) and self._rng.random() < 0.6:
                holder = holder[key]
                continue
            holder[key] = self._rng.choice(_ODD)
            return

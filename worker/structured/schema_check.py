"""Validation of JSON schemas (draft 2020-12). Compilers would silently ignore keywords of a wrong type."""

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Final, cast

MAX_DEPTH: Final = 64
# Maximum value of multipleOf, and of the least common multiple of several such values. The automaton has one state per
# remainder, and 10^6 states take seconds to build.
MAX_MULTIPLE: Final = 20_000

# Keywords whose value is a schema, a list of schemas, or an object of schemas.
SCHEMA_KEYS: Final = (
    "items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else", "unevaluatedItems",
    "unevaluatedProperties",
)  # fmt: skip
LIST_KEYS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
MAP_KEYS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


class SchemaInvalid(ValueError):
    """Raised with the name of the invalid keyword."""


def check(schema: Any) -> None:
    """Check a schema. Raises `SchemaInvalid`."""
    multiples = [value for value in _check(schema, "", 0) if value != 1]
    scale = math.lcm(*(value.denominator for value in multiples))
    if multiples and math.lcm(*(int(value * scale) for value in multiples)) > MAX_MULTIPLE:
        raise SchemaInvalid("its multipleOf values are too large, or too different, to be enforced")


def _check(schema: Any, path: str, depth: int) -> Iterator[Fraction]:
    """Check a schema; yield the value of each multipleOf."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise SchemaInvalid(f"{path or 'it'} is not a schema (an object or a boolean)")
    if depth > MAX_DEPTH:
        raise SchemaInvalid(f"it is nested more than {MAX_DEPTH} levels deep")
    fields = cast(dict[str, Any], schema)
    _check_values(fields, path)
    if "multipleOf" in fields:
        yield _multiple(fields["multipleOf"], path)
    for at, inner in _inner(fields, path):
        yield from _check(inner, at, depth + 1)


def _check_values(fields: Mapping[str, Any], path: str) -> None:
    for names, what, fits in _VALUES:
        for name in names:
            if name in fields and not fits(fields[name]):
                raise SchemaInvalid(f"{path}/{name} is not {what}")


def _inner(fields: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield the direct subschemas with their paths."""
    for name in SCHEMA_KEYS:
        if name in fields:
            yield f"{path}/{name}", fields[name]
    for name in LIST_KEYS:
        if name in fields:
            if not isinstance(fields[name], list) or not fields[name]:
                raise SchemaInvalid(f"{path}/{name} is not a list of schemas")
            yield from ((f"{path}/{name}/{at}", one) for at, one in enumerate(fields[name]))
    for name in MAP_KEYS:
        if name in fields:
            if not isinstance(fields[name], dict):
                raise SchemaInvalid(f"{path}/{name} is not an object of schemas")
            yield from ((f"{path}/{name}/{key}", one) for key, one in fields[name].items())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value % 1 == 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in cast(list[Any], value))


def _is_type(value: Any) -> bool:
    return isinstance(value, str) or (_is_texts(value) and len(value) > 0)


def _is_filled(value: Any) -> bool:
    return isinstance(value, list) and len(cast(list[Any], value)) > 0


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


_VALUES: Final = (
    (("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "a number", _is_number),
    (
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        "a whole number of at least 0",
        _is_count,
    ),
    (("pattern", "format", "$ref", "$schema", "$id", "$anchor", "title", "description"), "a text", _is_text),
    (("required",), "a list of names", _is_texts),
    (("type",), "a type or a list of types", _is_type),
    (("enum",), "a list of values", _is_filled),
    (("uniqueItems",), "true or false", _is_flag),
)


def _multiple(value: Any, path: str) -> Fraction:
    # The decimal notation of a number counts: 0.01 means a hundredth, not the nearest binary fraction.
    exact = Fraction(repr(value))
    if exact <= 0 or exact.numerator > MAX_MULTIPLE or exact.denominator > 10**9:
        raise SchemaInvalid(f"{path}/multipleOf is not a positive number that can be enforced")
    return exact

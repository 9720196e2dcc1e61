"""A JSON schema as llguidance enforces it to the letter: where it would be inexact, tightened, or refused."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, Final, cast
from urllib.parse import unquote

from worker.structured.schema_check import SchemaInvalid

# Doubles hold every whole number up to here; llguidance reads all numbers as doubles, …
NUMBER_MAX: Final = 2**53
# … and cuts what bounds a whole number to 64 bits.
BOUND_MAX: Final = float(2**63 - 1024)
# Where a bound of zero is not to be reached.
TINY: Final = 1e-15
# Copies of schemas in allOf; the time that they take grows with their square: these take half a second.
MERGED_MAX: Final = 4000
_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
# Regexes for one text; the time that it takes to tell whether any text fits them doubles with each.
PATTERNS_MAX: Final = 8
# Values beside a pattern; each is tried.
TRIED_MAX: Final = 1000
# Of one object; the time grows with their square.
PROPERTIES_MAX: Final = 2000
_PLACES: Final = frozenset(
    {
        "items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else", "unevaluatedItems",
        "unevaluatedProperties", "anyOf", "oneOf", "allOf", "prefixItems", *_MAPS,
    }
)  # fmt: skip

# How far an exclusive bound is moved, as a part of what is between the two.
_STEP: Final = 1e-6
# Of more digits than these, llguidance may drop some.
_DIGITS: Final = 14
# A class in brackets, as group 1, or an escape.
# A class that is never closed goes to the end, so that none is looked for inside of it: a search of each takes the
# square of the time, in which no other thread runs.
_CLASS: Final = re.compile(r"\\.|\[\^?(\]?(?:\\.|[^\]\\])*+)\]?", re.DOTALL)
_ESCAPED: Final = re.compile(r"\\.", re.DOTALL)
_SETS: Final = re.compile(r"\[|&&|--|~~")
_BOUNDS: Final = {"minimum": True, "exclusiveMinimum": True, "maximum": False, "exclusiveMaximum": False}

# What is given up first where not all can be held, and what next.
_LOOSER: Final = (
    frozenset({"pattern", "format", "patternProperties", "propertyNames", "not", "if", "then", "else"}),
    frozenset(
        {
            "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength",
            "minItems", "maxItems", "minProperties", "maxProperties", "contains", "minContains", "maxContains",
        }
    ),
)  # fmt: skip

Path = tuple[str, ...]
Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Size:
    """Number of schemas and patterns that one value must fit at once."""

    schemas: int
    patterns: int


@dataclass(slots=True)
class Exact:
    """A schema as it can be enforced. With `has_loose_keys`, a named key could be written a second time, escaped."""

    schema: dict[str, Any]
    has_loose_keys: bool


def exact(schema: Schema) -> Exact:
    """For a schema that `check` has let through. Raises `SchemaInvalid`."""
    walk = _Walk()
    rewritten = walk.schema(schema, ())
    walk.check_references()
    walk.check_merges()
    return Exact(rewritten, walk.has_loose_keys)


def loosened(schema: dict[str, Any]) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """A schema, and ever looser ones with the names of what they lack: conditions on single values, then on their size
    and number. What is left is the shape."""
    lacks: tuple[str, ...] = ()
    yield schema, lacks
    for keywords in _LOOSER:
        dropped: set[str] = set()
        schema = _without(schema, keywords, dropped)
        if dropped:
            lacks = (*lacks, *sorted(dropped))
            yield schema, lacks


def _without(fields: dict[str, Any], keywords: frozenset[str], dropped: set[str]) -> dict[str, Any]:
    """A schema without `keywords` in any of the places that hold schemas."""

    def one(value: Any) -> Any:
        return _without(cast(dict[str, Any], value), keywords, dropped) if isinstance(value, dict) else value

    kept: dict[str, Any] = {}
    for key, value in fields.items():
        if key in keywords:
            dropped.add(key)
        elif key in _MAPS and isinstance(value, dict):
            kept[key] = {name: one(inner) for name, inner in cast(dict[str, Any], value).items()}
        elif key in _PLACES and isinstance(value, list):
            kept[key] = [one(inner) for inner in cast(list[Any], value)]
        else:
            kept[key] = one(value) if key in _PLACES else value
    return kept


def bound(schema: Schema) -> None:
    """Only whether it can be compiled in bounded time, for a schema that `check` has let through.

    Raises `SchemaInvalid`.
    """
    walk = _Walk(is_exact=False)
    walk.schema(schema, ())
    walk.check_references()
    walk.check_merges()


@dataclass(slots=True)
class _Walk:
    """One way through a schema: the places that hold schemas, and what is found on it."""

    is_exact: bool = True
    has_loose_keys: bool = False
    places: dict[Path, Schema] = field(default_factory=dict[Path, Schema])
    roots: list[Path] = field(default_factory=lambda: [()])
    references: list[str] = field(default_factory=list[str])

    def schema(self, fields: Schema, path: Path) -> dict[str, Any]:
        self.places[path] = fields
        if "$id" in fields:
            self.roots.append(path)
        if isinstance(ref := fields.get("$ref"), str):
            self.references.append(ref)
        if (fields.get("properties") or fields.get("patternProperties")) and (
            fields.get("additionalProperties", True) is not False
        ):
            self.has_loose_keys = True
        if len(fields.get("properties", ())) > PROPERTIES_MAX:
            raise SchemaInvalid(f"{_shown(path)}/properties has more than {PROPERTIES_MAX} entries")
        if "pattern" in fields and len(fields.get("enum", ())) > TRIED_MAX:
            raise SchemaInvalid(f"{_shown(path)}/enum has more than {TRIED_MAX} values beside a pattern")
        rewritten = {key: self._inner(key, value, (*path, key)) for key, value in fields.items()}
        if self.is_exact:
            _make_exact(rewritten, _shown(path))
        return rewritten

    def check_references(self) -> None:
        """Refuse references to places without a schema: they would be compiled unchecked, without bounds on numbers."""
        for ref in self.references:
            if "/" in ref.partition("#")[2] and self._target(ref) is None:
                raise SchemaInvalid(f"$ref {ref[:100]!r} points to no schema in it")

    def check_merges(self) -> None:
        """Bound the copies made by allOf: each reference is copied into it with its own: 2^n copies of n levels."""
        sizes: dict[Path, _Size] = {}
        merged = [self._size(path, sizes) for path, fields in self.places.items() if "allOf" in fields]
        if sum(size.schemas for size in merged) > MERGED_MAX:
            raise SchemaInvalid("its allOf refer to too much")
        if max((size.patterns for size in merged), default=0) > PATTERNS_MAX:
            raise SchemaInvalid(f"more than {PATTERNS_MAX} patterns or formats in it are for the same text")

    def _size(self, path: Path, sizes: "dict[Path, _Size]") -> "_Size":
        """Size of a schema with all references replaced; a recursive one is counted once."""
        if path not in sizes:
            sizes[path] = _Size(1, 0)
            fields = self.places[path]
            target = self._target(ref) if isinstance(ref := fields.get("$ref"), str) else None
            both = [(*path, "allOf", str(at)) for at in range(len(fields.get("allOf", ())))]
            both += [target] if target is not None else []
            either = [(*path, key, str(at)) for key in ("anyOf", "oneOf") for at in range(len(fields.get(key, ())))]
            every = [self._size(one, sizes) for one in both]
            some = [self._size(one, sizes) for one in either]
            own = len(fields.keys() & {"pattern", "format"})
            sizes[path] = _Size(
                min(MERGED_MAX + 1, 1 + sum(size.schemas for size in every + some)),
                own + sum(size.patterns for size in every) + max((size.patterns for size in some), default=0),
            )
        return sizes[path]

    def _target(self, ref: str) -> Path | None:
        """Target of a reference by path; None for a reference by name, and for a missing target."""
        _, _, fragment = ref.partition("#")
        if ref != "#" and "/" not in fragment:
            return None
        steps = tuple(step.replace("~1", "/").replace("~0", "~") for step in unquote(fragment).split("/")[1:])
        return next((found for root in self.roots if (found := (*root, *steps)) in self.places), None)

    def _inner(self, key: str, value: Any, path: Path) -> Any:
        if key not in _PLACES:
            return value
        if key in _MAPS:
            inner = cast(Schema, value)
            return {name: self._one(one, (*path, name)) for name, one in inner.items()}
        if isinstance(value, list):
            return [self._one(one, (*path, str(at))) for at, one in enumerate(cast(list[Any], value))]
        return self._one(value, path)

    def _one(self, value: Any, path: Path) -> Any:
        if isinstance(value, Mapping):
            return self.schema(cast(Schema, value), path)
        self.places[path] = {}  # true or false
        return value


def _make_exact(fields: dict[str, Any], where: str) -> None:
    for pattern in (fields.get("pattern", ""), *fields.get("patternProperties", ())):
        _check_pattern(pattern, where)
    for key in fields.keys() & {"const", "enum"}:
        _check_constants(fields[key], f"{where}/{key}")
    # Drafts that know fewer keywords would skip the others.
    fields.pop("$schema", None)
    _tighten(fields, where)
    _count_keys(fields, where)


def _tighten(fields: dict[str, Any], where: str) -> None:
    """Bounds that hold as they are written: some are rounded, and some exclusive ones let through."""
    for key, is_low in _BOUNDS.items():
        if key in fields:
            fields[key] = bound = _inward(fields[key], is_low)
            if (bound > BOUND_MAX) if is_low else (bound < -BOUND_MAX):
                raise SchemaInvalid(f"{where}/{key} is beyond 64 bits")
    for key, inclusive, nearest, tiny in (
        ("exclusiveMinimum", "minimum", max, TINY),
        ("exclusiveMaximum", "maximum", min, -TINY),
    ):
        if fields.get(key) == 0:
            fields[inclusive] = nearest(fields.get(inclusive, tiny), tiny)
            del fields[key]
    if fields.get("type") != "integer":
        _part(fields, where)


def _part(fields: dict[str, Any], where: str) -> None:
    """Move an exclusive whole bound inwards where the other one is close: between 1 and 1.5, it is not held."""
    low = max((fields[key] for key in ("minimum", "exclusiveMinimum") if key in fields), default=None)
    high = min((fields[key] for key in ("maximum", "exclusiveMaximum") if key in fields), default=None)
    if low is None or high is None or not 0 < high - low <= 1:
        return
    for key, inclusive, bound, way in (
        ("exclusiveMinimum", "minimum", low, 1),
        ("exclusiveMaximum", "maximum", high, -1),
    ):
        if fields.get(key) == bound and bound == int(bound):
            moved = float(f"{bound + way * (high - low) * _STEP:.13g}")
            if moved == bound:
                raise SchemaInvalid(f"{where or 'it'} has bounds that are too close")
            fields[inclusive] = moved
            del fields[key]


def _inward(bound: float, is_low: bool) -> float:
    """The nearest number that llguidance reads and compares as it is, of those that the bound lets through."""
    if isinstance(bound, int) and abs(bound) <= NUMBER_MAX:
        return bound
    exact = Decimal(repr(bound))
    rounding = ROUND_CEILING if is_low else ROUND_FLOOR
    short = Context(prec=_DIGITS, rounding=rounding, Emax=10**6, Emin=-(10**6)).plus(exact)
    return float(short) if len(exact.normalize().as_tuple().digits) > _DIGITS else bound


def _count_keys(fields: dict[str, Any], where: str) -> None:
    """Nothing keeps a free key from being written twice, and then it counts for two."""
    least = fields.get("minProperties", 0)
    if least < 2:
        return
    if len(set(fields.get("required", ()))) < least:
        raise SchemaInvalid(f"{where}/minProperties is more than 1 and than what is required")
    del fields["minProperties"]


def _check_pattern(pattern: str, where: str) -> None:
    """Classes within classes, and what adds and takes away: there, the regexes of JSON Schema have other meanings."""
    for match in _CLASS.finditer(pattern):
        if match[1] is not None and _SETS.search(_ESCAPED.sub("", match[1])):
            raise SchemaInvalid(f"{where or 'it'} has a pattern with '[', '&&', '--' or '~~' inside of brackets")


def _check_constants(value: Any, where: str) -> None:
    """Raises `SchemaInvalid` for numbers that would be written as others."""
    rest = [value]
    while rest:
        match rest.pop():
            case dict() as inner:
                rest += cast(dict[str, Any], inner).values()
            case list() as inner:
                rest += cast(list[Any], inner)
            case int() | float() as number if not abs(number) <= NUMBER_MAX:
                raise SchemaInvalid(f"{where} has a number beyond 2^53, which cannot be held exactly")
            case _:
                pass


def _shown(path: Path) -> str:
    return "".join(f"/{step}" for step in path)

"""Exact JSON schemas: a schema that llguidance would enforce inexactly is tightened or refused."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any, Final, cast
from urllib.parse import unquote

from worker.structured.schema_check import LIST_KEYS, MAP_KEYS, SCHEMA_KEYS, SchemaInvalid

# Largest number up to which doubles represent every integer; llguidance parses all numbers as doubles.
NUMBER_MAX: Final = 2**53
# Largest double below 2^63; llguidance cuts the bounds of integers to 64 bits.
BOUND_MAX: Final = float(2**63 - 1024)
# An exclusive bound of zero becomes an inclusive bound of this distance from zero.
MIN_NONZERO_BOUND: Final = 1e-15
# Maximum number of copies of schemas in allOf. Compile time grows with their square: 4,000 copies take half a second.
MERGED_MAX: Final = 4000
# Maximum number of regexes for one text. The time to check whether any text matches all of them doubles with each.
PATTERNS_MAX: Final = 8
# Maximum number of enum values beside a pattern; each value is tried against it.
TRIED_MAX: Final = 1000
# Maximum number of properties of one object. Compile time grows with their square.
PROPERTIES_MAX: Final = 2000
_PLACES: Final = frozenset((*SCHEMA_KEYS, *LIST_KEYS, *MAP_KEYS))
# An exclusive bound moves inwards by this fraction of the distance between both bounds.
_BOUND_SHIFT_FRACTION: Final = 1e-6
# Number of significant digits that llguidance keeps; it may drop further digits.
_MAX_EXACT_DIGITS: Final = 14
# Matches an escape, or a bracketed class as group 1. A class without its closing bracket extends to the end of the
# text, so that no further class is searched inside it: that search is quadratic and holds the GIL.
_CLASS: Final = re.compile(r"\\.|\[\^?(\]?(?:\\.|[^\]\\])*+)\]?", re.DOTALL)
_ESCAPED: Final = re.compile(r"\\.", re.DOTALL)
_SETS: Final = re.compile(r"\[|&&|--|~~")
_BOUNDS: Final = {"minimum": True, "exclusiveMinimum": True, "maximum": False, "exclusiveMaximum": False}

# Sets of keywords, dropped in this order until the rest of a schema can be enforced.
_DROPPED_IN_ORDER: Final = (
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
    """Number of schemas and patterns that one value must match at once."""

    schemas: int
    patterns: int


@dataclass(slots=True)
class Exact:
    """Schema that llguidance enforces exactly.

    With `has_loose_keys`, a model could write a declared key a second time in its escaped form.
    """

    schema: dict[str, Any]
    has_loose_keys: bool


def exact(schema: Schema) -> Exact:
    """Rewrite a schema that has passed `check` to an exact one. Raises `SchemaInvalid`."""
    walk = _Walk()
    return Exact(walk.root(schema), walk.has_loose_keys)


def loosened(schema: dict[str, Any]) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """Yield a schema, then looser ones with the names of the dropped keywords.

    Conditions on single values are dropped first, then those on sizes and counts; the shape remains.
    """
    lacks: tuple[str, ...] = ()
    yield schema, lacks
    for keywords in _DROPPED_IN_ORDER:
        dropped: set[str] = set()
        schema = _without(schema, keywords, dropped)
        if dropped:
            lacks = (*lacks, *sorted(dropped))
            yield schema, lacks


def _without(fields: dict[str, Any], keywords: frozenset[str], dropped: set[str]) -> dict[str, Any]:
    """Return a schema without `keywords`, at every place that holds a schema."""

    def one(value: Any) -> Any:
        return _without(cast(dict[str, Any], value), keywords, dropped) if isinstance(value, dict) else value

    kept: dict[str, Any] = {}
    for key, value in fields.items():
        if key in keywords:
            dropped.add(key)
        elif key in MAP_KEYS and isinstance(value, dict):
            kept[key] = {name: one(inner) for name, inner in cast(dict[str, Any], value).items()}
        elif key in _PLACES and isinstance(value, list):
            kept[key] = [one(inner) for inner in cast(list[Any], value)]
        else:
            kept[key] = one(value) if key in _PLACES else value
    return kept


def dangling(schema: Schema) -> frozenset[str]:
    """Return the references of a schema that has passed `check` that point to no schema in it."""
    walk = _Walk(is_exact=False)
    try:
        walk.schema(schema, ())
    except SchemaInvalid:
        return frozenset()
    return frozenset(ref for ref in walk.references if walk.is_dangling(ref))


def bound(schema: Schema) -> None:
    """Check that a schema which has passed `check` compiles in bounded time. Raises `SchemaInvalid`."""
    _Walk(is_exact=False).root(schema)


@dataclass(slots=True)
class _Walk:
    """Traversal of a document: the places of its subschemas, its references and its roots."""

    is_exact: bool = True
    has_loose_keys: bool = False
    places: dict[Path, Schema] = field(default_factory=dict[Path, Schema])
    roots: list[Path] = field(default_factory=lambda: [()])
    references: list[str] = field(default_factory=list[str])

    def root(self, schema: Schema) -> dict[str, Any]:
        """Rewrite a whole document, and check its references and merges."""
        rewritten = self.schema(schema, ())
        self._check_references()
        self._check_merges()
        return rewritten

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

    def is_dangling(self, ref: str) -> bool:
        """Return whether a reference, by path or by name, has no target."""
        document, _, name = ref.partition("#")
        if ref == "#" or "/" in name:
            return self._target(ref) is None
        named = {fields.get(key) for fields in self.places.values() for key in ("$anchor", "$dynamicAnchor")}
        return (document not in {fields.get("$id", "") for fields in self.places.values()}) or (
            bool(name) and name not in named
        )

    def _check_references(self) -> None:
        """Refuse references to places without a schema: they would be compiled without checks and bounds."""
        for ref in self.references:
            if "/" in ref.partition("#")[2] and self._target(ref) is None:
                raise SchemaInvalid(f"$ref {ref[:100]!r} points to no schema in it")

    def _check_merges(self) -> None:
        """Bound the copies made by allOf. A reference's target is copied with its own references: n levels have 2^n
        copies.
        """
        sizes: dict[Path, _Size] = {}
        merged = [self._size(path, sizes) for path, fields in self.places.items() if "allOf" in fields]
        if sum(size.schemas for size in merged) > MERGED_MAX:
            raise SchemaInvalid("its allOf refer to too much")
        if max((size.patterns for size in merged), default=0) > PATTERNS_MAX:
            raise SchemaInvalid(f"more than {PATTERNS_MAX} patterns or formats in it are for the same text")

    def _size(self, path: Path, sizes: "dict[Path, _Size]") -> "_Size":
        """Return the size of a schema with all references replaced; a recursive reference is counted once."""
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
        """Resolve a reference by path; None for a reference by name, and for a missing target."""
        _, _, fragment = ref.partition("#")
        if ref != "#" and "/" not in fragment:
            return None
        steps = tuple(step.replace("~1", "/").replace("~0", "~") for step in unquote(fragment).split("/")[1:])
        return next((found for root in self.roots if (found := (*root, *steps)) in self.places), None)

    def _inner(self, key: str, value: Any, path: Path) -> Any:
        if key not in _PLACES:
            return value
        if key in MAP_KEYS:
            inner = cast(Schema, value)
            return {name: self._one(one, (*path, name)) for name, one in inner.items()}
        if isinstance(value, list):
            return [self._one(one, (*path, str(at))) for at, one in enumerate(cast(list[Any], value))]
        return self._one(value, path)

    def _one(self, value: Any, path: Path) -> Any:
        if isinstance(value, Mapping):
            return self.schema(cast(Schema, value), path)
        self.places[path] = {}  # the schema is true or false
        return value


def _make_exact(fields: dict[str, Any], where: str) -> None:
    for pattern in (fields.get("pattern", ""), *fields.get("patternProperties", ())):
        _check_pattern(pattern, where)
    for key in fields.keys() & {"const", "enum"}:
        _check_constants(fields[key], f"{where}/{key}")
    # A `$schema` of an older draft, which defines fewer keywords, would disable the other keywords.
    fields.pop("$schema", None)
    _tighten(fields, where)
    _count_keys(fields, where)


def _tighten(fields: dict[str, Any], where: str) -> None:
    """Tighten bounds that llguidance rounds, and exclusive bounds that it does not enforce."""
    for key, is_low in _BOUNDS.items():
        if key in fields:
            fields[key] = bound = _inward(fields[key], is_low)
            if (bound > BOUND_MAX) if is_low else (bound < -BOUND_MAX):
                raise SchemaInvalid(f"{where}/{key} is beyond 64 bits")
    for key, inclusive, nearest, tiny in (
        ("exclusiveMinimum", "minimum", max, MIN_NONZERO_BOUND),
        ("exclusiveMaximum", "maximum", min, -MIN_NONZERO_BOUND),
    ):
        if fields.get(key) == 0:
            fields[inclusive] = nearest(fields.get(inclusive, tiny), tiny)
            del fields[key]
    if fields.get("type") != "integer":
        _part(fields, where)


def _part(fields: dict[str, Any], where: str) -> None:
    """Move an exclusive integer bound inwards if the other bound is at most 1 away: llguidance does not enforce
    intervals such as (1, 1.5)."""
    low = max((fields[key] for key in ("minimum", "exclusiveMinimum") if key in fields), default=None)
    high = min((fields[key] for key in ("maximum", "exclusiveMaximum") if key in fields), default=None)
    if low is None or high is None or not 0 < high - low <= 1:
        return
    for key, inclusive, bound, way in (
        ("exclusiveMinimum", "minimum", low, 1),
        ("exclusiveMaximum", "maximum", high, -1),
    ):
        if fields.get(key) == bound and bound == int(bound):
            moved = float(f"{bound + way * (high - low) * _BOUND_SHIFT_FRACTION:.13g}")
            if moved == bound:
                raise SchemaInvalid(f"{where or 'it'} has bounds that are too close")
            fields[inclusive] = moved
            del fields[key]


def _inward(bound: float, is_low: bool) -> float:
    """Return the nearest number within the bound that llguidance parses and compares exactly."""
    if isinstance(bound, int) and abs(bound) <= NUMBER_MAX:
        return bound
    exact = Decimal(repr(bound))
    rounding = ROUND_CEILING if is_low else ROUND_FLOOR
    short = Context(prec=_MAX_EXACT_DIGITS, rounding=rounding, Emax=10**6, Emin=-(10**6)).plus(exact)
    return float(short) if len(exact.normalize().as_tuple().digits) > _MAX_EXACT_DIGITS else bound


def _count_keys(fields: dict[str, Any], where: str) -> None:
    """Refuse a minProperties above 1 that `required` does not imply: a repeated free key would count twice."""
    least = fields.get("minProperties", 0)
    if least < 2:
        return
    if len(set(fields.get("required", ()))) < least:
        raise SchemaInvalid(f"{where}/minProperties is more than 1 and than what is required")
    del fields["minProperties"]


def _check_pattern(pattern: str, where: str) -> None:
    """Refuse nested classes and set operations, which llguidance's regexes define differently from JSON Schema's."""
    for match in _CLASS.finditer(pattern):
        if match[1] is not None and _SETS.search(_ESCAPED.sub("", match[1])):
            raise SchemaInvalid(f"{where or 'it'} has a pattern with '[', '&&', '--' or '~~' inside of brackets")


def _check_constants(value: Any, where: str) -> None:
    """Raise `SchemaInvalid` for numbers that llguidance would write differently."""
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

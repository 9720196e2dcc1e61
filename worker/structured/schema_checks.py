"""JSON schemas of structured output: their validation, repair, and exact form.

Validation of JSON schemas (draft 2020-12). Compilers would silently ignore keywords of a wrong type.

Repair of JSON schemas: tuples of older drafts, and single faults that would keep a schema from being enforced.

Exact JSON schemas: a schema that llguidance would enforce inexactly is tightened or refused.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from typing import Any, Final, cast
from urllib.parse import unquote

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


MutableSchema = dict[str, Any]
Edit = Callable[[MutableSchema], MutableSchema]

# Keywords that say what kind of value a schema is for.
_KINDS: Final = frozenset({"type", "anyOf", "oneOf", "allOf", "enum", "const", "$ref"})
_TYPES: Final = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})


def edited(schema: MutableSchema, edit: Edit, depth: int = 0) -> MutableSchema:
    """Return the schema with each subschema in it, and last the schema itself, replaced by what `edit` returns."""
    if depth > MAX_DEPTH:
        return schema

    def one(value: Any) -> Any:
        return edited(cast(MutableSchema, value), edit, depth + 1) if isinstance(value, dict) else value

    fields: MutableSchema = {}
    for key, value in schema.items():
        if key in MAP_KEYS and isinstance(value, dict):
            fields[key] = {name: one(inner) for name, inner in cast(MutableSchema, value).items()}
        elif (key in LIST_KEYS or key == "items") and isinstance(value, list):
            fields[key] = [one(inner) for inner in cast(list[Any], value)]
        else:
            fields[key] = one(value) if key in SCHEMA_KEYS or key == "additionalItems" else value
    return edit(fields)


def modern(schema: MutableSchema) -> MutableSchema:
    """Return the schema with the tuples of draft 7 (`items` as a list) as `prefixItems`, also in its references."""

    def edit(fields: MutableSchema) -> MutableSchema:
        if isinstance(ref := fields.get("$ref"), str):
            fields["$ref"] = _modern_reference(ref, schema)
        if isinstance(items := fields.get("items"), list) and "prefixItems" not in fields:
            del fields["items"]
            if items:
                fields["prefixItems"] = items
            if "additionalItems" in fields:
                fields["items"] = fields.pop("additionalItems")
        return fields

    return edited(schema, edit)


def _modern_reference(ref: str, root: MutableSchema) -> str:
    """Return a local reference to a place that `modern` moves."""
    start, _, fragment = ref.partition("#")
    place: Any = root
    steps: list[str] = []
    for step in fragment.split("/")[1:]:
        is_tuple = isinstance(place, Mapping) and isinstance(cast(MutableSchema, place).get("items"), list)
        moved = {"items": "prefixItems", "additionalItems": "items"}.get(step, step) if is_tuple else step
        steps.append(moved)
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping):
            place = cast(MutableSchema, place).get(name)
        else:
            items = cast(list[Any], place) if isinstance(place, list) else []
            place = items[int(name)] if name.isdecimal() and int(name) < len(items) else None
    return f"{start}#/{'/'.join(steps)}" if steps else ref


def repaired(schema: MutableSchema, dangling: frozenset[str]) -> tuple[MutableSchema, tuple[str, ...]]:
    """Return the schema without single faults that keep all of it from being enforced, and the keywords at fault.

    They are references in `dangling`, types that JSON does not have, and required names that an object cannot have. A
    type in capitals, as Google's API has it, is read as it is meant. A required name of an open object becomes one of
    its properties, so that it stays possible where undeclared properties are not written. The whole stays an object.
    """
    faults: set[str] = set()

    def edit(fields: MutableSchema) -> MutableSchema:
        if fields.get("$ref") in dangling:
            del fields["$ref"]
            faults.add("$ref")
        if not _is_known(fields.get("type", "null")):
            faults.add("type")
            _repair_type(fields)
        if _repair_required(fields):
            faults.add("required")
        return fields

    root = edited(schema, edit)
    if faults and not root.keys() & _KINDS:
        root["type"] = "object"
    return root, tuple(sorted(faults))


def _is_known(declared: Any) -> bool:
    names = cast(list[Any], declared) if isinstance(declared, list) else [declared]
    return all(isinstance(name, str) and name in _TYPES for name in names)


def _repair_type(fields: MutableSchema) -> None:
    """Replace an unknown type by the one that is meant, or that the other keywords imply, or remove it."""
    declared = fields.pop("type")
    names = cast(list[Any], declared) if isinstance(declared, list) else [declared]
    meant = [str(name).lower() for name in names]
    if _is_known(meant):
        fields["type"] = meant if isinstance(declared, list) else meant[0]
    elif "properties" in fields:
        fields["type"] = "object"
    elif fields.keys() & {"items", "prefixItems"}:
        fields["type"] = "array"


def _repair_required(fields: MutableSchema) -> bool:
    """Return whether a required name was removed, because the object cannot have it."""
    properties, required, others = (fields.get(key) for key in ("properties", "required", "additionalProperties"))
    if not isinstance(required, list) or "patternProperties" in fields:
        return False
    names = cast(list[Any], required)
    known = cast(MutableSchema, properties) if isinstance(properties, dict) else {}
    missing = [name for name in names if isinstance(name, str) and name not in known]
    if missing and others is False:
        fields["required"] = [name for name in names if name not in missing]
        return True
    if missing and known:
        fields["properties"] = {**known, **{name: others if isinstance(others, dict) else {} for name in missing}}
    return False


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

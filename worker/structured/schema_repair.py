"""Repair of JSON schemas: tuples of older drafts, and single faults that would keep a schema from being enforced."""

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from worker.structured.schema_check import LIST_KEYS, MAP_KEYS, MAX_DEPTH, SCHEMA_KEYS

Schema = dict[str, Any]
Edit = Callable[[Schema], Schema]

# Keywords that say what kind of value a schema is for.
_KINDS: Final = frozenset({"type", "anyOf", "oneOf", "allOf", "enum", "const", "$ref"})
_TYPES: Final = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})


def edited(schema: Schema, edit: Edit, depth: int = 0) -> Schema:
    """Return the schema with each subschema in it, and last the schema itself, replaced by what `edit` returns."""
    if depth > MAX_DEPTH:
        return schema

    def one(value: Any) -> Any:
        return edited(cast(Schema, value), edit, depth + 1) if isinstance(value, dict) else value

    fields: Schema = {}
    for key, value in schema.items():
        if key in MAP_KEYS and isinstance(value, dict):
            fields[key] = {name: one(inner) for name, inner in cast(Schema, value).items()}
        elif (key in LIST_KEYS or key == "items") and isinstance(value, list):
            fields[key] = [one(inner) for inner in cast(list[Any], value)]
        else:
            fields[key] = one(value) if key in SCHEMA_KEYS or key == "additionalItems" else value
    return edit(fields)


def modern(schema: Schema) -> Schema:
    """Return the schema with the tuples of draft 7 (`items` as a list) as `prefixItems`, also in its references."""

    def edit(fields: Schema) -> Schema:
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


def _modern_reference(ref: str, root: Schema) -> str:
    """Return a local reference to a place that `modern` moves."""
    start, _, fragment = ref.partition("#")
    place: Any = root
    steps: list[str] = []
    for step in fragment.split("/")[1:]:
        is_tuple = isinstance(place, Mapping) and isinstance(cast(Schema, place).get("items"), list)
        moved = {"items": "prefixItems", "additionalItems": "items"}.get(step, step) if is_tuple else step
        steps.append(moved)
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping):
            place = cast(Schema, place).get(name)
        else:
            items = cast(list[Any], place) if isinstance(place, list) else []
            place = items[int(name)] if name.isdecimal() and int(name) < len(items) else None
    return f"{start}#/{'/'.join(steps)}" if steps else ref


def repaired(schema: Schema, dangling: frozenset[str]) -> tuple[Schema, tuple[str, ...]]:
    """Return the schema without single faults that keep all of it from being enforced, and the keywords at fault.

    They are references in `dangling`, types that JSON does not have, and required names that an object cannot have. A
    type in capitals, as Google's API has it, is read as it is meant. A required name of an open object becomes one of
    its properties, so that it stays possible where undeclared properties are not written. The whole stays an object.
    """
    faults: set[str] = set()

    def edit(fields: Schema) -> Schema:
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


def _repair_type(fields: Schema) -> None:
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


def _repair_required(fields: Schema) -> bool:
    """Return whether a required name was removed, because the object cannot have it."""
    properties, required, others = (fields.get(key) for key in ("properties", "required", "additionalProperties"))
    if not isinstance(required, list) or "patternProperties" in fields:
        return False
    names = cast(list[Any], required)
    known = cast(Schema, properties) if isinstance(properties, dict) else {}
    missing = [name for name in names if isinstance(name, str) and name not in known]
    if missing and others is False:
        fields["required"] = [name for name in names if name not in missing]
        return True
    if missing and known:
        fields["properties"] = {**known, **{name: others if isinstance(others, dict) else {} for name in missing}}
    return False

"""Schema hints of the OpenAPI document: constraints on a field beyond its type. Decoding does not look at them: the
lowering refuses a value, with its own message, and the hints tell clients beforehand which values are accepted.

A struct's own `hint`, a class variable, is added to its schema: what its fields mean together.
"""

from typing import Any, Final

from msgspec import Meta


def words(*known: str) -> Meta:
    """One of these."""
    return Meta(extra_json_schema={"enum": list(known)})


def known(*likely: str) -> Meta:
    """One of these, or another that does nothing or is refused where it stands."""
    return Meta(extra_json_schema={"anyOf": [{"enum": list(likely)}, {"type": "string"}]})


def shape(schema: dict[str, Any]) -> Meta:
    """Any JSON Schema."""
    return Meta(extra_json_schema=schema)


def typed(*known: str, **properties: Any) -> dict[str, Any]:
    """The schema of an object whose `type` is one of these."""
    return {
        "type": "object",
        "properties": {"type": {"enum": list(known)}, **properties},
        "required": ["type"],
    }


def case(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """One of the forms that an object may have."""
    return {"properties": properties, "required": list(required)}


NULL: Final = {"type": "null"}
UNSERVED: Final = shape(NULL | {"description": "Not supported: anything else is refused."})
TEXT: Final = {"type": "string", "minLength": 1}
NAMED: Final = {"type": "object", "properties": {"name": TEXT}, "required": ["name"]}

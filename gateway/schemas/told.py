"""What the published document says of a field beyond its type. Decoding does not look at it: what is refused for its
value is refused by the lowering, in its own words, and this says beforehand what is not."""

from typing import Any, Final

from msgspec import Meta


def words(*known: str) -> Meta:
    """One of these."""
    return Meta(extra_json_schema={"enum": list(known)})


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


NULL: Final = {"type": "null"}
UNSERVED: Final = shape(NULL | {"description": "Not supported: anything else is refused."})
TEXT: Final = {"type": "string", "minLength": 1}
NAMED: Final = {"type": "object", "properties": {"name": TEXT}, "required": ["name"]}

"""Hints in the schemas of the OpenAPI document: constraints on a field that decoding does not enforce.

The lowering refuses invalid values with its own messages; hints inform clients in advance. Constraints on several
fields are in a struct's class variable `hint`, which is added to the struct's schema.
"""

from typing import Any, Final

from msgspec import Meta


def words(*known: str) -> Meta:
    """Return the hint for a text that is one of these words."""
    return Meta(extra_json_schema={"enum": list(known)})


def known(*likely: str) -> Meta:
    """Return the hint for a text that is usually one of these words. Other words have no effect or are refused when
    used.
    """
    return Meta(extra_json_schema={"anyOf": [{"enum": list(likely)}, {"type": "string"}]})


def shape(schema: dict[str, Any]) -> Meta:
    """Return a hint with any JSON Schema."""
    return Meta(extra_json_schema=schema)


def typed(*known: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object whose `type` is one of `known`."""
    return {
        "type": "object",
        "properties": {"type": {"enum": list(known)}, **properties},
        "required": ["type"],
    }


def case(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """Return one of several alternative schemas of an object: the `required` fields, and the schemas of its
    `properties`.
    """
    return {"properties": properties, "required": list(required)}


NULL: Final = {"type": "null"}
UNSERVED: Final = shape(NULL | {"description": "Not supported: anything else is refused."})
TEXT: Final = {"type": "string", "minLength": 1}
NAMED: Final = {"type": "object", "properties": {"name": TEXT}, "required": ["name"]}

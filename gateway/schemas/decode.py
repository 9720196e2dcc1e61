"""Bodies to structs, alike for every dialect: what is wrong is a `BadRequest`, what nobody knows is named."""

from collections.abc import Set as AbstractSet
from typing import Final, TypeVar

import msgspec
from msgspec import Raw, Struct

from gateway.errors import BadRequest

T = TypeVar("T", bound=Struct)

_keys = msgspec.json.Decoder(dict[str, Raw])
_message_keys = msgspec.json.Decoder(list[dict[str, Raw]])
_raw = msgspec.json.Decoder(Raw)
# How deep a body may be is measured with room around it: what is echoed and kept is written from deeper calls.
_ROOM: Final = 50
# No body with fewer brackets than this can be too deep; Python's own limit is 1000.
_BRACKETS_MIN: Final = 500
_MISSING: Final = "missing required field `"


def decode(
    decoder: msgspec.json.Decoder[T],
    body: bytes,
    struct: type[T],
    no_action: AbstractSet[str],
    message_fields: AbstractSet[str] | None = None,
) -> tuple[T, list[str]]:
    """The request, and the names of the fields that nobody knows: neither `struct` nor `no_action` has them.

    With `message_fields`, also those inside of `messages`. Raises `BadRequest`.
    """
    try:
        # msgspec skips over fields that the struct lacks without decoding them.
        body.decode("utf-8")
        request = decoder.decode(body)
        if body.count(b"{") + body.count(b"[") > _BRACKETS_MIN:
            _raw.decode(b"[" * _ROOM + body + b"]" * _ROOM)
        fields = _keys.decode(body)
        unknown = [key for key in fields if key not in struct.__struct_fields__ and key not in no_action]
        if message_fields is not None and "messages" in fields:
            seen = {key for message in _message_keys.decode(fields["messages"]) for key in message}
            unknown += [f"messages.{key}" for key in sorted(seen - message_fields)]
    except UnicodeDecodeError as error:
        raise BadRequest(f"The body is not valid UTF-8 (byte {error.start}).") from None
    except RecursionError:
        raise BadRequest("The body is nested too deeply.") from None
    except msgspec.ValidationError as error:
        raise _validation(str(error)) from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}." if body else "The request has no body.") from None
    return request, unknown


def _validation(text: str) -> BadRequest:
    """msgspec's sentence in OpenAI's words: which parameter, and what was expected of it."""
    what, _, path = text.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    if _MISSING in what:
        field = what.partition(_MISSING)[2].rstrip("`")
        param = f"{path}.{field}" if path else field
        return BadRequest(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    what = what.replace("`", "").replace("Expected", "expected").replace("Number", "number")
    if not path:
        return BadRequest(f"Invalid body: {what}.")
    return BadRequest(f"Invalid value for '{path}': {what}.", path, "invalid_value")

"""Request field `x_mlxd`, and the field of the answer with what it asks for. They are the same in each dialect."""

from collections.abc import Callable

from msgspec import UNSET, Struct, UnsetType

from gateway.control_types import RequestTiming
from gateway.request.record import RequestRecord


class ExtrasSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Additions to an answer that a request asks for; `timing` is the request's times and counts."""

    timing: bool = False


class AnswerExtras(Struct, frozen=True):
    timing: RequestTiming


Extras = AnswerExtras | UnsetType
# Function that returns the extras at the end of an answer, before its last event is encoded.
MakeExtras = Callable[[], Extras]


def no_extras() -> Extras:
    return UNSET


def extras_of(spec: ExtrasSpec | None, record: RequestRecord) -> MakeExtras:
    """Return the function that makes the extras of a request."""
    if spec is None or not spec.timing:
        return no_extras
    return lambda: AnswerExtras(record.timing())

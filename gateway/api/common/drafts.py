"""Work of a draft model, as a request may want it: the same two fields in each dialect."""

from typing import Annotated

from msgspec import Meta, Struct


class DraftSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """At most so many tokens of a draft at a time."""

    most: Annotated[int, Meta(ge=0, le=1024)]


# False for none; true, or nothing, as the model's settings say.
Speculate = bool | DraftSpec


class SparseSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The part of the prompt's tokens to keep."""

    keep: Annotated[float, Meta(gt=0, le=1)]


# True for the part that the model's settings name; false, or nothing, runs the whole prompt.
SparsePrefill = bool | SparseSpec


def sparse_keep(wish: SparsePrefill | None) -> float | None:
    """The part of the prompt to keep, 0 for as the model's settings say, None for all of it."""
    if isinstance(wish, SparseSpec):
        return wish.keep
    return 0.0 if wish else None


def most_drafted(wish: Speculate | None) -> int | None:
    """The most tokens of a draft, None for as the model's settings say."""
    if isinstance(wish, DraftSpec):
        return wish.most
    return 0 if wish is False else None

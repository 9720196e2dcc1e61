"""Drafts of next tokens, as a request may want them: the same field in each dialect."""

from typing import Annotated

from msgspec import Meta, Struct


class DraftSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """At most so many tokens of a draft at a time."""

    most: Annotated[int, Meta(ge=0, le=1024)]


# False for none; true, or nothing, as the model's settings say.
Speculate = bool | DraftSpec


def most_drafted(wish: Speculate | None) -> int | None:
    """The most tokens of a draft, None for as the model's settings say."""
    if isinstance(wish, DraftSpec):
        return wish.most
    return 0 if wish is False else None

"""Request fields `speculate` and `sparse_prefill`, which are the same in each dialect."""

from typing import Annotated

from msgspec import Meta, Struct


class DraftSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits the number of tokens in a draft."""

    most: Annotated[int, Meta(ge=0, le=1024)]


# False turns drafts off. True, or no value, uses the model's settings.
Speculate = bool | DraftSpec


class SparseSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The fraction of the prompt's tokens to keep."""

    keep: Annotated[float, Meta(gt=0, le=1)]


# True keeps the fraction of the prompt that the model's settings name. False, or no value, keeps the whole prompt.
SparsePrefill = bool | SparseSpec


def sparse_keep(spec: SparsePrefill | None) -> float | None:
    """Return the fraction of the prompt to keep. 0 stands for the fraction in the model's settings; None keeps the
    whole prompt.
    """
    if isinstance(spec, SparseSpec):
        return spec.keep
    return 0.0 if spec else None


def most_drafted(spec: Speculate | None) -> int | None:
    """Return the maximum number of tokens in a draft; None means the maximum in the model's settings."""
    if isinstance(spec, DraftSpec):
        return spec.most
    return 0 if spec is False else None

"""Limits of sparse prefill: the requests that may use it, for a model that supports it."""

from dataclasses import dataclass
from typing import Final

from protocol.failures import Code
from protocol.to_worker import Generate
from worker.errors import RequestInvalid
from worker.sparse.selected_tokens import count_kept

PARAM: Final = "sparse_prefill"


@dataclass(frozen=True, slots=True)
class SparseLimits:
    """Limits of one model. `keep` is the default share of a prompt that is kept, and 0 for a model without sparse
    prefill; prompts shorter than `least` tokens are processed in full.
    """

    keep: float = 0.0
    least: int = 0

    def keep_of(self, request: Generate, tokens: int, *, has_media: bool) -> float:
        """Return the share of a prompt of `tokens` tokens to keep; 0 means that the prompt is processed in full. Raises
        `RequestInvalid`.
        """
        wanted = request.sparse_keep
        if wanted is None:
            return 0.0
        if not self.keep:
            raise _refused("This model has no sparse prefill: its configuration names no 'sparse_prefill'.")
        if not 0 <= wanted <= 1:
            raise _refused(f"'{PARAM}' keeps a part of the prompt between 0 and 1, not {wanted}.")
        if request.prompt_logprobs is not None or (request.echo and request.top_logprobs is not None):
            raise _refused("A sparse prefill has no log-probabilities of the prompt.")
        if has_media:
            raise _refused("A sparse prefill takes text only, neither images, video nor audio.")
        return (wanted or self.keep) if tokens >= self.least else 0.0


NO_SPARSE: Final = SparseLimits()


def name_kept(tokens: int, keep: float) -> tuple[str, ...]:
    """Return the label that reports a prompt's sparse prefill to the client."""
    return (f"sparse-prefill-{count_kept(tokens, keep)}-of-{tokens}",) if keep else ()


def _refused(message: str) -> RequestInvalid:
    return RequestInvalid(Code.INVALID_REQUEST, message, param=PARAM)

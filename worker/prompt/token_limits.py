"""Limits of a request's texts, token ids and sampling parameters, by the model's context and vocabulary."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Final

from protocol.failures import Code
from protocol.to_worker import REPETITION_PENALTY_MAX, REPETITION_PENALTY_MIN, Generate, Sampling
from worker.errors import RequestInvalid
from worker.sampling.penalties import BadWords

# Maximum number of characters per token of the context; longer text hardly ever fits the context.
MAX_CHARS_PER_TOKEN: Final = 8
# Maximum length of a text whose tokens are counted, as a multiple of the text that fits the context.
MAX_COUNTED_CONTEXTS: Final = 4


def check_ids(ids: Collection[int], param: str, vocab_size: int) -> None:
    """Raise `RequestInvalid` if an id is outside of the vocabulary."""
    if not ids:
        return
    token = min(ids) if min(ids) < 0 else max(ids)
    if not 0 <= token < vocab_size:
        message = f"{param} names token id {token}, outside of the model's vocabulary of {vocab_size}"
        raise RequestInvalid(Code.INVALID_REQUEST, message, param=param)


def check_countable(text: str, param: str, max_context: int) -> None:
    """Raise `RequestInvalid` if a text is too long for its tokens to be counted."""
    most = MAX_COUNTED_CONTEXTS * MAX_CHARS_PER_TOKEN * max_context
    if len(text) > most:
        message = f"The text has {len(text)} characters; tokens are counted of at most {most} at once."
        raise RequestInvalid(Code.INVALID_REQUEST, message, param=param)


def generates_text() -> RequestInvalid:
    """Return the refusal of a prompt for a model that makes no text."""
    message = "This model generates text: it makes neither embeddings nor scores."
    return RequestInvalid(Code.UNSUPPORTED, message, param="model")


def empty_prompt() -> RequestInvalid:
    return RequestInvalid(Code.INVALID_REQUEST, "the prompt is empty", param="prompt")


def check_limits(
    sampling: Sampling, words: BadWords, eos_ids: Sequence[int], suppressed: Sequence[int], vocab_size: int
) -> None:
    """Check the limits on tokens. Raises `RequestInvalid` if every token could be forbidden at some position."""
    ends = (*eos_ids, *sampling.stop_ids) if sampling.min_tokens else ()
    lasts = {word[-1] for word in words.bad}
    if not sampling.allowed_ids and len({*suppressed, *ends, *lasts}) < vocab_size:
        return
    allowed = set(sampling.allowed_ids or range(vocab_size)).difference(suppressed)
    if not allowed:
        raise _refusal("allowed_token_ids names only tokens that this model never generates", "allowed_token_ids")
    allowed.difference_update(ends)
    if not allowed:
        raise _refusal("min_tokens forbids all tokens that may come: each of them ends the output", "min_tokens")
    if allowed <= lasts and _may_forbid(words.bad, allowed):
        raise _refusal("bad_words forbids all tokens that may come", "bad_words")


def _may_forbid(words: Sequence[Sequence[int]], allowed: Collection[int]) -> bool:
    """Return whether some text exists after which each of these tokens would complete a bad word."""
    behind: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
    for *begin, last in words:
        behind[tuple(begin)].add(last)
    for begin in list(behind):
        forbidden = [behind[end] for end in (begin[at:] for at in range(len(begin) + 1)) if end in behind]
        if sum(map(len, forbidden)) >= len(allowed) and not set(allowed).difference(*forbidden):
            return True
    return False


def _refusal(message: str, param: str) -> RequestInvalid:
    return RequestInvalid(Code.INVALID_REQUEST, message, param=param)


def check_sampling(request: Generate, vocab_size: int, *, is_restricted: bool) -> None:
    """Check the parameters of a request that has a grammar or tools that must be called if `is_restricted`. Raises
    `RequestInvalid`."""
    sampling = request.sampling
    check_ids(sampling.logit_bias, "logit_bias", vocab_size)
    check_ids(sampling.stop_ids, "stop_token_ids", vocab_size)
    check_ids(sampling.allowed_ids, "allowed_token_ids", vocab_size)
    limits = (("min_tokens", sampling.min_tokens), ("bad_words", sampling.bad_words))
    for param, value in (*limits, ("allowed_token_ids", sampling.allowed_ids)):
        if value and is_restricted:
            message = f"{param} cannot be combined with a format of the output or tools that must be called"
            raise RequestInvalid(Code.INVALID_REQUEST, message, param=param)
    if sampling.top_k < 0:  # more than the vocabulary is all of it, as in vLLM and transformers
        raise RequestInvalid(Code.INVALID_REQUEST, "top_k is negative", param="top_k")
    likeliest = (("top_logprobs", request.top_logprobs), ("prompt_logprobs", request.prompt_logprobs))
    for param, value in likeliest:
        if not 0 <= (value or 0) <= vocab_size:
            message = f"{param} is {value}, but the model's vocabulary has {vocab_size} tokens"
            raise RequestInvalid(Code.INVALID_REQUEST, message, param=param)
    if not REPETITION_PENALTY_MIN <= sampling.repetition_penalty <= REPETITION_PENALTY_MAX:
        message = f"repetition_penalty is not within {REPETITION_PENALTY_MIN:g} and {REPETITION_PENALTY_MAX:g}"
        raise RequestInvalid(Code.INVALID_REQUEST, message, param="repetition_penalty")
    if request.max_tokens is not None and request.max_tokens < 0:
        raise RequestInvalid(Code.INVALID_REQUEST, "max_tokens is negative", param="max_tokens")

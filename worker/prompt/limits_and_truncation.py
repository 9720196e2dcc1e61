"""Limits of a request, and truncation of prompts that do not fit.

Limits of a request's texts, token ids and sampling parameters, by the model's context and vocabulary.

Limits of sparse prefill: the requests that may use it, for a model that supports it.

Truncation of prompts that do not fit, if a request allows it: a chat loses its oldest turns, a text its first
tokens.

The truncated part grows in steps of a quarter of the context. A conversation that exceeds the context then keeps the
same beginning for many turns, so that the prefix cache can serve it.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, Final

from msgspec import structs

from protocol.failures import Code
from protocol.to_worker import (
    ChatPrompt,
    Generate,
    Prompt,
    Sampling,
    TextPrompt,
)
from worker.errors import RequestInvalid
from worker.prompt.encode import MAX_CHARS_PER_TOKEN
from worker.prompt.media_prompt import EncodedPrompt
from worker.sampling.penalties import BadWords
from worker.sparse_prefill import count_kept

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


def too_long(tokens: int, prompt: Prompt, context: int, hedge: str = "") -> RequestInvalid:
    return RequestInvalid(
        Code.CONTEXT_LENGTH_EXCEEDED,
        f"This model's maximum context length is {context} tokens. However, your request has "
        f"{hedge}{tokens} tokens of prompt. Please shorten it.",
        param=param_of(prompt),
        numbers=(tokens, context),
    )


def param_of(prompt: Prompt) -> str:
    """Return the client's name of a prompt, for error messages."""
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def room_of(request: Generate, prompt_tokens: int, context: int) -> int:
    """Return the maximum number of tokens to generate: the requested number, or the rest of the context. Raises
    `RequestInvalid`."""
    left = context - prompt_tokens
    # A prompt to which nothing is generated may take all of the context.
    if left < (request.max_tokens != 0 or bool(request.questions)):
        raise too_long(prompt_tokens, request.prompt, context)
    return left if request.max_tokens is None else min(left, request.max_tokens)


def is_restricted(request: Generate) -> bool:
    """Return whether a row of this request needs a rule before it may run."""
    chat = request.prompt if isinstance(request.prompt, ChatPrompt) else None
    return request.constraint is not None or (chat is not None and bool(chat.must_call or chat.strict_tools))


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
    """Check what depends on the vocabulary, and on whether the request has a grammar or tools that must be called
    (`is_restricted`). The decoder has checked the ranges. Raises `RequestInvalid`.
    """
    sampling = request.sampling
    check_ids(sampling.logit_bias, "logit_bias", vocab_size)
    check_ids(sampling.stop_ids, "stop_token_ids", vocab_size)
    check_ids(sampling.allowed_ids, "allowed_token_ids", vocab_size)
    limits = (("min_tokens", sampling.min_tokens), ("bad_words", sampling.bad_words))
    for param, value in (*limits, ("allowed_token_ids", sampling.allowed_ids)):
        if value and is_restricted:
            message = f"{param} cannot be combined with a format of the output or tools that must be called"
            raise RequestInvalid(Code.INVALID_REQUEST, message, param=param)
    likeliest = (("top_logprobs", request.top_logprobs), ("prompt_logprobs", request.prompt_logprobs))
    for param, value in likeliest:
        if (value or 0) > vocab_size:
            message = f"{param} is {value}, but the model's vocabulary has {vocab_size} tokens"
            raise RequestInvalid(Code.INVALID_REQUEST, message, param=param)


PARAM: Final = "sparse_prefill"


@dataclass(frozen=True, slots=True)
class SparseLimits:
    """Limits of one model. `keep` is the default share of a prompt that is kept, and 0 for a model without sparse
    prefill; prompts shorter than `least` tokens are processed in full if the request names no share.
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
            raise _refusal("This model has no sparse prefill: its configuration names no 'sparse_prefill'.", PARAM)
        if request.prompt_logprobs is not None or (request.echo and request.top_logprobs is not None):
            raise _refusal("A sparse prefill has no log-probabilities of the prompt.", PARAM)
        if has_media:
            raise _refusal("A sparse prefill takes text only, neither images, video nor audio.", PARAM)
        return wanted or (self.keep if tokens >= self.least else 0.0)


NO_SPARSE: Final = SparseLimits()


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Limits of one row. `keep` is the share of its prompt that a sparse prefill keeps, and `deviations` names the
    deviations from the request."""

    sampling: Sampling
    max_tokens: int
    keep: float
    deviations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of a loaded model. `suppressed` tokens are never generated, and `infill_ids` end a fill-in-the-middle
    answer."""

    vocab_size: int
    # Number of rows of the model's table of tokens, which may be larger than the vocabulary.
    table_rows: int
    eos_ids: tuple[int, ...]
    suppressed: tuple[int, ...]
    infill_ids: tuple[int, ...]
    deviations: tuple[str, ...]
    sparse: SparseLimits

    def of(self, request: Generate, prompt: EncodedPrompt, words: BadWords, context: int) -> RowLimits:
        """Return the limits of a request's row. Raises `RequestInvalid`."""
        tokens, sampling = len(prompt.ids), request.sampling
        # The model itself sampled these ids.
        check_ids(request.resume, "resume", self.table_rows)
        keep = self.sparse.keep_of(request, tokens, has_media=bool(prompt.spans))
        if is_infill(request) and not sampling.ignore_eos:
            sampling = structs.replace(sampling, stop_ids=(*sampling.stop_ids, *self.infill_ids))
        room = 1 if request.questions else room_of(request, tokens, context)
        check_limits(sampling, words, self.eos_ids, self.suppressed, self.vocab_size)
        kept = (f"sparse-prefill-{count_kept(tokens, keep)}-of-{tokens}",) if keep else ()
        return RowLimits(sampling, room, keep, (*self.deviations, *prompt.deviations, *kept))


# Maximum length of a prompt that may be truncated, as a multiple of the context.
CONTEXTS: Final = 4
_STEPS: Final = 4
_OPENING: Final = ("system", "developer")


def is_cut(request: Generate) -> bool:
    """Return whether the prompt may be truncated. A resumed sequence keeps the prompt that it began with.

    A fill-in-the-middle prompt is never truncated, because it would lose the tokens that mark its parts.
    """
    return request.truncate != 0 and request.truncated != (0, 0) and not is_infill(request)


def is_infill(request: Generate) -> bool:
    return isinstance(request.prompt, TextPrompt) and request.prompt.infill is not None


def fit_turns(
    request: Generate, prompt: ChatPrompt, context: int, encode: Callable[[ChatPrompt], EncodedPrompt]
) -> EncodedPrompt:
    """Encode the prompt with as few of its oldest turns removed as necessary. If it never fits, encode it in full, to
    be refused.

    The leading instructions and the newest turn always stay.
    """
    most = len(turn_starts(prompt.messages)) - 1
    whole = encode(prompt)
    tokens = len(whole.ids)
    if most < 1 or (request.truncated is None and tokens < context):
        return whole

    @cache
    def part(count: int) -> EncodedPrompt:
        return encode(without_turns(prompt, count))

    if request.truncated is not None:
        turns = min(request.truncated[0], most)
    else:
        less = excess(tokens, context, request.max_tokens)
        guess = _turns_of(prompt.messages, less / tokens)
        turns = _least(lambda count: tokens - len(part(count).ids) >= less, min(guess, most), most)
    kept = len(part(turns).ids)
    return replace(part(turns), truncated=(turns, tokens - kept)) if kept < context else whole


def fit_tokens(request: Generate, whole: EncodedPrompt, opening: int, context: int) -> EncodedPrompt:
    """Return the prompt's last tokens, as many as requested or as fit, after the `opening` special tokens of a text."""
    tokens = len(whole.ids)
    if request.truncated is not None:
        less = request.truncated[1]
    elif request.truncate > 0:
        less = tokens - request.truncate
    else:
        less = excess(tokens, context, request.max_tokens) if tokens >= context else 0
    less = min(less, tokens - opening - 1)
    if less <= 0:
        return whole
    if whole.spans:
        message = "The prompt is longer than 'truncate_prompt_tokens' allows, and one with media cannot be cut."
        raise RequestInvalid(Code.UNSUPPORTED, message, param="truncate_prompt_tokens")
    # A chat keeps its text, whose end shows whether the answer begins inside reasoning.
    text = whole.text if isinstance(request.prompt, ChatPrompt) else None
    return replace(whole, ids=[*whole.ids[:opening], *whole.ids[opening + less :]], text=text, truncated=(0, less))


def excess(tokens: int, context: int, max_tokens: int | None) -> int:
    """Return the number of tokens to remove, in whole steps. Room for the answer remains: `max_tokens`, but at most one
    step.
    """
    step = max(1, context // _STEPS)
    room = step if max_tokens is None else max(1, min(max_tokens, step))
    return -(-(tokens + room - context) // step) * step


def turn_starts(messages: Sequence[dict[str, Any]]) -> list[int]:
    """Return the indices of the messages that begin turns, after the leading instructions.

    A turn is a user's message with everything after it, so that tool results stay with their calls.
    """
    first = next((at for at, message in enumerate(messages) if message["role"] not in _OPENING), len(messages))
    starts = [at for at in range(first, len(messages)) if messages[at]["role"] == "user"]
    return starts if starts[:1] == [first] or first == len(messages) else [first, *starts]


def _turns_of(messages: Sequence[dict[str, Any]], share: float) -> int:
    """Return the number of oldest turns whose characters are about this share of the conversation's."""
    sizes = [len(str(message)) for message in messages]
    wanted, so_far, starts = share * sum(sizes), 0, turn_starts(messages)
    for count, (begin, end) in enumerate(pairwise(starts), 1):
        so_far += sum(sizes[begin:end])
        if so_far >= wanted:
            return count
    return max(1, len(starts) - 1)


def _least(is_enough: Callable[[int], bool], guess: int, most: int) -> int:
    """Return the smallest count up to `most` that is enough, or `most`. Checks are slow, so `guess` is tried first."""
    low, high, at, stride = 1, most, guess, 1
    is_below = is_above = False
    while low < high:
        at = (low + high) // 2 if is_below and is_above else min(max(at, low), high - 1)
        if is_enough(at):
            high, is_above, at = at, True, at - stride
        else:
            low, is_below, at = at + 1, True, at + stride
        stride *= 2
    return low


def without_turns(prompt: ChatPrompt, count: int) -> ChatPrompt:
    """Return the prompt without its `count` oldest turns."""
    starts = turn_starts(prompt.messages)
    messages = [*prompt.messages[: starts[0]], *prompt.messages[starts[count] :]]
    return structs.replace(prompt, messages=messages)

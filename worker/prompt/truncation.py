"""Truncation of prompts that do not fit, if a request allows it: a chat loses its oldest turns, a text its first
tokens.

The truncated part grows in steps of a quarter of the context. A conversation that exceeds the context then keeps the
same beginning for many turns, so that the prefix cache can serve it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, Final

from msgspec import structs

from protocol.failures import Code
from protocol.prompts import ChatPrompt, TextPrompt
from protocol.to_worker import Generate
from worker.errors import RequestInvalid
from worker.prompt.media_prompt import EncodedPrompt

# Maximum length of a prompt that may be truncated, as a multiple of the context.
CONTEXTS: Final = 4
_STEPS: Final = 4
_OPENING: Final = ("system", "developer")


def is_cut(request: Generate) -> bool:
    """Return whether the prompt may be truncated. A resumed sequence keeps the prompt that it began with.

    A fill-in-the-middle prompt is never truncated, because it would lose the tokens that mark its parts.
    """
    is_infill = isinstance(request.prompt, TextPrompt) and request.prompt.infill is not None
    return request.truncate != 0 and request.left_out != (0, 0) and not is_infill


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
    if most < 1 or (request.left_out is None and tokens < context):
        return whole

    @cache
    def part(count: int) -> EncodedPrompt:
        return encode(without_turns(prompt, count))

    if request.left_out is not None:
        turns = min(request.left_out[0], most)
    else:
        less = excess(tokens, context, request.max_tokens)
        guess = _turns_of(prompt.messages, less / tokens)
        turns = _least(lambda count: tokens - len(part(count).ids) >= less, min(guess, most), most)
    kept = len(part(turns).ids)
    return replace(part(turns), left_out=(turns, tokens - kept)) if kept < context else whole


def fit_tokens(request: Generate, whole: EncodedPrompt, opening: int, context: int) -> EncodedPrompt:
    """Return the prompt's last tokens, as many as requested or as fit, after the `opening` special tokens of a text."""
    tokens = len(whole.ids)
    if request.left_out is not None:
        less = request.left_out[1]
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
    return replace(whole, ids=[*whole.ids[:opening], *whole.ids[opening + less :]], text=text, left_out=(0, less))


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

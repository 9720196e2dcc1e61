"""Limits of the texts and token ids in a request, by the model's context and vocabulary."""

from collections.abc import Collection
from typing import Final

from protocol.failures import Code
from worker.errors import RequestInvalid

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

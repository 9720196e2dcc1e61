"""Control tokens of chats: those that begin messages, and the one with which a chat template ends an answer."""

import logging
from collections.abc import Collection, Container, Sequence
from typing import Any, Final

from protocol.prompts import ChatPrompt
from worker.errors import RequestInvalid
from worker.output.parsers.channels import Channels
from worker.output.parsers.families import FAMILIES
from worker.prompt.encode import PromptEncoder
from worker.prompt.templates import Renderer

log = logging.getLogger("mlxd.worker")

_WORD: Final = "word1"
_CHAT: Final[list[dict[str, Any]]] = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": _WORD},
    {"role": "user", "content": "y"},
]


class TurnStarts:
    """Finder of the control tokens that begin messages."""

    def __init__(
        self, encoder: PromptEncoder, generation_prompt: str, hidden: frozenset[int], suppressed: Collection[int]
    ) -> None:
        """`generation_prompt` is the text that a template adds before an answer. Its first control token begins each
        message; if it has none, all `hidden` tokens do. Tokens in `suppressed` stand for media."""
        first = encoder.encode(generation_prompt, add_special_tokens=False)[:1]
        self._tokens = (frozenset(first) & hidden or hidden) - set(suppressed)

    def positions(self, ids: Sequence[int]) -> list[int]:
        """Return the positions of messages after the first token."""
        return [at for at, token in enumerate(ids) if token in self._tokens and at > 0]


def warn_of_open_end(renderer: Renderer, family: str, tokenizer: Any, eos_ids: Container[int]) -> None:
    """Log the control token that ends answers in the template and is no end-of-sequence token, if there is one.

    It does not become one, because only the model's makers know whether it ends an answer or a part of it.
    """
    # Answers of these families have several messages, which end with another token than the answer.
    if isinstance(FAMILIES[family].grammar, Channels):
        return
    if token := _open_end(renderer, tokenizer, eos_ids):
        log.warning(
            "the chat template ends answers with %s, which is not an end-of-sequence token: answers may go on to "
            "their limit; add its id to eos_token_id in generation_config.json",
            token,
        )


def _open_end(renderer: Renderer, tokenizer: Any, eos_ids: Container[int]) -> str:
    if not renderer.has_template:
        return ""
    try:
        _, has_answer, after = renderer.render(ChatPrompt(_CHAT)).rpartition(_WORD)
    except RequestInvalid:
        return ""
    first = tokenizer.encode(after.lstrip(), add_special_tokens=False)[:1] if has_answer else []
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return next((added[token].content for token in first if token in added and token not in eos_ids), "")

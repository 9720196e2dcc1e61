"""Positions at which the messages of an encoded chat begin."""

from collections.abc import Collection, Sequence

from worker.prompt.encode import PromptEncoder


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

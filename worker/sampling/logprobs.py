"""Log-probabilities of sampled and most likely tokens, read without waiting for the next step."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from protocol.from_worker import PromptLogprob, TokenLogprob
from worker.sampling.prompt_scores import PromptScore


class LogprobReader:
    """Reader with its own CPU stream: on the generation stream, its work would queue behind the running step."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._stream = mx.new_stream(mx.cpu)
        self._token_bytes = token_bytes

    def read(self, rows: Sequence[tuple[int, mx.array, int]]) -> list[TokenLogprob]:
        """Return the entry of each (sampled token, log-probabilities `[vocab]`, number of top tokens); top tokens are
        sorted, best first.
        """
        pending: list[tuple[mx.array, mx.array, mx.array]] = []
        with mx.stream(self._stream):
            for token, logprobs, top in rows:
                values = logprobs.astype(mx.float32)
                likeliest = mx.argpartition(-values, kth=top - 1)[:top] if top else mx.array([], dtype=mx.uint32)
                pending.append((values[token], likeliest, values[likeliest]))
            mx.eval(pending)
        return [self._entry(token, *read) for (token, _, _), read in zip(rows, pending, strict=True)]

    def echo(self, ids: Sequence[int], scores: Sequence[PromptScore], top: int) -> list[TokenLogprob]:
        """Return entries of these prompt tokens in the format of sampled tokens."""
        return [
            TokenLogprob(self._token_bytes(token), score.logprob, self._named(score.likeliest[:top]))
            for token, score in zip(ids, scores, strict=True)
        ]

    def prompt(self, ids: Sequence[int], scores: Sequence[PromptScore], top: int) -> tuple[PromptLogprob, ...]:
        """Return entries of these prompt tokens."""
        return tuple(
            PromptLogprob(
                token,
                self._token_bytes(token),
                score.logprob,
                score.rank,
                tuple((each, self._token_bytes(each), value) for each, value in score.likeliest[:top]),
            )
            for token, score in zip(ids, scores, strict=True)
        )

    def _named(self, top: Sequence[tuple[int, float]]) -> tuple[tuple[bytes, float], ...]:
        return tuple((self._token_bytes(token), value) for token, value in top)

    def _entry(self, token: int, own: mx.array, ids: mx.array, values: mx.array) -> TokenLogprob:
        logprob: Any = own.item()
        pairs: Any = zip(ids.tolist(), values.tolist(), strict=True)  # type: ignore[arg-type]
        # Tokens that a grammar forbids are omitted, even if fewer are left than requested.
        top = sorted((pair for pair in pairs if pair[1] > -math.inf), key=lambda pair: (-pair[1], pair[0]))
        return TokenLogprob(self._token_bytes(token), logprob, self._named(top))

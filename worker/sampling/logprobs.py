"""Log-probabilities of sampled and most likely tokens, read without waiting for the next step.

Log-probabilities of a prompt's own tokens, as they become known.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import mlx.core as mx

from protocol.from_worker import PromptLogprob, TokenLogprob
from protocol.to_worker import Generate


class PromptScore(NamedTuple):
    """Score of one token: its log-probability, its rank counted from 1, and the most likely tokens, best first."""

    logprob: float
    rank: int
    likeliest: list[tuple[int, float]]


# Score of the first token, which has no context and therefore no log-probability.
FIRST: Final = PromptScore(math.nan, 0, [])


@dataclass(slots=True)
class Scores:
    """Scores of each token of a prompt. `ids` is the whole prompt; `top` is the number of most likely tokens per
    position.

    Scores are taken as they become known, because converting the scores of a long prompt to entries takes seconds.
    """

    ids: Sequence[int]
    top: int
    count: int = 1
    _fresh: list[PromptScore] = field(default_factory=lambda: [FIRST])

    def take(self) -> tuple[int, list[PromptScore]]:
        """Return the scores since the last call, and the position of the first of them."""
        fresh, self._fresh = self._fresh, []
        return self.count - len(fresh), fresh

    def add(self, logits: mx.array) -> None:
        """Add the logits `[positions, vocab]` of the next positions."""
        values = logits.astype(mx.float32)
        values = values - mx.logsumexp(values, axis=-1, keepdims=True)
        targets = mx.array(list(self.ids[self.count : self.count + logits.shape[0]]))
        own = mx.take_along_axis(values, targets[:, None], axis=-1)
        ranks = 1 + mx.sum(values > own, axis=-1)
        self.count += logits.shape[0]
        arrays = [own[:, 0], ranks]
        if self.top:
            ids = mx.argpartition(-values, kth=self.top - 1, axis=-1)[:, : self.top]
            arrays += [ids, mx.take_along_axis(values, ids, axis=-1)]
        mx.eval(arrays)
        columns: list[Any] = [array.tolist() for array in arrays]
        for logprob, rank, *likeliest in zip(*columns, strict=True):
            pairs = zip(*likeliest, strict=True)
            self._fresh.append(PromptScore(logprob, rank, sorted(pairs, key=lambda pair: (-pair[1], pair[0]))))


def scored_top(request: Generate, tokens: int) -> int | None:
    """Return the number of top tokens to score at each position of a prompt; None if no scores are needed.

    A resumed sequence with output needs none, because its prompt was scored before the output began.
    """
    echoed = request.top_logprobs if request.echo and request.echo_scored < tokens else None
    reported = request.prompt_logprobs if request.prompt_scored < tokens else None
    wanted = [top for top in (echoed, reported) if top is not None]
    return max(wanted) if wanted and not request.resume else None


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

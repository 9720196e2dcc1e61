"""Log-probabilities of a prompt's own tokens, as they become known."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import mlx.core as mx

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

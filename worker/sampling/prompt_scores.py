"""Log-probabilities of a prompt's own tokens, as they become known."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from protocol.messages import TokenLogprob


@dataclass(slots=True)
class Scores:
    """Of each token of a prompt but the first: its log-probability, and the likeliest tokens, best first.

    `ids` is the whole prompt; `top` says how many likeliest tokens are wanted.
    """

    ids: Sequence[int]
    top: int
    own: list[float] = field(default_factory=list[float])
    likeliest: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])
    # As they are sent; made as the scores become known, because those of a long prompt take seconds.
    entries: list[TokenLogprob] = field(default_factory=list[TokenLogprob])

    def add(self, logits: mx.array) -> None:
        """Take the logits `[positions, vocab]` of the next positions."""
        values = logits.astype(mx.float32)
        values = values - mx.logsumexp(values, axis=-1, keepdims=True)
        begin = len(self.own) + 1
        targets = mx.array(list(self.ids[begin : begin + logits.shape[0]]))
        own: Any = mx.take_along_axis(values, targets[:, None], axis=-1)[:, 0]
        if not self.top:
            self.own += own.tolist()
            self.likeliest += [[] for _ in range(logits.shape[0])]
            return
        ids = mx.argpartition(-values, kth=self.top - 1, axis=-1)[:, : self.top]
        best = mx.take_along_axis(values, ids, axis=-1)
        mx.eval(own, ids, best)
        self.own += own.tolist()
        pairs: Any = zip(ids.tolist(), best.tolist(), strict=True)  # type: ignore[arg-type]
        for tokens, chances in pairs:
            ordered = sorted(zip(tokens, chances, strict=True), key=lambda pair: (-pair[1], pair[0]))
            self.likeliest.append(ordered)

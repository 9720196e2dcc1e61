"""Questions of a row: each is asked alone behind the row's prompt, and answered by the log-probabilities of its labels.

An answer must not depend on the other questions or on other rows. So a row with questions is computed alone, in forward
passes whose lengths depend on its own tokens only: the prompt in slices that end at fixed positions, then the tokens of
one question after another, each on the prompt's KV alone.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from protocol.group import RowQuestion
from worker.vision.media import Span

SLICE_TOKENS: Final = 128

Path = tuple[int, ...]
"""Tokens that several labels of a question begin with."""


@dataclass(slots=True, eq=False)
class RowQuestions:
    """Questions of a row that are not answered yet, and the answers so far: the log-probability of each label.

    `slices` are the ends of the slices of the prompt. The prompt's last token is in none of them, because it runs with
    each question. `layout` is a digest of the places of the prompt's media, on which the slices depend.
    """

    left: list[RowQuestion]
    slices: Sequence[int]
    layout: str = ""
    answers: list[list[float]] = field(default_factory=list[list[float]])
    tokens: int = field(init=False)
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        lengths = [len(question.tokens) for question in self.left]
        deepest = [max(map(len, question.labels)) for question in self.left if question.tokens]
        self.tokens = sum(lengths)
        self.longest = max(lengths, default=0) + max(deepest, default=0)

    def skip_unasked(self) -> None:
        """Answer the next questions that have no tokens, because they do not fit the context, with NaN."""
        while self.left and not self.left[0].tokens:
            self.answer([math.nan] * len(self.left[0].labels))

    def answer(self, logprobs: list[float]) -> None:
        """Answer the next question."""
        del self.left[0]
        self.answers.append(logprobs)

    def whole(self, at: int) -> int:
        """Return the last position up to `at` where a slice ends."""
        ended = bisect_right(self.slices, at)
        return self.slices[ended - 1] if ended else 0

    def segments(self, tokens: Sequence[int], reused: int) -> tuple[list[list[int]], frozenset[int]]:
        """Return the prompt's tokens after the first `reused` in slices, and the position of the checkpoint: the end of
        the last slice that a longer prompt has too."""
        last = len(tokens) - 1
        cuts = [reused, *(end for end in self.slices if end > reused), last, len(tokens)]
        return [list(tokens[at:end]) for at, end in pairwise(cuts) if at < end], frozenset(self.slices[-1:])


def slice_ends(tokens: int, media: Sequence[Span]) -> list[int]:
    """Return the ends of the slices of a prompt of this many tokens that a longer prompt has too. A slice has
    `SLICE_TOKENS` tokens of text, or one span of media, or it ends where the next span begins."""
    spans = {span.begin: span.end for span in media}
    begins = sorted(spans)
    ends: list[int] = []
    at = 0
    while True:
        following = begins[bisect_right(begins, at) :][:1]
        at = spans.get(at) or min(at + SLICE_TOKENS, *following, at + SLICE_TOKENS)
        if at >= tokens:
            return ends
        ends.append(at)


def inner_paths(labels: Sequence[Sequence[int]]) -> list[Path]:
    """Return the beginnings of labels that have more tokens, in a fixed order."""
    return sorted({tuple(label[:at]) for label in labels for at in range(1, len(label))})


def next_tokens(labels: Sequence[Sequence[int]], path: Path) -> list[int]:
    """Return the tokens that follow `path` in some label, in a fixed order."""
    depth = len(path)
    return sorted({label[depth] for label in labels if len(label) > depth and tuple(label[:depth]) == path})

"""Masks of rows whose answer must match a grammar, computed without delaying the other rows.

mlx-lm launches a forward pass before its input tokens have reached the host. A mask needs those tokens, so a step
with constrained rows is launched in two parts: first the forward pass; while it runs, the tokens before it arrive, and
each row's grammar takes its token and computes its mask on a thread of its own; then mask and sampling. The device
never idles as long as a mask is quicker than a forward pass. A row whose mask is late does not delay the others: the
step continues without it, and the batch parks the row until its mask is ready.

A step that verifies drafts needs a mask for each of their tokens: the grammar follows a draft on copies of itself, and
continues from the copy after the last accepted token.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final, Protocol

import mlx.core as mx
import numpy as np

from worker.structured.grammar_compiler import Allowed, GrammarFailed
from worker.structured.row_constraint import Guide, Rule

# Minimum time that other rows wait for a late mask; otherwise they wait about as long as a step takes.
MIN_PATIENCE_S: Final = 0.01
MAX_PATIENCE_S: Final = 0.25
# A mask that takes longer than this fails its row.
MAX_MASK_S: Final = 20.0
_THREADS: Final = 4
# The masks of a draft may take this fraction of the time that rows wait for a late mask.
_DRAFT_PATIENCE_FRACTION: Final = 0.5
_LEAST_MASK_S: Final = 1e-5
_SMOOTHING: Final = 0.2


class MaskedRow(Protocol):
    """Sequence with the work on its masks; `mask` is None for a sequence without a grammar."""

    @property
    def mask(self) -> "MaskWork | None": ...


class Masks:
    """Threads that compute the masks of one batch. Owned by the engine thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="mask")
        self._late: list[MaskWork] = []
        self._step_s = 0.0
        self._stepped = 0.0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def follow(self, rule: Rule, output: Sequence[int]) -> "MaskWork":
        """Return the mask work of a row that has generated `output` so far."""
        tokens = tuple(output)
        return MaskWork(self._threads.submit(lambda: _follow(Guide(rule), tokens)), time.monotonic())

    def most_drafted(self, work: "MaskWork") -> int:
        """Return the length of the longest draft whose masks will probably be ready in time."""
        if not work.is_ready:
            return 0
        return max(0, int(_DRAFT_PATIENCE_FRACTION * self._patience / max(work.mask_s, _LEAST_MASK_S)) - 1)

    def take(
        self, rows: Sequence[MaskedRow], tokens: Sequence[int], drafts: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Start the masks after `tokens`, which the running forward pass processes, and after each token of a draft."""
        now = time.monotonic()
        elapsed = now - self._stepped
        self._stepped = now
        if elapsed < MAX_PATIENCE_S:
            self._step_s += _SMOOTHING * (elapsed - self._step_s)
        for row, token, draft in zip(rows, tokens, drafts or [()] * len(rows), strict=True):
            work = row.mask
            if work is not None and work.is_ready:
                guide = work.state.guide
                work.future, work.since = self._threads.submit(_follow, guide, (token,), draft), now
                work.accepted = 0

    def accept(self, work: "MaskWork", agreed: int) -> int:
        """Continue after `agreed` tokens of a row's draft, or after as many of them as have masks. Return the number of
        accepted tokens."""
        # Tokens that were sampled without a mask do not count.
        work.accepted = min(agreed, len(work.states) - 1) if work not in self._late and work.is_ready else 0
        return work.accepted

    def apply(self, rows: Sequence[MaskedRow], logits: mx.array) -> mx.array:
        """Return logits `[rows, vocab]`, or `[rows, steps, vocab]` for drafts, with forbidden tokens at -inf.

        Rows whose mask is late or failed are unchanged.
        """
        steps = logits.shape[1] if logits.ndim == 3 else 1
        ours = [(at, row.mask) for at, row in enumerate(rows) if row.mask is not None]
        wait([work.future for _, work in ours], timeout=self._patience)
        masks: dict[int, Allowed] = {}
        for at, work in ours:
            if not work.future.done():
                self._late.append(work)
            elif work.is_ready:
                for step, state in enumerate(work.states[:steps]):
                    if state.allowed is not None:
                        masks[at * steps + step] = state.allowed
        return _mask(logits.reshape(-1, logits.shape[-1]), masks).reshape(logits.shape) if masks else logits

    @property
    def _patience(self) -> float:
        return min(MAX_PATIENCE_S, max(MIN_PATIENCE_S, self._step_s))

    def late(self) -> "list[MaskWork]":
        """Return the late masks since the last call, which steps did not wait for. Tokens sampled for their rows in
        those steps are invalid.
        """
        late, self._late = self._late, []
        return late


def constrains(rows: Sequence[MaskedRow]) -> bool:
    """Return whether a step of these rows needs masks."""
    return any(row.mask is not None for row in rows)


def wait_for_one(rows: Sequence[MaskedRow], timeout_s: float) -> None:
    """Wait until one of these rows has its mask."""
    wait([row.mask.future for row in rows if row.mask is not None], timeout=timeout_s, return_when="FIRST_COMPLETED")


@dataclass(slots=True, frozen=True)
class _GuideState:
    """Guide, the tokens that it allows next, and the tokens that it forces next."""

    guide: Guide
    allowed: Allowed | None
    forced: Sequence[int]


@dataclass(slots=True, frozen=True)
class _DraftStates:
    """States after a row's newest token and after each token of its draft; `seconds` is the mean time of a mask."""

    states: list[_GuideState]
    seconds: float


@dataclass(slots=True, eq=False)
class MaskWork:
    """Newest masks of one row, ready or not: after its newest token, and after each token of its draft."""

    future: "Future[_DraftStates]"
    since: float
    # Number of the draft's tokens that were accepted.
    accepted: int = 0

    @property
    def states(self) -> list[_GuideState]:
        return self.future.result().states

    @property
    def state(self) -> _GuideState:
        return self.states[self.accepted]

    @property
    def mask_s(self) -> float:
        """Mean time of the newest masks, in seconds."""
        return self.future.result().seconds

    @property
    def forced(self) -> Sequence[int]:
        """Return the row's probable next tokens; the first was sampled already, but has not reached the host."""
        return self.state.forced if self.is_ready else ()

    @property
    def is_done(self) -> bool:
        """Whether the masks are ready, or have failed."""
        return self.future.done()

    @property
    def is_ready(self) -> bool:
        return self.future.done() and self.future.exception() is None

    def error(self, now: float) -> Exception | None:
        """Return the reason why there will be no masks, if any."""
        if not self.future.done():
            return GrammarFailed("its mask takes too long") if now - self.since > MAX_MASK_S else None
        error = self.future.exception()
        return error if error is None or isinstance(error, Exception) else GrammarFailed(repr(error))


def _follow(guide: Guide, tokens: Sequence[int], draft: Sequence[int] = ()) -> _DraftStates:
    begun = time.monotonic()
    for token in tokens:
        guide.take(token)
    states = [_GuideState(guide, guide.allowed(), guide.forced())]
    for token in draft:
        guide = guide.fork()
        try:
            guide.take(token)
            states.append(_GuideState(guide, guide.allowed(), guide.forced()))
        except GrammarFailed:
            break  # the grammar forbids the next token of the draft, or the row may not continue in this step
    return _DraftStates(states, (time.monotonic() - begun) / len(states))


def _mask(logits: mx.array, masks: dict[int, Allowed]) -> mx.array:
    """Set the logits of the rows in `masks` to -inf where a token is not allowed.

    A model's vocabulary may be padded beyond the tokenizer's.
    """
    rows, vocab = logits.shape
    # The type stub of mx.array does not accept NumPy arrays.
    keep: Any = np.zeros((len(masks), vocab), dtype=np.bool_)
    for to, allowed in enumerate(masks.values()):
        width = min(vocab, len(allowed))
        keep[to, :width] = allowed[:width]
    never = mx.array(-float("inf"), dtype=logits.dtype)
    if len(masks) == rows:
        return mx.where(mx.array(keep), logits, never)
    at = mx.array(list(masks))
    logits[at] = mx.where(mx.array(keep), logits[at], never)
    return logits

"""Rows whose answer must match a grammar, without making the other rows wait.

mlx-lm launches a forward pass before the tokens that it runs on have reached the host. A mask needs them, so a step
with constrained rows is launched in two parts: first the forward pass; while it runs, the tokens before it arrive, and
each row's grammar takes its token and computes its mask on a thread of its own; then mask and sampling. The device
never idles as long as a mask is quicker than a forward pass. A row whose mask is late does not hold the others up: the
step goes on without it, and the batch takes the row out until its mask is there.

A step that verifies drafts needs a mask for each of their tokens: a grammar follows a draft on copies of itself, and
goes on from the copy behind the last token that was accepted.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np

from worker.structured.compiler import Allowed, GrammarFailed
from worker.structured.guides import Guide, Rule

# Other rows wait for a late mask about as long as a step takes, and at least this long.
MIN_PATIENCE_S: Final = 0.01
MAX_PATIENCE_S: Final = 0.25
# A mask that takes longer ends its row.
MAX_MASK_S: Final = 20.0
_THREADS: Final = 4
# Masks of a draft may take so much of that time.
_DRAFT_PART: Final = 0.5
_LEAST_MASK_S: Final = 1e-5
_SMOOTHING: Final = 0.2


class Masks:
    """The guides of one batch and the threads that they work on. Owned by the engine thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="mask")
        self._work: dict[int, _Work] = {}
        self._late: list[int] = []
        self._step_s = 0.0
        self._stepped = 0.0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def add(self, uid: int, rule: Rule, output: Sequence[int]) -> None:
        """Follow `uid`, which has said `output` so far."""
        tokens = tuple(output)
        self._work[uid] = _Work(self._threads.submit(lambda: _follow(Guide(rule), tokens)), time.monotonic())

    def move(self, old: int, new: int) -> None:
        """The row has come back under another uid."""
        self._work[new] = self._work.pop(old)

    def discard(self, uid: int) -> None:
        self._work.pop(uid, None)

    def constrains(self, uids: Sequence[int]) -> bool:
        """Whether a step of these rows needs masks."""
        return bool(self._work) and any(uid in self._work for uid in uids)

    def forced(self, uid: int) -> Sequence[int]:
        """Tokens that a row will probably have next, the one that was sampled and not read yet first."""
        work = self._work.get(uid)
        return work.state.forced if work is not None and work.is_ready else ()

    def most_drafted(self, uid: int) -> int | None:
        """The longest draft whose masks will probably be there in time; None for a row without a grammar."""
        work = self._work.get(uid)
        if work is None:
            return None
        if not work.is_ready:
            return 0
        return max(0, int(_DRAFT_PART * self._patience / max(work.mask_s, _LEAST_MASK_S)) - 1)

    def take(self, uids: Sequence[int], tokens: Sequence[int], drafts: Sequence[Sequence[int]] | None = None) -> None:
        """The tokens that the running forward pass is for: start on the masks of what it will give, also behind each
        token of a draft."""
        now = time.monotonic()
        elapsed = now - self._stepped
        self._stepped = now
        if elapsed < MAX_PATIENCE_S:
            self._step_s += _SMOOTHING * (elapsed - self._step_s)
        for uid, token, draft in zip(uids, tokens, drafts or [()] * len(uids), strict=True):
            work = self._work.get(uid)
            if work is not None and work.is_ready:
                guide = work.state.guide
                work.future, work.since = self._threads.submit(_follow, guide, (token,), draft), now
                work.accepted = 0

    def accept(self, uid: int, agreed: int) -> int:
        """Go on behind so many tokens of the draft of a row, or fewer: as many as there are masks for."""
        work = self._work.get(uid)
        if work is None:
            return agreed
        # What a row without a mask was given means nothing.
        work.accepted = min(agreed, len(work.states) - 1) if uid not in self._late and work.is_ready else 0
        return work.accepted

    def apply(self, uids: Sequence[int], logits: mx.array) -> mx.array:
        """Logits `[rows, vocab]`, or `[rows, steps, vocab]` for drafts, with what grammars forbid at -inf.

        Rows that are late or broken are left alone.
        """
        steps = logits.shape[1] if logits.ndim == 3 else 1
        ours = {at: self._work[uid] for at, uid in enumerate(uids) if uid in self._work}
        wait([work.future for work in ours.values()], timeout=self._patience)
        masks: dict[int, Allowed] = {}
        for at, work in ours.items():
            if not work.future.done():
                self._late.append(uids[at])
            elif work.is_ready:
                for step, state in enumerate(work.states[:steps]):
                    if state.allowed is not None:
                        masks[at * steps + step] = state.allowed
        return _mask(logits.reshape(-1, logits.shape[-1]), masks).reshape(logits.shape) if masks else logits

    @property
    def _patience(self) -> float:
        return min(MAX_PATIENCE_S, max(MIN_PATIENCE_S, self._step_s))

    def late(self) -> list[int]:
        """The rows that the last steps went on without; what was sampled for them means nothing."""
        late, self._late = self._late, []
        return late

    def is_done(self, uid: int) -> bool:
        """Whether the row's mask is there, or never will be."""
        return self._work[uid].future.done()

    def wait(self, uids: Sequence[int], timeout_s: float) -> None:
        """Until one of these rows has its mask."""
        wait([self._work[uid].future for uid in uids], timeout=timeout_s, return_when="FIRST_COMPLETED")

    def errors(self) -> list[tuple[int, Exception]]:
        """The rows whose grammar failed, and why."""
        now = time.monotonic()
        return [(uid, error) for uid, work in self._work.items() if (error := work.error(now)) is not None]


@dataclass(slots=True, frozen=True)
class _State:
    """A guide, what it allows next, and what it forces."""

    guide: Guide
    allowed: Allowed | None
    forced: Sequence[int]


@dataclass(slots=True, frozen=True)
class _Followed:
    """States behind a row's newest token and behind each token of its draft, and the seconds that one took."""

    states: list[_State]
    seconds: float


@dataclass(slots=True)
class _Work:
    """The newest masks of one row, done or not: behind its newest token, and behind each token of its draft."""

    future: "Future[_Followed]"
    since: float
    # Tokens of the draft that are the row's.
    accepted: int = 0

    @property
    def states(self) -> list[_State]:
        return self.future.result().states

    @property
    def state(self) -> _State:
        return self.states[self.accepted]

    @property
    def mask_s(self) -> float:
        """Seconds that the newest masks took, each."""
        return self.future.result().seconds

    @property
    def is_ready(self) -> bool:
        return self.future.done() and self.future.exception() is None

    def error(self, now: float) -> Exception | None:
        if not self.future.done():
            return GrammarFailed("its mask takes too long") if now - self.since > MAX_MASK_S else None
        error = self.future.exception()
        return error if error is None or isinstance(error, Exception) else GrammarFailed(repr(error))


def _follow(guide: Guide, tokens: Sequence[int], draft: Sequence[int] = ()) -> _Followed:
    begun = time.monotonic()
    for token in tokens:
        guide.take(token)
    states = [_State(guide, guide.allowed(), guide.forced())]
    for token in draft:
        guide = guide.fork()
        try:
            guide.take(token)
            states.append(_State(guide, guide.allowed(), guide.forced()))
        except GrammarFailed:
            break  # it is not the one that will be sampled, or the row may go no further in one step
    return _Followed(states, (time.monotonic() - begun) / len(states))


def _mask(logits: mx.array, masks: dict[int, Allowed]) -> mx.array:
    """-inf where the rows in `masks` may not go; a model's vocabulary may be padded beyond the tokenizer's."""
    rows, vocab = logits.shape
    # MLX's signature knows no NumPy arrays.
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

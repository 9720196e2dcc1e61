"""Pacer of the step loop: what a tick may take, when it rests, and what is known of its times from earlier starts."""

import time

from protocol.messages import SetPace
from protocol.spec import WorkerSpec
from worker.engine.scheduling.chunking import ChunkPlan, ChunkPolicy, PaceLimits
from worker.engine.scheduling.kept_file import KeptFile
from worker.engine.scheduling.rests import Rests
from worker.speculation.policy.draft_width import StepCosts


class Pacer:
    """Owned by the engine thread. `costs` are those of drafts, `kept` is the file of earlier starts; either may be
    None.

    No token depends on it: it decides how many prompt tokens a tick has, and when there is one.
    """

    def __init__(
        self, spec: WorkerSpec, costs: StepCosts | None, kept: KeptFile | None, *, can_ride: bool, has_watchdog: bool
    ) -> None:
        learned = kept.learned if kept is not None else None
        self._policy = ChunkPolicy(
            spec.prefill_chunk,
            is_fixed=spec.deterministic,
            has_watchdog=has_watchdog,
            can_ride=can_ride,
            learned=learned,
        )
        # Of what a model that drafts reads.
        self._reading = ChunkPolicy(spec.prefill_chunk, has_watchdog=has_watchdog, can_ride=False)
        self._rests = Rests()
        self._kept = kept
        if costs is not None and kept is not None:
            costs.recall(kept.learned.steps())
            kept.costs = costs

    def chunk(self, prefilling: int, decoding: int, longest: int, context: int) -> ChunkPlan:
        """For the next tick, as `ChunkPolicy` says."""
        return self._policy.chunk(prefilling, decoding, longest, context)

    def reads(self, decoding: int, unread: int, context: int) -> int:
        """Tokens that a model that drafts reads in the next tick, of so many."""
        return self._reading.chunk(1, decoding, unread, context).tokens

    def choosing_s(self, prefilling: int, decoding: int) -> float:
        """Seconds of the next tick for a prompt that a draft model reads to choose of it."""
        return self._policy.choosing_s(prefilling, decoding)

    def chosen(self) -> None:
        """Nothing is chosen any more: what a tick may take is all for its chunk again."""
        self._policy.is_shared = False

    def observe(self, seconds: float, prefilled: int, decoding: int, *, rode: bool, is_reading: bool = False) -> None:
        """Learn from a forward pass, as `ChunkPolicy` does; `is_reading` is one of a model that drafts."""
        if not is_reading:
            self._policy.observe(seconds, prefilled, decoding, rode=rode)
        if is_reading or not prefilled:
            self._reading.observe(seconds, prefilled, decoding)

    def change(self, order: SetPace) -> None:
        """Another pace from now on."""
        self._policy.pace = self._reading.pace = PaceLimits(order.tick_ms / 1000, order.chunk)
        self._rests.set_duty(order.duty)

    @property
    def rests(self) -> bool:
        """Whether there are rests at all."""
        return self._rests.is_on

    def left_s(self) -> float:
        """Seconds of rest that are left."""
        return self._rests.left_s(time.monotonic()) if self._rests.is_on else 0.0

    def worked(self, began: float) -> None:
        """Work that began then, of the monotonic clock, has ended: a rest for it."""
        self._rests.worked(began, time.monotonic())

    def tend(self) -> None:
        """Keep what was learned, now and then; for a loop that has nothing else to do."""
        if self._kept is not None:
            self._kept.tend(time.monotonic())

    def close(self) -> None:
        """Keep what was learned, at the end."""
        if self._kept is not None:
            self._kept.save()

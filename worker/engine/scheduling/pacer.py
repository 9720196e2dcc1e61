"""Pacer of the step loop: what a tick may take, when it rests, and what is known of its times from earlier starts."""

import time

from protocol.spec import WorkerSpec
from protocol.to_worker import SetPace
from worker.engine.scheduling.chunking import ChunkPlan, ChunkPolicy, PaceLimits
from worker.engine.scheduling.kept_file import KeptFile
from worker.engine.scheduling.pass_time import PassTime
from worker.engine.scheduling.rests import Rests
from worker.speculation.policy.draft_width import StepCosts


class Pacer:
    """Owned by the engine thread. `costs` is the table of step times that drafts read, `kept` is the file of earlier
    starts; either may be None.

    No token depends on it: it decides how many prompt tokens a tick has, and when there is one.
    """

    def __init__(
        self, spec: WorkerSpec, costs: StepCosts | None, kept: KeptFile | None, *, can_fuse: bool, has_watchdog: bool
    ) -> None:
        learned = kept.learned if kept is not None else None
        costs = costs or StepCosts()
        self._policy = ChunkPolicy(
            spec.prefill_chunk,
            costs,
            is_fixed=spec.deterministic,
            has_watchdog=has_watchdog,
            can_fuse=can_fuse,
            learned=learned,
        )
        # Of what a model that drafts reads.
        self._reading = ChunkPolicy(spec.prefill_chunk, costs, has_watchdog=has_watchdog, can_fuse=False)
        self._rests = Rests()
        self._kept = kept

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

    def observe(self, each: PassTime) -> None:
        """Learn from a forward pass, as `ChunkPolicy` does."""
        (self._reading if each.is_reading else self._policy).observe(each)

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

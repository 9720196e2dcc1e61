"""Pacer of the step loop: the size of a tick, the rests between ticks, and measured times from earlier starts."""

import time

from protocol.spec import WorkerSpec
from protocol.timing_profile import PassKind
from protocol.to_worker import SetPace
from worker.engine.scheduling.chunking import ChunkPlan, ChunkPolicy, PaceLimits
from worker.engine.scheduling.kept_file import KeptFile
from worker.engine.scheduling.pass_time import PassTime
from worker.engine.scheduling.rests import Rests
from worker.model.pass_costs import PassCosts


class Pacer:
    """Decides how many prompt tokens a tick has, and when the tick runs; no output token depends on these decisions.

    `costs` is the table of pass times, which drafting also reads. `kept` is the file with times of earlier starts, if
    there is one. Owned by the engine thread.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        costs: PassCosts,
        kept: KeptFile | None,
        *,
        can_fuse: bool,
        has_watchdog: bool,
        pass_tokens: int = 0,
        block_tokens: int = 1,
    ) -> None:
        self._policy = ChunkPolicy(
            spec.prefill_chunk,
            costs,
            is_fixed=spec.deterministic,
            has_watchdog=has_watchdog,
            can_fuse=can_fuse,
            pass_tokens=pass_tokens,
            block_tokens=block_tokens,
        )
        # This policy sizes the slices that a draft model reads.
        self._reading = ChunkPolicy(
            spec.prefill_chunk,
            costs,
            own=PassKind.READING,
            has_watchdog=has_watchdog,
            can_fuse=False,
            pass_tokens=pass_tokens,
        )
        self._rests = Rests()
        self._kept = kept

    def chunk(self, prefilling: int, decoding: int, longest: int, context: int) -> ChunkPlan:
        """Return the plan of the next tick; see `ChunkPolicy.chunk`."""
        return self._policy.chunk(prefilling, decoding, longest, context)

    def most(self, prefilling: int, decoding: int = 0) -> int:
        """Return the largest permitted chunk."""
        return self._policy.most(prefilling, decoding)

    def reads(self, decoding: int, unread: int, context: int) -> int:
        """Return how many of its `unread` tokens a draft model reads in the next tick."""
        return self._reading.chunk(1, decoding, unread, context).tokens

    def selection_s(self, prefilling: int, decoding: int) -> float:
        """Return the seconds of the next tick for the token selection of a sparse prefill."""
        return self._policy.selection_s(prefilling, decoding)

    def end_selection(self) -> None:
        """Note that no token selection runs any more, so that chunks get the whole tick again."""
        self._policy.is_shared = False

    def observe(self, each: PassTime) -> None:
        """Learn from a forward pass."""
        (self._reading if each.is_reading else self._policy).observe(each)

    def change(self, order: SetPace) -> None:
        """Change the limits of a tick and the duty cycle."""
        self._policy.pace = self._reading.pace = PaceLimits(order.tick_ms / 1000, order.chunk)
        self._rests.set_duty(order.duty)

    @property
    def rests(self) -> bool:
        """Whether the loop has to rest between pieces of work."""
        return self._rests.is_on

    def left_s(self) -> float:
        """Return the seconds of rest that are left."""
        return self._rests.left_s(time.monotonic()) if self._rests.is_on else 0.0

    @property
    def rested_s(self) -> float:
        """Return the seconds of all rests until now."""
        return self._rests.total_s

    def worked(self, began: float) -> None:
        """Add the rest for work that began at this time of the monotonic clock and has just ended."""
        self._rests.worked(began, time.monotonic())

    def tend(self) -> None:
        """Write learned times periodically; called by an idle loop."""
        if self._kept is not None:
            self._kept.tend(time.monotonic())

    def close(self) -> None:
        """Write learned times when the loop ends."""
        if self._kept is not None:
            self._kept.save()

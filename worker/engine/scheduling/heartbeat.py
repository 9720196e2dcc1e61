"""Keep-warm heartbeat: forward passes of one token while the engine is idle.

After some two seconds without work, macOS takes the memory of the weights out of the GPU's page tables, and the next
request pays for its return (mlx#4609). Only a pass over the weights prevents that; a small operation does not.
"""

import time
from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx
from mlx_lm.generate import generation_stream

from worker.engine.inbox import Command
from worker.kv.quantized import make_caches
from worker.speculation.drafters.hidden_states import capture_of

INTERVAL_S: Final = 1.5


class Heartbeat:
    """Beats until `keep_s` seconds after the engine's newest work; never if `keep_s` is 0. Owned by the engine thread.

    A beat leaves no trace: it has caches of its own, and is neither measured nor counted. A command that arrives during
    a beat waits for one forward pass.
    """

    def __init__(self, model: Any, keep_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        # Whether the machine has mains power, as the gateway reports, and no memory pressure.
        self.has_power = True
        self.has_memory = True
        self.clock = clock
        self._model = model
        self._keep_s = keep_s
        self._used_at = float("-inf")
        self._beat_at = float("-inf")

    def take(
        self,
        take: Callable[[float | None], list[Command]],
        guard: Callable[[Callable[[], None]], None],
        *,
        is_idle: bool,
    ) -> list[Command]:
        """Return the next commands, and beat until there are any if the engine is idle.

        `take` gets the seconds after which it returns without a command, or None; `guard` calls a beat, and recovers
        from its errors.
        """
        if not self._keep_s:
            return take(None)
        if not is_idle:
            self._used_at = self.clock()
            return take(None)
        while not (commands := take(self._left_s())):
            guard(self._beat)
        return commands

    def _left_s(self) -> float | None:
        """Return the seconds until the next beat; None if there is none before the next command."""
        now, due = self.clock(), max(self._used_at, self._beat_at) + INTERVAL_S
        if not (self.has_power and self.has_memory) or max(now, due) > self._used_at + self._keep_s:
            return None
        return max(0.0, due - now)

    def _beat(self) -> None:
        if self.clock() <= self._used_at + self._keep_s:  # the machine may have slept meanwhile
            with mx.stream(generation_stream):
                mx.eval(self._model(mx.array([[0]]), cache=make_caches(self._model)))
            if (capture := capture_of(self._model)) is not None:
                capture.take_inputs()
        self._beat_at = self.clock()

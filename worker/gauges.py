"""Numbers that the engine thread writes and the IO threads read."""

import time
from dataclasses import dataclass

from protocol.messages import Stats
from worker import memory


@dataclass(slots=True)
class Gauges:
    """One writer, the engine; a torn read across fields is harmless. `busy_since` is 0 while the engine is idle."""

    running: int = 0
    waiting: int = 0
    step_seq: int = 0
    busy_since: float = 0.0
    kv_bytes: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    mem_active: int = 0
    mem_peak: int = 0
    mem_cache: int = 0
    footprint: int = 0

    def measure_memory(self) -> None:
        """Called on the engine thread, now and then."""
        now = memory.measure()
        self.mem_active, self.mem_peak, self.mem_cache = now.active, now.peak, now.cache
        self.footprint = now.footprint

    def snapshot(self) -> Stats:
        busy_since = self.busy_since
        return Stats(
            running=self.running,
            waiting=self.waiting,
            step_seq=self.step_seq,
            step_age_ms=int((time.monotonic() - busy_since) * 1e3) if busy_since else 0,
            mem_active=self.mem_active,
            mem_peak=self.mem_peak,
            mem_cache=self.mem_cache,
            footprint=self.footprint,
            kv_bytes=self.kv_bytes,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
        )

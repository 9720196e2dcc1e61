"""Pace of workers beside a person at this machine: short submissions and rests for the display.

On a Mac that is seen from the system's own tools; those were not run here. Elsewhere the operator says.
"""

import asyncio
import logging
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from gateway.config.settings import CAN_SEE_DESKTOP, Desktop
from gateway.workers.supervisor.handle import WorkerHandle
from gateway.workers.supervisor.state import State
from protocol.minors import SET_PACE_MINOR
from protocol.to_worker import SetPace

log = logging.getLogger(__name__)

Thermal = Literal["nominal", "serious", "critical"]
# What a command prints; empty where it cannot be run.
Run = Callable[[Sequence[str]], str]

FULL: Final = SetPace()
# A person who has touched nothing for so long is away.
AWAY_S: Final = 60.0
# Beside a person: parts of the time in which models compute, the longest tick of prefill, and its tokens of a row.
DUTY: Final = 0.8
BATTERY_DUTY: Final = 0.6
HOT_DUTY: Final[dict[Thermal, float]] = {"nominal": 1.0, "serious": 0.7, "critical": 0.5}
TICK_MS: Final = 60
CHUNK: Final = 256
# Workers are looked at so often, the person every few seconds, battery and heat more rarely.
POLL_S: Final = 1.0
INPUT_EVERY_S: Final = 5.0
POWER_EVERY_S: Final = 30.0

_IDLE: Final = re.compile(r'"HIDIdleTime" = (\d+)')
_POWER: Final = re.compile(r'"CurrentPowerState"\s*=\s*(\d+)')
_SPEED: Final = re.compile(r"CPU_Speed_Limit\s*=\s*(\d+)")
_DISPLAY_ON: Final = 4
_INPUT: Final = ("/usr/sbin/ioreg", "-r", "-d", "1", "-c", "IOHIDSystem")
_DISPLAY: Final = ("/usr/sbin/ioreg", "-r", "-d", "1", "-n", "IODisplayWrangler")
_BATTERY: Final = ("/usr/bin/pmset", "-g", "batt")
_THERMAL: Final = ("/usr/bin/pmset", "-g", "therm")


@dataclass(frozen=True, slots=True)
class DesktopState:
    """State of the machine as far as a pace depends on it; `idle_s` are seconds since its newest input."""

    idle_s: float = 0.0
    display_on: bool = True
    on_battery: bool = False
    thermal: Thermal = "nominal"


def pace(idle_s: float, display_on: bool, on_battery: bool, thermal: Thermal) -> SetPace:
    """The pace beside a person, who is there while the display is on and something was touched a moment ago.

    Heat slows down in any case: a machine that throttles itself does so without regard for its display.
    """
    hot = HOT_DUTY[thermal]
    if not display_on or idle_s >= AWAY_S:
        return SetPace(hot) if hot < 1.0 else FULL
    return SetPace(min(hot, BATTERY_DUTY if on_battery else DUTY), TICK_MS, CHUNK)


def wanted(mode: Desktop, scene: DesktopState | None) -> SetPace:
    """The pace of a mode; `auto` is full where the machine cannot be seen."""
    if mode is True:
        return pace(0.0, True, scene is not None and scene.on_battery, "nominal" if scene is None else scene.thermal)
    if mode is False or scene is None:
        return FULL
    return pace(scene.idle_s, scene.display_on, scene.on_battery, scene.thermal)


class DesktopProbe:
    """State of a Mac as its tools tell it, through `run`. What cannot be read counts as a person at a cool machine."""

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._power_at = float("-inf")
        self._on_battery = False
        self._thermal: Thermal = "nominal"

    def scene(self) -> DesktopState:
        """Blocks for some milliseconds: not for the event loop."""
        now = self._clock()
        if now - self._power_at >= POWER_EVERY_S:
            self._power_at = now
            self._on_battery = "'Battery Power'" in self._run(_BATTERY)
            self._thermal = thermal_of(self._run(_THERMAL))
        idle_s = idle_of(self._run(_INPUT))
        # Asked only where it could make a difference.
        display_on = idle_s < AWAY_S and display_of(self._run(_DISPLAY))
        return DesktopState(idle_s, display_on, self._on_battery, self._thermal)


def idle_of(printed: str) -> float:
    """Seconds since the newest input, of what `ioreg -c IOHIDSystem` prints in nanoseconds."""
    match = _IDLE.search(printed)
    return int(match.group(1)) / 1e9 if match else 0.0


def display_of(printed: str) -> bool:
    """Whether the display is on, of what ioreg prints of its power state; true where it says nothing."""
    match = _POWER.search(printed)
    return match is None or int(match.group(1)) >= _DISPLAY_ON


def thermal_of(printed: str) -> Thermal:
    """Heat by the limit of the processor's speed that `pmset -g therm` prints in percent; nothing is 100."""
    match = _SPEED.search(printed)
    percent = int(match.group(1)) if match else 100
    return "nominal" if percent >= 100 else "serious" if percent >= 70 else "critical"


class DesktopWatch:
    """Tells workers their pace whenever it is another, and new workers once they are ready. One task runs it."""

    def __init__(
        self,
        mode: Callable[[], Desktop],
        workers: Callable[[], Iterable[WorkerHandle]],
        *,
        senses: DesktopProbe | None = None,
        clock: Callable[[], float] = time.monotonic,
        poll_s: float = POLL_S,
    ) -> None:
        self._mode = mode
        self._workers = workers
        self._senses = senses
        self._clock = clock
        self._poll_s = poll_s
        self._scene: DesktopState | None = None
        self._seen_at = float("-inf")
        # By name: the epoch that was told, and what.
        self._told: dict[str, tuple[int, SetPace]] = {}
        self.duty = 1.0

    async def run(self) -> None:
        """Look now and again until cancelled."""
        while True:
            try:
                await self.look()
            except Exception:  # The root of the task: the next look may be luckier.
                log.exception("the pace of workers could not be chosen")
            await asyncio.sleep(self._poll_s)

    async def look(self) -> None:
        """One round."""
        mode, now = self._mode(), self._clock()
        workers = [worker for worker in self._workers() if worker.state is State.READY]
        if self._senses is not None and mode is not False and workers and now - self._seen_at >= INPUT_EVERY_S:
            self._seen_at = now
            self._scene = await asyncio.to_thread(self._senses.scene)
        order = wanted(mode, self._scene)
        if order.duty != self.duty:
            log.info("workers compute for %.0f %% of the time", 100 * order.duty)
        self.duty = order.duty
        for worker in workers:
            told = self._told.get(worker.name)
            before = None if worker.incarnation.is_adopted else FULL  # it may go by what an earlier gateway has said
            if told is not None and told[0] == worker.epoch:
                before = told[1]
            if before != order and worker.incarnation.minor >= SET_PACE_MINOR and worker.incarnation.send(order):
                self._told[worker.name] = worker.epoch, order


def run_tool(command: Sequence[str]) -> str:
    """Run one of the system's tools."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def make_senses() -> DesktopProbe | None:
    """Those of this machine, where it has any."""
    return DesktopProbe(run_tool) if CAN_SEE_DESKTOP else None

"""Power and display of the machine: prevention of sleep, and a pace of workers that leaves GPU time to the display.

Pace of workers while a person uses this machine: short GPU submissions, and pauses for the display. On battery no
idle model is kept warm.

On a Mac the system's tools detect use; this was not tested on a Mac. On other systems the operator sets the mode.

Keeps a Mac awake while the daemon is busy, by a `caffeinate` process.

On other systems the operator configures sleep.
"""

import asyncio
import logging
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from msgspec.structs import replace

from gateway.config.settings import CAN_SEE_DESKTOP, Desktop, PreventSleep
from gateway.workers.supervisor.state import State
from gateway.workers.supervisor.worker import WorkerHandle
from protocol.to_worker import SetPace

log = logging.getLogger(__name__)

Thermal = Literal["nominal", "serious", "critical"]
# A function that runs a command and returns its output, or an empty string if the command fails.
Run = Callable[[Sequence[str]], str]

FULL: Final = SetPace()
# A machine without input for this time is not in use.
AWAY_S: Final = 60.0
# Fraction of the time in which models may compute while the machine is in use.
DUTY_CYCLE: Final = 0.8
# Fraction of the time in which models may compute while the machine is in use on battery.
BATTERY_DUTY_CYCLE: Final = 0.6
# Maximum fraction of the time in which models may compute, by thermal state. It also applies while the machine is not
# in use.
HOT_DUTY_CYCLE: Final[dict[Thermal, float]] = {"nominal": 1.0, "serious": 0.7, "critical": 0.5}
# Maximum duration of a tick with prefill while the machine is in use.
TICK_MS: Final = 60
# Maximum number of prompt tokens per row in a tick while the machine is in use.
CHUNK_TOKENS: Final = 256
POLL_S: Final = 1.0
INPUT_INTERVAL_S: Final = 5.0
POWER_INTERVAL_S: Final = 30.0

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
    """State of the machine that decides the pace; `idle_s` is the time since the newest keyboard or pointer input."""

    idle_s: float = 0.0
    display_on: bool = True
    on_battery: bool = False
    thermal: Thermal = "nominal"


def pace(mode: Desktop, state: DesktopState | None) -> SetPace:
    """Return the pace for a mode. `state` is None on a machine without a probe, where `auto` means full speed.

    In `auto`, the machine is in use while its display is on and its newest input is less than `AWAY_S` old. Unless the
    mode is off, heat slows models down: the machine's own throttling ignores the display.
    """
    if mode is False or (state is None and mode is not True):
        return FULL
    state = state or DesktopState()
    hot = HOT_DUTY_CYCLE[state.thermal]
    if mode is not True and (not state.display_on or state.idle_s >= AWAY_S):
        return SetPace(hot) if hot < 1.0 else FULL
    return SetPace(min(hot, BATTERY_DUTY_CYCLE if state.on_battery else DUTY_CYCLE), TICK_MS, CHUNK_TOKENS)


class DesktopProbe:
    """Reads the state of a Mac through its tools, called by `run`. An unreadable value means cool and in use."""

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._power_at = float("-inf")
        self._on_battery = False
        self._thermal: Thermal = "nominal"

    def read(self) -> DesktopState:
        """Read the state. Blocks for some milliseconds."""
        now = self._clock()
        if now - self._power_at >= POWER_INTERVAL_S:
            self._power_at = now
            self._on_battery = "'Battery Power'" in self._run(_BATTERY)
            self._thermal = thermal_of(self._run(_THERMAL))
        idle_s = idle_of(self._run(_INPUT))
        # The display's state is needed only if there was input.
        display_on = idle_s < AWAY_S and display_of(self._run(_DISPLAY))
        return DesktopState(idle_s, display_on, self._on_battery, self._thermal)


def is_on_battery(run: Run) -> bool:
    """Whether the machine runs on battery. Blocks for some milliseconds; False on systems without `pmset`."""
    return CAN_SEE_DESKTOP and "'Battery Power'" in run(_BATTERY)


def idle_of(output: str) -> float:
    """Parse the seconds since the newest input from `ioreg -c IOHIDSystem`, which prints nanoseconds."""
    match = _IDLE.search(output)
    return int(match.group(1)) / 1e9 if match else 0.0


def display_of(output: str) -> bool:
    """Parse from ioreg's output whether the display is on; True if the output has no power state."""
    match = _POWER.search(output)
    return match is None or int(match.group(1)) >= _DISPLAY_ON


def thermal_of(output: str) -> Thermal:
    """Parse the thermal state from the processor's speed limit in the output of `pmset -g therm`."""
    match = _SPEED.search(output)
    percent = int(match.group(1)) if match else 100
    return "nominal" if percent >= 100 else "serious" if percent >= 70 else "critical"


class DesktopWatch:
    """Sends the current pace to new workers, and a changed pace to all. `run` is called by one task."""

    def __init__(
        self,
        mode: Callable[[], Desktop],
        workers: Callable[[], Iterable[WorkerHandle]],
        *,
        probe: DesktopProbe | None = None,
        clock: Callable[[], float] = time.monotonic,
        poll_s: float = POLL_S,
    ) -> None:
        self._mode = mode
        self._workers = workers
        self._probe = probe
        self._clock = clock
        self._poll_s = poll_s
        self._state: DesktopState | None = None
        self._read_at = float("-inf")
        # Last pace that was sent to each model's worker, with the worker's epoch.
        self._sent: dict[str, tuple[int, SetPace]] = {}
        self.duty_cycle = 1.0

    async def run(self) -> None:
        """Update the pace about once a second, until cancelled."""
        while True:
            try:
                await self.update()
            except Exception:  # The loop must go on after any error.
                log.exception("the pace of workers could not be chosen")
            await asyncio.sleep(self._poll_s)

    async def update(self) -> None:
        mode, now = self._mode(), self._clock()
        workers = [worker for worker in self._workers() if worker.state is State.READY]
        warm = {worker.name for worker in workers if worker.spec.keep_warm_s}
        is_needed = bool(warm) if mode is False else bool(workers)
        if self._probe is not None and is_needed and now - self._read_at >= INPUT_INTERVAL_S:
            self._read_at = now
            self._state = await asyncio.to_thread(self._probe.read)
        command = pace(mode, self._state)
        may_keep_warm = self._state is None or not self._state.on_battery
        if command.duty_cycle != self.duty_cycle:
            log.info("workers compute for %.0f %% of the time", 100 * command.duty_cycle)
        self.duty_cycle = command.duty_cycle
        for worker in workers:
            # The pace of an adopted worker is unknown: an earlier gateway may have changed it.
            before = None if worker.process.is_adopted else FULL
            epoch, sent = self._sent.get(worker.name, (0, FULL))
            if epoch == worker.epoch:
                before = sent
            own = command if may_keep_warm or worker.name not in warm else replace(command, may_keep_warm=False)
            if before != own and worker.process.send(own):
                self._sent[worker.name] = worker.epoch, own


def run_tool(command: Sequence[str]) -> str:
    """Run a tool of the system and return its output, or an empty string if the tool fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def make_probe() -> DesktopProbe | None:
    """Return the probe for this machine; None if there is none for its system."""
    return DesktopProbe(run_tool) if CAN_SEE_DESKTOP else None


# Sleep is prevented until this time after the last request.
LINGER_S: Final = 30.0


class AwakeProcess(Protocol):
    """Process that keeps the machine awake while it runs."""

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...


def caffeinate() -> AwakeProcess:
    """Start caffeinate: with `-i` the display may sleep, with `-w` it ends with this process. Raises `OSError`."""
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        ("/usr/bin/caffeinate", "-i", "-w", str(os.getpid())), stdin=quiet, stdout=quiet, stderr=quiet
    )


class Awake:
    """Runs at most one process that prevents sleep; `mode` and `is_busy` are called each second."""

    def __init__(
        self,
        mode: Callable[[], PreventSleep],
        is_busy: Callable[[], bool],
        *,
        start: Callable[[], AwakeProcess] = caffeinate,
        clock: Callable[[], float] = time.monotonic,
        poll_s: float = POLL_S,
    ) -> None:
        self._mode = mode
        self._is_busy = is_busy
        self._start = start
        self._clock = clock
        self._poll_s = poll_s
        self._process: AwakeProcess | None = None
        self._busy_at: float | None = None
        # Processes that were terminated and not reaped yet.
        self._terminated: list[AwakeProcess] = []

    @property
    def is_held(self) -> bool:
        return self._process is not None

    async def run(self) -> None:
        """Prevent sleep until cancelled; return if this system has no caffeinate."""
        try:
            while self._update():  # noqa: ASYNC110 - processes and the clock are polled
                await asyncio.sleep(self._poll_s)
        finally:
            self._terminate()

    def _update(self) -> bool:
        """Start or end the process. Return False if it cannot be started."""
        self._terminated = [process for process in self._terminated if process.poll() is None]
        if self._process is not None and self._process.poll() is not None:
            self._process = None
        if not self._is_wanted():
            self._terminate()
        elif self._process is None:
            try:
                self._process = self._start()
            except OSError as error:
                log.warning("the machine may sleep during requests: no caffeinate (%s)", error.strerror)
                return False
        return True

    def _is_wanted(self) -> bool:
        mode = self._mode()
        if mode == "always":
            return True
        if mode == "busy":
            now = self._clock()
            if self._is_busy():
                self._busy_at = now
            return self._busy_at is not None and now - self._busy_at < LINGER_S
        return False

    def _terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._terminated.append(self._process)
            self._process = None

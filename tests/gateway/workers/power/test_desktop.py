"""The pace beside a person: by what the machine says, told to each worker once, and never to one that is too old."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from gateway.config.settings import CAN_SEE_DESKTOP
from gateway.workers import power as battery_and_display
from gateway.workers.power import (
    AWAY_S,
    BATTERY_DUTY_CYCLE,
    CHUNK_TOKENS,
    DUTY_CYCLE,
    FULL,
    INPUT_INTERVAL_S,
    POWER_INTERVAL_S,
    TICK_MS,
    DesktopProbe,
    DesktopState,
    DesktopWatch,
    Thermal,
    display_of,
    idle_of,
    is_on_battery,
    pace,
    thermal_of,
)
from gateway.workers.supervisor.state import State
from protocol.spec import WorkerSpec
from protocol.to_worker import SetPace

pytestmark = pytest.mark.anyio

HID = """+-o IOHIDSystem  <class IOHIDSystem, id 0x100000400, registered, matched, active, busy 0 (0 ms), retain 26>
    {
      "HIDServiceSupport" = Yes
      "HIDIdleTime" = 12345678901
    }
"""
WRANGLER = '"IOPowerManagement" = {"CapabilityFlags"=32832,"MaxPowerState"=4,"CurrentPowerState"=%d}'
BATTERY = "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)	81%; discharging"
MAINS = "Now drawing from 'AC Power'\n"


def auto(idle_s: float, display_on: bool, on_battery: bool, thermal: Thermal = "nominal") -> SetPace:
    return pace("auto", DesktopState(idle_s, display_on, on_battery, thermal))


def test_a_person_gets_short_ticks_and_a_part_of_the_time() -> None:
    assert auto(0.0, True, False) == SetPace(DUTY_CYCLE, TICK_MS, CHUNK_TOKENS)
    assert auto(AWAY_S - 1, True, True) == SetPace(BATTERY_DUTY_CYCLE, TICK_MS, CHUNK_TOKENS)


@pytest.mark.parametrize(("idle_s", "display_on"), [(AWAY_S, True), (0.0, False), (1e6, False)])
def test_with_nobody_there_all_of_the_machine_is_used(idle_s: float, display_on: bool) -> None:
    assert auto(idle_s, display_on, False) == auto(idle_s, display_on, True) == FULL


def test_heat_slows_down_whoever_is_there() -> None:
    assert auto(AWAY_S, False, False, "critical").duty_cycle < auto(AWAY_S, False, False, "serious").duty_cycle < 1.0
    assert auto(AWAY_S, False, False, "critical").tick_ms == 0
    assert auto(0.0, True, False, "critical").duty_cycle < DUTY_CYCLE


def test_a_mode_that_is_set_counts_wherever_this_is_and_auto_where_the_machine_can_be_seen() -> None:
    away, here = DesktopState(idle_s=AWAY_S), DesktopState()
    assert pace(True, None) == pace(True, away) == auto(0.0, True, False)
    assert pace(False, here) == pace("auto", None) == pace("auto", away) == FULL
    assert pace("auto", here) == pace(True, None)
    assert pace(True, DesktopState(on_battery=True)).duty_cycle == BATTERY_DUTY_CYCLE


def test_what_the_tools_of_macos_print_is_read_and_silence_is_a_person_at_a_cool_machine() -> None:
    assert idle_of(HID) == pytest.approx(12.345678901)
    assert idle_of("") == 0.0
    assert [display_of(WRANGLER % state) for state in (4, 1)] == [True, False]
    assert display_of("")
    assert [
        thermal_of(text) for text in ("CPU_Speed_Limit \t= 100", "CPU_Speed_Limit = 80", "CPU_Speed_Limit = 40")
    ] == [
        "nominal",
        "serious",
        "critical",
    ]
    assert thermal_of("Note: No thermal warning level has been recorded") == "nominal"


@dataclass
class Mac:
    """A Mac's tools: what they print, and how often each was run."""

    idle_s: float = 0.0
    power: str = MAINS
    now: float = 0.0

    def __post_init__(self) -> None:
        self.runs: list[str] = []

    def run(self, command: Sequence[str]) -> str:
        self.runs.append(command[-1])
        printed = {"IOHIDSystem": f'"HIDIdleTime" = {int(self.idle_s * 1e9)}', "batt": self.power, "therm": ""}
        return printed.get(command[-1], WRANGLER % 4)

    def clock(self) -> float:
        return self.now


def test_battery_and_heat_are_looked_at_more_rarely_than_input() -> None:
    mac = Mac(power=BATTERY)
    probe = DesktopProbe(mac.run, mac.clock)
    assert probe.read() == DesktopState(0.0, True, True, "nominal")
    mac.now, mac.power = POWER_INTERVAL_S - 1, MAINS
    assert probe.read().on_battery
    mac.now = POWER_INTERVAL_S
    assert not probe.read().on_battery
    assert mac.runs.count("batt") == 2
    assert mac.runs.count("IOHIDSystem") == 3


class Wire:
    """Keeps what was sent; names in `gone` cannot be reached."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int, SetPace]] = []
        self.gone: set[str] = set()


@dataclass
class Process:
    """The process of a worker, as far as it is told a pace."""

    name: str
    is_adopted: bool = False
    epoch: int = 1
    wire: Wire = field(default_factory=Wire)

    def send(self, message: SetPace) -> bool:
        if self.name in self.wire.gone:
            return False
        self.wire.sent.append((self.name, self.epoch, message))
        return True


class Model:
    """A worker, as far as it is told a pace."""

    def __init__(self, name: str, state: State = State.READY, keep_warm_s: float = 0.0, **facts: Any) -> None:
        self.name = name
        self.state = state
        self.spec = WorkerSpec(name, "demo", 1, "", "", keep_warm_s=keep_warm_s)
        self.process = Process(name, **facts)

    @property
    def epoch(self) -> int:
        return self.process.epoch


def watched(mac: Mac, models: list[Model], mode: list[object]) -> tuple[DesktopWatch, Wire]:
    wire = Wire()
    for model in models:
        model.process.wire = wire
    watch = DesktopWatch(
        lambda: mode[0],  # type: ignore[arg-type,return-value]
        lambda: models,  # type: ignore[arg-type,return-value]
        probe=DesktopProbe(mac.run, mac.clock),
        clock=mac.clock,
    )
    return watch, wire


async def test_workers_are_told_once_and_again_when_it_changes_and_new_ones_when_they_are_ready() -> None:
    mac, models = Mac(), [Model("a"), Model("b", State.LOADING)]
    watch, wire = watched(mac, models, ["auto"])
    slow = pace("auto", DesktopState())
    for _ in range(3):
        await watch.update()
    assert wire.sent == [("a", 1, slow)]
    assert watch.duty_cycle == slow.duty_cycle
    models[1].state = State.READY
    models[0].process.epoch = 2
    await watch.update()
    assert sorted(wire.sent[1:], key=str) == [("a", 2, slow), ("b", 1, slow)]
    mac.idle_s, mac.now = AWAY_S, INPUT_INTERVAL_S
    await watch.update()
    assert [(name, order) for name, _, order in wire.sent[3:]] == [("a", FULL), ("b", FULL)]
    assert watch.duty_cycle == 1.0


async def test_a_worker_that_could_not_be_reached_is_told_later() -> None:
    mac, models = Mac(), [Model("a")]
    watch, wire = watched(mac, models, [True])
    wire.gone = {"a"}
    await watch.update()
    assert wire.sent == []
    wire.gone = set()
    await watch.update()
    assert [name for name, _, _ in wire.sent] == ["a"]


@pytest.mark.parametrize("mode", ["auto", False])
async def test_only_models_that_are_kept_warm_are_told_of_the_battery_and_again_of_mains(mode: object) -> None:
    mac, models = Mac(), [Model("warm", keep_warm_s=300.0), Model("cold")]
    mac.idle_s = AWAY_S
    watch, wire = watched(mac, models, [mode])
    await watch.update()
    assert wire.sent == [], "on mains, what a worker begins with"

    mac.power, mac.now = BATTERY, POWER_INTERVAL_S
    for _ in range(2):
        await watch.update()
    assert wire.sent == [("warm", 1, SetPace(may_keep_warm=False))]

    mac.power, mac.now = MAINS, 2 * POWER_INTERVAL_S
    await watch.update()
    assert wire.sent[1:] == [("warm", 1, FULL)]


async def test_a_worker_of_an_earlier_gateway_is_told_also_that_it_may_compute_all_the_time() -> None:
    mac, models = Mac(), [Model("kept", is_adopted=True), Model("fresh")]
    watch, wire = watched(mac, models, [False])
    for _ in range(2):
        await watch.update()
    assert wire.sent == [("kept", 1, FULL)]
    assert mac.runs == [], "nothing is looked at that nothing depends on"


def test_a_batch_asks_whether_the_machine_is_on_battery(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_on_battery(lambda _: BATTERY) or CAN_SEE_DESKTOP
    monkeypatch.setattr(battery_and_display, "CAN_SEE_DESKTOP", True)
    assert is_on_battery(lambda _: BATTERY)
    assert not is_on_battery(lambda _: "Now drawing from 'AC Power'")

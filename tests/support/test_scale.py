"""Patience of deadlines: measured again every minute, by the clock and the measurements of a test."""

from dataclasses import dataclass, field

from tests.support.scale import AGAIN_S, Patience


@dataclass
class SlowMachine:
    """A machine whose time and slowness a test sets."""

    time: float = 1000.0
    slowness: float = 1.0
    measured: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return self.time

    def measure(self) -> float:
        self.measured.append(self.slowness)
        return self.slowness

    def patience(self, first: float = 1.0) -> Patience:
        return Patience(first, self.measure, self.clock)


def test_load_that_comes_after_the_start_is_seen_within_a_minute() -> None:
    machine = SlowMachine()
    patience = machine.patience()
    machine.slowness = 5.0
    machine.time += AGAIN_S - 1
    assert patience.now() == 1.0
    machine.time += 1

    assert patience.now() == 5.0


def test_a_machine_is_measured_once_a_minute_however_often_it_is_asked_for() -> None:
    machine = SlowMachine()
    patience = machine.patience()
    for _ in range(600):
        machine.time += 1
        patience.now()

    assert len(machine.measured) == 10


def test_patience_falls_between_modules_only() -> None:
    machine = SlowMachine(slowness=5.0)
    patience = machine.patience()
    machine.time += AGAIN_S
    assert patience.now() == 5.0
    machine.slowness = 2.0
    machine.time += AGAIN_S
    assert patience.now() == 5.0
    patience.relax()

    assert patience.now() == 2.0


def test_patience_is_never_below_that_of_the_start() -> None:
    machine = SlowMachine()
    patience = machine.patience(first=3.0)
    machine.time += AGAIN_S
    assert patience.now() == 3.0
    patience.relax()

    assert (patience.now(), machine.measured) == (3.0, [1.0])

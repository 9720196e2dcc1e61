"""Memory that a machine has for models: the pure parts, and this Linux for real."""

import os
import subprocess
import sys

import pytest

from gateway.workers.memory.host import GIB, ThisMachine, darwin_budget, linux_budget

NONE: list[str | None] = [None, None]


@pytest.mark.parametrize(
    ("limits", "ram_gib", "budget_gib"),
    [
        (NONE, 64, 57.6),
        (["max\n", None], 64, 57.6),
        ([f"{32 * GIB}\n", None], 64, 28.8),
        # cgroup v1 spells no limit as a number that no machine has.
        ([None, "9223372036854771712\n"], 64, 57.6),
        ([f"{4 * GIB}\n", None], 64, 3.0),
        ([f"{GIB}\n", None], 64, 0.5),
        (NONE, 512, 496.0),
    ],
)
def test_linux_gives_what_its_cgroup_or_its_ram_leaves(
    limits: list[str | None], ram_gib: int, budget_gib: float
) -> None:
    assert linux_budget(limits, ram_gib * GIB) == pytest.approx(budget_gib * GIB, abs=1)


@pytest.mark.parametrize(
    ("said", "ram_gib", "budget_gib"),
    [
        ("0\n", 64, 48.0),
        (None, 64, 48.0),
        (f"{56 * 1024}\n", 64, 56.0),
        # More than the machine can spare is not believed.
        (f"{64 * 1024}\n", 64, 57.6),
        ("0", 8, 6.0),
    ],
)
def test_a_mac_gives_what_its_gpu_may_wire(said: str | None, ram_gib: int, budget_gib: float) -> None:
    assert darwin_budget(said, ram_gib * GIB) == pytest.approx(budget_gib * GIB, abs=1)


def test_this_machine_has_something_left() -> None:
    machine = ThisMachine()
    assert machine.budget() > 0
    assert machine.available() > 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_footprint_is_what_ends_with_a_process() -> None:
    machine = ThisMachine()
    hog = "import os; held = os.urandom(50 << 20); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hog], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        before = machine.footprint(child.pid)
        assert 50 << 20 <= before < 100 << 20
        child.kill()
    assert machine.footprint(child.pid) == 0
    assert machine.unreturned(child.pid, before, 0) == 0
    assert machine.footprint(os.getpid()) > 0

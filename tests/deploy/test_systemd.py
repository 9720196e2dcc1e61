import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.scale import patient

HERE = Path(__file__).parent
BOX_IMPOSSIBLE = 77


@pytest.mark.skipif("MLXD_TEST_SYSTEMD" not in os.environ, reason="boots a systemd as root: make test-systemd")
def test_models_stay_loaded_under_a_real_systemd_through_a_kill_of_the_daemon_a_restart_and_upgrades() -> None:
    done = subprocess.run(
        ["sh", str(HERE / "systemd_box.sh"), sys.executable, str(HERE / "life_under_systemd.py")],
        capture_output=True,
        text=True,
        timeout=patient(580),
    )

    if done.returncode == BOX_IMPOSSIBLE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
        "installed and enabled",
        "answers",
        "kill -9 of the daemon",
        "service restart",
        "stop, start",
        "uninstalled",
    ]


def test_what_runs_inside_of_the_box_refuses_to_run_outside_of_it() -> None:
    done = subprocess.run([sys.executable, str(HERE / "life_under_systemd.py")], capture_output=True, text=True)

    assert done.returncode == 1
    assert "systemd_box.sh only" in done.stderr

import subprocess
import sys

import pytest

from protocol.failures import Exit
from protocol.spec import WorkerSpec
from tests.support.scale import patient
from worker import smoke


def test_an_installation_that_works_generates_a_token() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "worker.smoke"], capture_output=True, text=True, timeout=patient(120)
    )

    assert (done.returncode, done.stdout) == (Exit.OK, "one token generated\n"), done.stderr


def test_one_that_cannot_load_its_model_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = WorkerSpec(name="x", path="/nowhere", epoch=1, down="", up="")

    assert smoke.main(nowhere) == Exit.MODEL_UNUSABLE
    assert "/nowhere" in capsys.readouterr().err

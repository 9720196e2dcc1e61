"""`mlxctl calibrate`: a real model is measured in a process of its own, and what lacks is said in a sentence."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from gateway.ctl.calibrate import line
from gateway.ctl.cli import app
from gateway.ctl.tables import records
from gateway.model_files.known_times import KnownTimes
from gateway.workers.memory.host import ThisMachine
from protocol.timing_profile import CalibrationResult, profiles_dir
from tests.support.ctl import ctl


def test_a_model_is_measured_and_info_tells_of_it(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    path = model_folder("qwen3")
    (tmp_path / "mlxd.toml").write_text(f'[models.m]\npath = "{path}"\nmax_running = "auto"\n')
    done = ctl(tmp_path, "calibrate", "m", "--seconds", "1", "--json")
    assert done.returncode == 0, done.stderr
    findings = [json.loads(each) for each in done.stdout.splitlines()]
    assert (findings[0]["kind"], findings[-1]["kind"]) == ("decode", "max_running")

    kept = KnownTimes(profiles_dir(tmp_path)).of("m", str(path))
    assert kept is not None
    assert kept.calibration is not None
    assert kept.calibration.max_running == findings[-1]["size"]
    assert f"max_running = {findings[-1]['size']} is enough" in ctl(tmp_path, "info", "m").stdout


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ('path = "/nowhere"', "could not be calibrated"),
        ('group = { nodes = ["local", "local"] }', "is run by a group of processes"),
    ],
)
def test_what_cannot_be_calibrated_is_said(tmp_path: Path, table: str, reason: str) -> None:
    (tmp_path / "mlxd.toml").write_text(f"[models.m]\n{table}\n")
    done = ctl(tmp_path, "calibrate", "m", "--seconds", "1")
    assert done.returncode == 1
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", ["calibrate", "verify"])
def test_a_model_whose_weights_exceed_the_free_memory_is_loaded_only_if_told(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlxd.toml").write_text('[models.m]\npath = "demo"\n')
    monkeypatch.setenv("MLXD_HOME", str(tmp_path))
    monkeypatch.setattr(ThisMachine, "available", lambda _: 1 << 20)
    done = CliRunner().invoke(app, [verb, "m", "--json"])
    assert done.exit_code == 1
    assert "its weights take" in str(done.exception)
    assert "`mlxctl unload m`" in str(done.exception)


def test_each_finding_is_a_line_for_people() -> None:
    findings = [
        CalibrationResult("decode", 4, 51.25),
        CalibrationResult("prefill", 512, 900.0),
        CalibrationResult("buffers", 1 << 30),
    ]
    assert [line(each).split() for each in (*findings, CalibrationResult("max_running", 8))] == [
        ["4", "rows", "51.2", "tok/s"],
        ["512", "prompt", "900.0", "tok/s"],
        ["free", "buffers:", "1.0", "GiB"],
        ["max_running:", "8", "are", "enough"],
    ]


def test_what_the_code_of_a_model_prints_is_no_finding(capsys: pytest.CaptureFixture[str]) -> None:
    said = [b"Loading \x1b[2J of 7%\n", b'{"kind":"decode","size":4,"tokens_per_s":2.0}\n', b"\xff\n", b"{}\n"]
    assert list(records(said, msgspec.json.Decoder(CalibrationResult))) == [CalibrationResult("decode", 4, 2.0)]
    assert capsys.readouterr().err == "Loading [2J of 7%\n\ufffd\n{}\n"

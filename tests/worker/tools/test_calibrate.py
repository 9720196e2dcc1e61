"""Calibration: it measures a real model, and the next worker of the same form has the results."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from protocol import timing_profile
from protocol.failures import ExitStatus
from protocol.timing_profile import CalibrationResult, MeasuredSpeed, PassKind
from tests.support.engine import EngineHarness, spec
from worker.tools.calibrate import Bench, calibrate, enough, main


@pytest.mark.parametrize(
    ("rates", "rows"),
    [
        ((50, 100, 200, 400), 8),
        ((50, 100, 105), 2),
        ((50, 52), 1),
        ((50,), 1),
        ((50, 90, 160, 170, 400), 4),
    ],
)
def test_enough_rows_are_those_from_which_twice_as_many_gain_less_than_a_tenth(
    rates: tuple[int, ...], rows: int
) -> None:
    assert enough([MeasuredSpeed(1 << at, rate) for at, rate in enumerate(rates)]) == rows


def test_the_next_worker_of_the_model_has_what_was_measured(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model = spec(model_folder("qwen3"), prefill_chunk=128)
    found: list[CalibrationResult] = []
    calibrate(model, 1.0, str(tmp_path), found.append)

    assert [each.kind for each in found][-2:] == ["buffers", "max_running"]
    assert {each.kind for each in found} == {"decode", "prefill", "buffers", "max_running"}
    (file,) = tmp_path.iterdir()
    kept = timing_profile.read(file)
    assert kept.calibration is not None
    assert [each.size for each in kept.calibration.decode] == [each.size for each in found if each.kind == "decode"]
    assert {each.size for each in kept.passes if each.kind is PassKind.STEP} >= {1, 2}
    assert {each.kind for each in kept.passes} == {PassKind.STEP, PassKind.FUSED, PassKind.ALONE}
    with EngineHarness(msgspec.structs.replace(model, max_running=0), keeps=str(tmp_path)) as engine:
        assert engine.engine.kept is not None
        assert engine.engine.kept.calibration == kept.calibration
        assert engine.engine.max_running == kept.calibration.max_running


def test_a_prompt_that_is_cut_short_counts_with_the_tokens_that_were_processed(
    model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[CalibrationResult] = []
    ticks: list[int] = []
    tick, clock = Bench._tick, itertools.count()  # pyright: ignore[reportPrivateUsage]

    def counted(bench: Bench, chunk: int, context: int, *, is_fused: bool = True) -> int:
        ticks.append(done := tick(bench, chunk, context, is_fused=is_fused))
        return done

    monkeypatch.setattr(Bench, "_tick", counted)
    # Each look at the clock takes a second, so the time is over within the first prompt.
    monkeypatch.setattr(
        "worker.tools.calibrate.time", SimpleNamespace(perf_counter=lambda: next(clock), time=time.time)
    )
    monkeypatch.setattr(Bench, "decode", lambda *_: iter([MeasuredSpeed(1, 1.0)]))
    monkeypatch.setattr(Bench, "blocks", lambda *_: None)
    monkeypatch.setattr(Bench, "fused_prefill", lambda *_: None)
    monkeypatch.setattr(Bench, "buffers", lambda *_: 0)
    calibrate(spec(model_folder("qwen3"), prefill_chunk=64), 20.0, str(tmp_path), found.append)

    (prompt,) = [each for each in found if each.kind == "prefill"]
    assert prompt.size == sum(ticks)
    assert 64 <= prompt.size < 512


def test_a_lane_of_one_has_one_row(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    found: list[CalibrationResult] = []
    calibrate(spec(model_folder("qwen3"), batching="single", prefill_chunk=64), 0.1, str(tmp_path), found.append)
    assert [(each.kind, each.size) for each in found if each.kind in ("decode", "max_running")] == [
        ("decode", 1),
        ("max_running", 1),
    ]


def test_what_cannot_be_calibrated_is_an_exit_status_with_a_sentence(
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv(timing_profile.FOLDER_ENV, raising=False)
    reader = msgspec.json.encode(spec(model_folder("qwen3"), kind="embed")).decode()
    assert main(["--spec", reader]) == ExitStatus.BAD_CONFIG
    assert "names no folder" in capsys.readouterr().err
    monkeypatch.setenv(timing_profile.FOLDER_ENV, str(tmp_path))
    assert main(["--spec", reader]) == ExitStatus.BAD_CONFIG
    assert "generates no text" in capsys.readouterr().err
    assert main(["--spec", msgspec.json.encode(spec(tmp_path / "nowhere")).decode()]) != 0
    assert "there is no folder" in capsys.readouterr().err


def test_a_measurement_that_fails_is_an_exit_status_with_a_sentence(
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("[metal::malloc] there is no memory left")

    monkeypatch.setenv(timing_profile.FOLDER_ENV, str(tmp_path))
    monkeypatch.setattr(Bench, "decode", fail)
    text = msgspec.json.encode(spec(model_folder("qwen3"), batching="single")).decode()
    assert main(["--spec", text, "--seconds", "0.1"]) == ExitStatus.INTERNAL
    assert "a measurement failed: RuntimeError: [metal::malloc]" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

"""The file of a worker's times: kept for the same model, form and machine, and never in the way of a start."""

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from protocol import timing_profile
from protocol.timing_profile import Calibration, LoadFacts, MeasuredSpeed, PassKind, PassSeconds
from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, spec
from worker.engine.scheduling.timing_profile_file import MIN_NEW_PASSES, WRITE_INTERVAL_S, KeptFile

KEY = "00112233445566778899"
LOAD = LoadFacts(2.0, 0.5, 100, 200, 8, 0)


def opened(folder: Path, key: str = KEY) -> KeptFile:
    return KeptFile(folder, key, "m", "path", "a machine")


def step(file: KeptFile, seconds: float = 0.01, ticks: int = MIN_NEW_PASSES) -> None:
    for _ in range(ticks):
        file.costs.observe_step(2, 1, seconds)


def test_what_one_start_has_learned_the_next_one_has(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.write_load(LOAD)
    step(file)
    for _ in range(2):
        file.costs.observe_step(2, 4, 0.03)
    file.save()
    again = opened(tmp_path)
    assert again.costs.records() == [
        PassSeconds(0, PassKind.STEP, 2, width, seconds) for width, seconds in ((1, 0.01), (4, 0.03))
    ]
    assert again.kept is not None
    assert again.kept.load == LOAD


def test_another_key_has_another_file(tmp_path: Path) -> None:
    file = opened(tmp_path)
    step(file)
    file.save()
    assert opened(tmp_path, "99" + KEY[2:]).kept is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_bytes(b"{"),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes().replace(b'"model": "m"', b'"model": "other"')),
        lambda file: file.write_bytes(file.read_bytes().replace(b'"seconds": 0.01', b'"seconds": 1e12')),
        lambda file: (file.unlink(), file.mkdir()),
    ],
    ids=["cut", "empty", "foreign", "absurd", "folder"],
)
def test_a_file_that_cannot_be_used_costs_one_line_and_no_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None]
) -> None:
    file = opened(tmp_path)
    step(file)
    file.save()
    spoil(timing_profile.file_of(tmp_path, "m", KEY))
    with caplog.at_level(logging.WARNING, logger="mlxd.worker"):
        again = opened(tmp_path)
    assert again.kept is None
    assert [record.message.count("is not used") for record in caplog.records] == [1]


def test_a_folder_that_cannot_be_written_costs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "occupied").write_text("")
    file = opened(tmp_path / "occupied")
    with caplog.at_level(logging.WARNING, logger="mlxd.worker"):
        file.write_load(LOAD)
        step(file)
        file.save()
    assert [record.message.count("are not kept in") for record in caplog.records] == [1]


def test_it_is_written_when_there_is_something_to_say_and_then_not_soon_again(tmp_path: Path) -> None:
    file, path = opened(tmp_path), timing_profile.file_of(tmp_path, "m", KEY)
    file.flush_if_due(0.0)
    assert not path.exists()
    step(file)
    file.flush_if_due(1.0)
    first = path.read_bytes()
    step(file, 0.005)
    file.flush_if_due(WRITE_INTERVAL_S)
    assert path.read_bytes() == first
    file.flush_if_due(WRITE_INTERVAL_S + 1.0)
    assert path.read_bytes() != first


def test_a_calibration_that_was_made_beside_a_worker_stays(tmp_path: Path) -> None:
    calibration = Calibration(1.0, (MeasuredSpeed(1, 50.0),), (MeasuredSpeed(512, 900.0),), 8, 1 << 30)
    worker, verb = opened(tmp_path), opened(tmp_path)
    verb.write_calibration(calibration)
    step(worker)
    worker.save()
    again = opened(tmp_path)
    assert again.calibration == calibration


def generate(rid: int, prompt_tokens: int = 40) -> Generate:
    prompt = TokensPrompt(tuple(10 + (rid * 7 + at) % 50 for at in range(prompt_tokens)))
    return Generate(rid, prompt, Sampling(temperature=0.0, ignore_eos=True), max_tokens=2 * MIN_NEW_PASSES)


def test_an_engine_keeps_its_times_at_its_end_and_no_file_changes_a_token(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = model_folder("qwen3")

    def ids(speculate: str = "auto") -> list[list[int]]:
        settings = spec(folder, prefill_chunk=64, cache_bytes=0, speculate=speculate)
        with EngineHarness(settings, keeps=str(tmp_path)) as engine:
            return [result.ids for result in engine.run([generate(rid, 30 * rid) for rid in range(1, 5)])]

    # Without drafts each token is a pass, so that there are enough of them for a file.
    first = ids(speculate="off")
    (file,) = tmp_path.glob("test-*.json")
    kept = timing_profile.read(file)
    assert kept.path == str(folder)
    assert {each.rows for each in kept.passes} & {1, 2, 4}
    assert ids() == first
    steps = [PassSeconds(0, PassKind.STEP, rows, width, 1e-9) for rows in (1, 2, 4) for width in (1, 2, 4, 8, 16)]
    chunks = [PassSeconds(0, kind, 0, 64, 1e-9) for kind in (PassKind.FUSED, PassKind.ALONE)]
    timing_profile.write(tmp_path, msgspec.structs.replace(kept, passes=(*steps, *chunks)))
    assert ids() == first


def test_the_number_of_rows_of_a_calibration_counts_where_the_configuration_leaves_it_open(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = spec(model_folder("qwen3"), max_running=0, cache_bytes=0)
    with EngineHarness(settings, keeps=str(tmp_path)) as engine:
        assert engine.engine.max_running == 16
        assert engine.engine.kept is not None
        engine.engine.kept.write_calibration(Calibration(1.0, (), (), 5, 1 << 28))
    with EngineHarness(settings, keeps=str(tmp_path)) as engine:
        assert engine.engine.max_running == 5
    with EngineHarness(msgspec.structs.replace(settings, max_running=3), keeps=str(tmp_path)) as engine:
        assert engine.engine.max_running == 3

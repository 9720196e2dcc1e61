"""What CI makes of failures, on real runs of pytest over small suites."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from tests import rerun
from tests.support.outcomes import Outcomes
from tests.support.scale import patient

# A test that fails as often as its number says, over all runs.
FAILING = """
import os, pathlib

def fails(name, times):
    file = pathlib.Path(name)
    runs = int(file.read_text()) if file.exists() else 0
    file.write_text(str(runs + 1))
    assert runs >= times, f"{name} has failed {runs} times"
"""

MakeSuite = Callable[[str], rerun.Run]


@pytest.fixture
def suite(tmp_path: Path) -> MakeSuite:
    def make(tests: str) -> rerun.Run:
        (tmp_path / "test_it.py").write_text(FAILING + tests)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")

        def run(names: Sequence[str]) -> Outcomes | None:
            file = tmp_path / "outcomes.json"
            file.unlink(missing_ok=True)
            (tmp_path / "names.txt").write_text("\n".join(names))
            plugins = ["-p", "tests.support.outcomes", "-p", "no:cacheprovider"]
            which = ["@names.txt"] if names else ["-p", "xdist", "-n1"]
            subprocess.run(
                [sys.executable, "-P", "-m", "pytest", *plugins, f"--outcomes={file}", *which],
                cwd=tmp_path,
                env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
                check=False,
                timeout=patient(60),
                stdout=subprocess.DEVNULL,
            )
            return msgspec.json.decode(file.read_bytes(), type=Outcomes) if file.exists() else None

        return run

    return make


def test_a_suite_without_failures_passes(suite: MakeSuite, capsys: pytest.CaptureFixture[str]) -> None:
    run = suite("def test_right(): pass\ndef test_skipped(): __import__('pytest').skip()\n")
    assert rerun.judge(run) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["unstable: 0", "tests: 1 passed, 0 failed, 1 skipped"]


def test_failures_that_pass_alone_are_named_with_their_first_failure(
    suite: MakeSuite, capsys: pytest.CaptureFixture[str]
) -> None:
    run = suite(
        "import pytest\n"
        "def test_right(): pass\n"
        "def test_once(): fails('once', 1)\n"
        "@pytest.mark.parametrize('text', ['a [b] c'])\n"
        "def test_twice(text): fails('twice', 2)\n"
    )
    assert rerun.judge(run) == 0
    *_, unstable, tests = out = capsys.readouterr().out.splitlines()
    assert [unstable, tests] == ["unstable: 2", "tests: 3 passed, 0 failed, 0 skipped"]
    assert {"--- test_it.py::test_once", "--- test_it.py::test_twice[a [b] c]"} <= set(out)
    assert any("once has failed 0 times" in line for line in out)
    assert any("twice has failed 0 times" in line for line in out)


@pytest.mark.parametrize(
    "tests",
    [
        "def test_wrong(): fails('wrong', 3)\n",
        "def test_ends_its_process(): os._exit(1)\n",
        "import pytest\n@pytest.fixture\ndef broken(): yield; raise OSError\ndef test_leaves(broken): pass\n",
    ],
    ids=["fails three times", "ends its process", "fails when it is torn down"],
)
def test_a_test_that_fails_alone_fails_the_run(
    suite: MakeSuite, tests: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rerun.judge(suite("def test_right(): pass\n" + tests)) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == ["unstable: 0", "tests: 1 passed, 1 failed, 0 skipped"]


def test_many_failures_fail_the_run_and_are_not_run_again(suite: MakeSuite, capsys: pytest.CaptureFixture[str]) -> None:
    names = range(rerun.MAX_FAILURES + 1)
    run = suite("".join(f"def test_{name}(): fails('{name}', 1)\n" for name in names))
    assert rerun.judge(run) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"tests: 0 passed, {len(names)} failed, 0 skipped"


@pytest.mark.parametrize("tests", ["import nothing_of_this_name\n", ""], ids=["import error", "no test"])
def test_a_run_that_tests_nothing_fails(suite: MakeSuite, tests: str) -> None:
    assert rerun.judge(suite(tests)) != 0

"""Plugin of pytest that writes the outcomes of a run to a file: `pytest -p tests.support.outcomes --outcomes=FILE`.

With xdist it is the controller that writes.
"""

from pathlib import Path

import msgspec
import pytest


class Outcomes(msgspec.Struct, frozen=True):
    """What a run of pytest came to. `failures` has the text of a test's first failure by the test's id."""

    status: int
    passed: int
    skipped: int
    failures: dict[str, str]
    collect_errors: list[str]


class Recorder:
    """Outcomes of the tests of one session."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._passed: set[str] = set()
        self._skipped: set[str] = set()
        self._failures: dict[str, str] = {}
        self._collect_errors: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failures.setdefault(report.nodeid, report.longreprtext)
        elif report.skipped:
            self._skipped.add(report.nodeid)
        elif report.when == "call":
            self._passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._collect_errors.append(report.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        passed = self._passed - self._failures.keys()
        outcomes = Outcomes(int(exitstatus), len(passed), len(self._skipped), self._failures, self._collect_errors)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_bytes(msgspec.json.encode(outcomes))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="file for the outcomes of this run, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--outcomes")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(file), "outcomes")

"""Lists of known failures are kept true: what fails must be listed, and what is listed must fail."""

from pathlib import Path

import pytest

from tests.conformance import outcomes
from tests.conformance.outcomes import FAILED, PASSED, SKIPPED, check


@pytest.fixture(autouse=True)
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A suite that is known to fail in `a`, and in all cases of `b`."""
    monkeypatch.setattr(outcomes, "KNOWN", tmp_path)
    monkeypatch.setattr(outcomes, "CACHE", tmp_path)
    (tmp_path / "suite.toml").write_text('[failures]\n"it is so" = ["a", "b"]\n')


def test_the_known_failures_and_nothing_else_may_fail() -> None:
    check("suite", "1", {"a": FAILED, "b[1]": FAILED, "b[2]": PASSED, "c": PASSED, "d": SKIPPED})
    with pytest.raises(AssertionError, match=r"not known to: \['c'\]"):
        check("suite", "1", {"a": FAILED, "b[1]": FAILED, "c": FAILED})


def test_a_known_failure_that_passes_or_is_gone_fails() -> None:
    with pytest.raises(AssertionError, match=r"pass, or are gone: \['a'\]"):
        check("suite", "1", {"a": PASSED, "b[1]": FAILED})
    with pytest.raises(AssertionError, match=r"pass, or are gone: \['b'\]"):
        check("suite", "1", {"a": FAILED})


def test_a_suite_without_a_list_must_pass_and_run_something() -> None:
    check("other", "1", {"a": PASSED})
    with pytest.raises(AssertionError, match="not known"):
        check("other", "1", {"a": FAILED})
    with pytest.raises(AssertionError, match="no test"):
        check("other", "1", {})

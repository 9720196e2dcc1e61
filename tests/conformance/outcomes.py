"""Outcomes of a suite's tests, compared with a list of those that are known to fail."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

CACHE: Final = Path(__file__).parents[2] / ".cache" / "conformance"
KNOWN: Final = Path(__file__).parent / "known"
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True, slots=True)
class KnownFailures:
    """Tests of a suite that fail, and those that do not apply and are not run, each with its reason."""

    failures: dict[str, str]
    not_applicable: dict[str, str]


def known(suite: str) -> KnownFailures:
    """The list of a suite, `known/SUITE.toml`. A suite without one must pass."""
    file = KNOWN / f"{suite}.toml"
    content = tomllib.loads(file.read_text()) if file.exists() else {}
    lists = [content.get(each, {}) for each in ("failures", "not_applicable")]
    failures, not_applicable = ({name: reason for reason, names in each.items() for name in names} for each in lists)
    return KnownFailures(failures, not_applicable)


def check(suite: str, version: str, outcomes: Mapping[str, str]) -> None:
    """Note the counts, and fail if the tests that fail are others than the known ones."""
    counts = {each: sum(outcome == each for outcome in outcomes.values()) for each in (PASSED, FAILED, SKIPPED)}
    CACHE.mkdir(parents=True, exist_ok=True)
    noted = {"version": version, **counts, "outcomes": dict(outcomes)}
    (CACHE / f"{suite}.json").write_text(json.dumps(noted, indent=1))
    assert outcomes, "the suite has run no test"
    failures = known(suite).failures
    failed = {name for name, outcome in outcomes.items() if outcome == FAILED}
    # Cases of one test are listed by its name, or each by its own.
    new = sorted(name for name in failed if name not in failures and name.partition("[")[0] not in failures)
    failing = failed | {name.partition("[")[0] for name in failed}
    mended = sorted(name for name in failures if name not in failing)
    assert not new, f"{suite}: these fail and are not known to: {new}"
    assert not mended, f"{suite}: these are listed as failures and pass, or are gone: {mended}"


def of_junit(report: Path) -> dict[str, str]:
    """Outcomes of a report that pytest has written, by `FILE::TEST`."""
    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {child.tag for child in case}
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name', '')}"
        outcomes[name] = FAILED if tags & {"failure", "error"} else SKIPPED if "skipped" in tags else PASSED
    return outcomes

"""The suite as CI runs it: `make test`, then the tests that failed again, alone and one after the other.

A test that fails beside others and passes alone is unstable: it is named with its first failure, and the run passes.
A test that fails three times, more than `MAX_FAILURES` failures, and any other error fail the run.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tests.support.outcomes import Outcomes

MAX_FAILURES: Final = 10
RERUNS: Final = 2
_FOLDER: Final = Path(".cache/rerun")

Run = Callable[[Sequence[str]], Outcomes | None]
"""Runs these tests alone, or without any the whole suite; None if the run ended without outcomes."""


def make_test(tests: Sequence[str]) -> Outcomes | None:
    """Run `make test` for the whole suite in several processes, or for some tests in one."""
    file, names = _FOLDER / "outcomes.json", _FOLDER / "tests.txt"
    _FOLDER.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    plugin = f"-p tests.support.outcomes --outcomes={file}"
    if tests:
        names.write_text("\n".join(tests) + "\n")
        command = ["make", "test", "JOBS=0", f"ARGS={plugin} @{names}"]
    else:
        command = ["make", "test", "JOBS=4", f"ARGS={plugin}"]
    subprocess.run(command, check=False)
    return msgspec.json.decode(file.read_bytes(), type=Outcomes) if file.exists() else None


def judge(run: Run) -> int:
    """Run the suite and its failures again, print what became of them, and return the exit status."""
    suite = run([])
    if suite is None or suite.collect_errors or (suite.status and not suite.failures):
        print("the run ended with an error that is no failure of a test", flush=True)
        return suite.status if suite is not None and suite.status else 1
    failing = list(suite.failures)
    if len(failing) <= MAX_FAILURES:
        for attempt in range(RERUNS):
            if not failing:
                break
            print(f"\nrunning {len(failing)} again, alone ({attempt + 1} of {RERUNS})", flush=True)
            again = run(failing)
            # A process that died has no outcomes, so all of its tests count as failed.
            failing = failing if again is None or again.collect_errors else list(again.failures)
    unstable = [test for test in suite.failures if test not in failing]
    _report(suite, unstable, failing)
    return 1 if failing else 0


def _report(suite: Outcomes, unstable: Sequence[str], failing: Sequence[str]) -> None:
    if unstable:
        print("\n=== unstable: failed in the suite, passed alone ===")
        for test in unstable:
            print(f"\n--- {test}\n{suite.failures[test]}")
    if len(failing) > MAX_FAILURES:
        print(f"\n{len(failing)} failures are more than {MAX_FAILURES}: none was run again")
    for test in failing:
        print(f"failed: {test}")
    print(f"\nunstable: {len(unstable)}")
    passed = suite.passed + len(unstable)
    print(f"tests: {passed} passed, {len(failing)} failed, {suite.skipped} skipped", flush=True)


if __name__ == "__main__":
    sys.exit(judge(make_test))

"""`make test-real`: fetch the packages, make the folders, run the tests, and write docs/real-weights.md.

    python -m tests.real [--jobs N] [PYTEST_ARGUMENT ...]

With arguments for pytest the page is not written. It counts what has failed. `--if-possible` ends with status 0 where
the packages cannot be had.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from benchmarks import blas
from tests.real import figures, page, prepare

ROOT: Final = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=2, help="processes that share the tests (%(default)s)")
    parser.add_argument("--if-possible", action="store_true", help="succeed without packages")
    args, rest = parser.parse_known_args()
    # MLX's own BLAS would take ten times as long; what it cannot fetch it says itself.
    subprocess.run([ROOT / "deploy" / "openblas.sh", sys.executable], stdout=subprocess.DEVNULL, check=False)
    environment = blas.environment()
    prepared = subprocess.run([sys.executable, "-P", "-m", "tests.real.prepare"], env=environment, cwd=ROOT)
    if prepared.returncode == prepare.STATUS_UNAVAILABLE and args.if_possible:
        return
    if prepared.returncode:
        sys.exit(prepared.returncode)
    figures.clear()
    start = time.monotonic()
    status = _run_tests(args.jobs, rest, environment)
    if not rest:
        page.write(time.monotonic() - start)
        print(f"real weights: wrote {page.PAGE.relative_to(ROOT)}")
    sys.exit(status)


def _run_tests(jobs: int, rest: list[str], environment: dict[str, str]) -> int:
    # All of tests/real, also what `make test` leaves to `make soak`. Files stay whole: each has a daemon of its own.
    selected = ["-m", "", "-n", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder"]
    named = [] if any(each.startswith("tests/") for each in rest) else ["tests/real"]
    command = [sys.executable, "-P", "-m", "pytest", *selected, "--junitxml", str(page.REPORT), *named, *rest]
    return subprocess.run(command, env=environment, cwd=ROOT).returncode


if __name__ == "__main__":
    main()

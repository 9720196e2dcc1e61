"""Plays seeds of the gateway's simulation: python -m tests.simulation SEED COUNT. Prints how to replay a failure."""

import sys
import time
import traceback

from tests.simulation.collector import rare_collections
from tests.simulation.story import Result, play


def main(first: int, count: int) -> int:
    began, failed = time.process_time(), 0
    for seed in range(first, first + count):
        result = play(seed)
        if count == 1:
            print("\n".join(result.trace))
        if result.failure is not None:
            failed += 1
            report(result, is_alone=count == 1)
        if count == 1:
            print(f"trace digest {result.digest}")
    used_s = time.process_time() - began
    print(f"{count} seeds, {failed} failed, {used_s:.1f} s of CPU time, {count / used_s:.0f} seeds/s")
    return 1 if failed else 0


def report(result: Result, *, is_alone: bool) -> None:
    assert result.failure is not None
    if is_alone:
        traceback.print_exception(result.failure)
    what = f"{type(result.failure).__name__}: {result.failure}".splitlines()[0][:300]
    print(f"seed {result.seed} failed at {result.virtual_s:.3f} s: {what}")
    print(f"replay it with: make simulate SEED={result.seed} N=1", flush=True)


if __name__ == "__main__":
    with rare_collections():
        sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))

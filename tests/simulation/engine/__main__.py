"""Run worlds of the engine: `python -m tests.simulation.engine SEED [N]`."""

import logging
import sys
import time

from tests.simulation.collector import rare_collections
from tests.simulation.engine.replay import run

if __name__ == "__main__":
    logging.disable()  # simulated faults are logged as real ones are
    first, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    begun = time.process_time()
    with rare_collections():
        failed = [seed for seed in range(first, first + count) if not run(seed)]
    print(f"{count} seeds, {len(failed)} failed {failed[:20]}, {time.process_time() - begun:.1f} CPU seconds")
    sys.exit(bool(failed))

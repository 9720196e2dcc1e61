"""mlxd whose models give way to each other after half a second: `python -m tests.support.quick_daemon`."""

from functools import partial

from gateway import daemon
from gateway.main import main
from gateway.workers.pool import Pool
from gateway.workers.supervisor.state import WorkerLimits

daemon.Pool = partial(Pool, limits=WorkerLimits(residency_s=0.5))  # type: ignore[assignment, misc]

if __name__ == "__main__":
    main()

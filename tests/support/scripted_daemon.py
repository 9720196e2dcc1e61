"""mlxd with scripted workers, for tests: `python -m tests.support.scripted_daemon [worker options]`."""

import sys
from functools import partial

from gateway import daemon
from gateway.access.key import has_keys
from gateway.config.load import load_config
from gateway.main import serve
from gateway.state_dir import default_home
from gateway.workers.pool import Pool
from gateway.workers.supervisor.state import WorkerLimits
from tests.support.scripted_worker import scripted

daemon.Pool = partial(Pool, limits=WorkerLimits(residency_s=0.5))  # type: ignore[assignment, misc]

if __name__ == "__main__":
    sys.exit(serve(lambda: load_config(default_home(), has_keys=has_keys), command=scripted(*sys.argv[1:])))

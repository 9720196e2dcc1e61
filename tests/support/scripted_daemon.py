"""mlxd with scripted workers, for tests: `python -m tests.support.scripted_daemon [worker options]`."""

import sys

from gateway.config import default_home
from gateway.configread import load_config
from gateway.main import serve
from tests.support.pool import scripted

if __name__ == "__main__":
    sys.exit(serve(lambda: load_config(default_home()), command=scripted(*sys.argv[1:])))

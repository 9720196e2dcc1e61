"""mlxd whose workers write prefixes of any length to disk, for tests: `python -m tests.support.eager_disk_daemon`."""

from gateway.config import worker_spec_and_group
from gateway.main import main

if __name__ == "__main__":
    worker_spec_and_group.DISK_MIN_TOKENS = 0  # type: ignore[misc]
    main()

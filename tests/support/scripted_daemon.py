"""mlxd with scripted workers: `python -m tests.support.scripted_daemon [mlxd options] -- [worker options]`."""

import sys
from collections.abc import Callable

from gateway.config import default_home, load_config
from gateway.main import serve
from tests.support.pool import scripted


def main(argv: list[str]) -> int:
    split = argv.index("--") if "--" in argv else len(argv)
    own, theirs = argv[:split], argv[split + 1 :]
    value: Callable[[str], str | None] = lambda flag: own[own.index(flag) + 1] if flag in own else None  # noqa: E731
    port = value("--port")
    config = load_config(default_home(), port=int(port) if port is not None else None)
    return serve(config, command=scripted(*theirs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

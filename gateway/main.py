"""`mlxd`: boot, serve, drain.

Exit statuses: 0 stopped as asked · 2 bad command line · 70 an internal error · 73 the home or an address cannot be used
· 78 bad configuration.
"""

import argparse
import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Final

import uvloop

from gateway.access.key import KeysUnusable, has_keys
from gateway.api.openai.warm_prompts import check_warm_prompts
from gateway.config.certificate import CertificateUnusable
from gateway.config.load import load_config
from gateway.config.settings import Config, ConfigError
from gateway.daemon import Daemon
from gateway.http.connection_limits import TooFewFiles
from gateway.http.listen_and_tls import CannotListen, raise_file_limit
from gateway.state_dir import HomeUnusable, RunDir, default_home
from gateway.telemetry.logs import LEVELS, LogSinks, RotatingFile
from gateway.workers.supervisor.spawn import Command, default_command
from protocol import __version__
from protocol.sockets import PathTooLong, check_path
from protocol.timing_profile import move_former_folder

log = logging.getLogger(__name__)

# These errors end the daemon with exit status CANNOT_USE.
UNUSABLE: Final = (HomeUnusable, CannotListen, TooFewFiles, PathTooLong, KeysUnusable, CertificateUnusable)


class DaemonExit(IntEnum):
    """Exit statuses of the daemon (sysexits.h)."""

    OK = 0
    FAULT = 70
    CANNOT_USE = 73
    BAD_CONFIG = 78


def main(argv: Sequence[str] | None = None) -> None:
    """Run the console script, which never returns."""
    options = _parser().parse_args(argv)
    status = run(options.config, options.host, options.port, options.log_level)
    # launchd would restart a failed job forever, which repairs no configuration file, so the status is OK here.
    sys.exit(DaemonExit.OK if options.launchd and status == DaemonExit.BAD_CONFIG else status)


def run(
    config: Path | None = None,
    host: str | None = None,
    port: int | None = None,
    log_level: str | None = None,
) -> int:
    """Serve until stopped, as `mlxd` and `mlxctl serve` do. Returns the exit status."""
    home = default_home()
    return serve(
        lambda: check_warm_prompts(
            load_config(home, config, host=host, port=port, log_level=log_level, has_keys=has_keys)
        )
    )


def serve(read: Callable[[], Config], *, command: Command = default_command) -> int:
    """Serve the configuration that `read` returns until stopped. Each reload calls `read` again. Returns the exit
    status.
    """
    try:
        config = read()
    except ConfigError as error:
        return _refuse(str(error), DaemonExit.BAD_CONFIG)
    try:
        with RunDir(config.home), _logs(config):
            check_path(config.admin_socket)
            move_former_folder(config.home)
            raise_file_limit()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_serve(config, read, command))
    except UNUSABLE as error:
        return _refuse(str(error), DaemonExit.CANNOT_USE)


async def _serve(config: Config, read: Callable[[], Config], command: Command) -> int:
    daemon = Daemon(config, read, command=command)
    try:
        await daemon.run()
    except Exception:  # the outermost frame of the process; the next daemon adopts workers that still run
        log.exception("mlxd ends after an internal error")
        return DaemonExit.FAULT
    return DaemonExit.OK


def _logs(config: Config) -> LogSinks:
    try:
        file = RotatingFile(config.log_path)
    except OSError as error:
        raise HomeUnusable(f"cannot write {config.log_path}: {error.strerror}") from error
    return LogSinks(config.server.log_level, file=file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mlxd", description="Serve MLX models over HTTP.")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration file instead of mlxd.toml in MLXD_HOME (~/.mlxd)"
    )
    parser.add_argument("--host", help="address to listen on")
    parser.add_argument("--port", type=int, help="TCP port to listen on")
    parser.add_argument("--log-level", type=str.lower, choices=LEVELS)
    parser.add_argument("--launchd", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"mlxd {__version__}")
    return parser


def _refuse(message: str, status: DaemonExit) -> int:
    print(f"mlxd: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    main()

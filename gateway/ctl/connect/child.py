"""A client as a child process of `mlxctl launch`: it has the terminal, and its exit status is the command's."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING, Final

from gateway.failed import CommandFailed

if TYPE_CHECKING:
    from gateway.client_setup.client_launches import Launch

# The terminal sends these to the client too, which may take Ctrl-C for something else than its end.
_OF_TERMINAL: Final = (signal.SIGINT, signal.SIGQUIT)
_PASSED_ON: Final = (signal.SIGTERM, signal.SIGHUP)


def run(launch: "Launch", arguments: Sequence[str]) -> int:
    """Run a client until it ends and return its exit status, 128 and the number for a signal. Raises `CommandFailed`
    if it cannot be started.
    """
    env = {name: value for name, value in os.environ.items() if name not in launch.removed} | launch.env
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _: FrameType | None) -> None:
        if child is not None and number in _PASSED_ON:
            child.send_signal(number)

    with ExitStack() as restored:
        # A handler instead of SIG_IGN, which the client would inherit.
        for number in (*_OF_TERMINAL, *_PASSED_ON):
            restored.callback(signal.signal, number, signal.signal(number, pass_on))
        try:
            child = subprocess.Popen([launch.program, *launch.arguments, *(arguments or launch.default)], env=env)
        except OSError as error:
            raise CommandFailed(f"{launch.program} cannot be started: {error.strerror}") from None
        status = child.wait()
    return 128 - status if status < 0 else status

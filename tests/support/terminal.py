"""Terminal of its own for a program that behaves otherwise where a person sits."""

import os
import pty
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Self

from tests.support.scale import patient

DEADLINE_S = 60


class Terminal:
    """`with Terminal(command, env) as terminal`. Ends the program where the block leaves it running."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.text = ""
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            command, env=dict(env), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._ours)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, text: str) -> None:
        """Read until `text` is shown after what was read before. Raises `AssertionError` after the deadline."""
        begin, end = len(self.text), time.monotonic() + patient(DEADLINE_S)
        while text not in self.text[begin:]:
            assert time.monotonic() < end, self.text
            assert self._read() or self._process.poll() is None, self.text

    def wait(self) -> int:
        """The exit status; what is printed until then is read."""
        end = time.monotonic() + patient(DEADLINE_S)
        while self._process.poll() is None:
            assert time.monotonic() < end, self.text
            self._read()
        return self._process.returncode

    def _read(self) -> bool:
        if not select.select([self._ours], [], [], 0.1)[0]:
            return False
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # The program has ended, as Linux says it.
            return False
        self.text += data.decode(errors="replace")
        return bool(data)

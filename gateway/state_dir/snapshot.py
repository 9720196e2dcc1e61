"""A private file that holds the newest of what its owner has counted, written by whichever thread comes first."""

import logging
import threading
from pathlib import Path

from gateway.state_dir.private_file import write_private

log = logging.getLogger(__name__)


class WriteOrder:
    """Numbers what is to be written, so that a thread that comes late never writes over what is newer."""

    def __init__(self, path: Path, written: bytes = b"") -> None:
        self.path = path
        # The content as of the newest write.
        self.written = written
        self._is_failing = False
        self._taken = 0
        self._lock = threading.Lock()
        self._newest = 0

    def take(self) -> int:
        """The number of what is made now. For the one thread that counts."""
        self._taken += 1
        return self._taken

    def write(self, number: int, data: bytes) -> None:
        """Replace the file, unless it is newer. What cannot be written is said once, and costs nothing else."""
        with self._lock:
            if number <= self._newest or data == self.written:
                return
            self._newest = number
            try:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_private(self.path, data)
            except OSError as error:
                # Once, not every half minute: what is counted stays in memory.
                if not self._is_failing:
                    log.warning("usage is not kept: %s: %s", self.path, error.strerror or error)
                self._is_failing = True
            else:
                self._is_failing = False
                self.written = data

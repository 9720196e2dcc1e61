"""Snapshots of counters, written to a private file by several threads. A newer snapshot always wins."""

import logging
import threading
from pathlib import Path

from gateway.state_dir.private_file import write_private

log = logging.getLogger(__name__)


class WriteOrder:
    """Gives each snapshot a number, so that a late thread never overwrites a newer snapshot."""

    def __init__(self, path: Path, written: bytes = b"") -> None:
        self.path = path
        # The content of the newest write.
        self.written = written
        self._is_failing = False
        self._taken = 0
        self._lock = threading.Lock()
        self._newest = 0

    def take(self) -> int:
        """Return the number of the next snapshot. Only the thread that counts may call it."""
        self._taken += 1
        return self._taken

    def write(self, number: int, data: bytes) -> None:
        """Replace the file's content, unless a newer snapshot is written or nothing has changed. Never raises
        `OSError`.
        """
        with self._lock:
            if number <= self._newest or data == self.written:
                return
            self._newest = number
            try:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_private(self.path, data)
            except OSError as error:
                # A failure is logged once, not at each write; the counters stay in memory.
                if not self._is_failing:
                    log.warning("usage is not kept: %s: %s", self.path, error.strerror or error)
                self._is_failing = True
            else:
                self._is_failing = False
                self.written = data

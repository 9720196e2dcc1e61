"""Snapshots of what a process counts, written to a private file by several threads. A newer snapshot always wins."""

import logging
import threading
from pathlib import Path

from gateway.disk import SYSTEM_DISK, Disk
from gateway.state_dir.private_file import write_private

log = logging.getLogger(__name__)


class WriteOrder:
    """Gives each snapshot a number, so that a late thread never overwrites a newer snapshot. `content` names what is
    in the file, for the log.
    """

    def __init__(self, path: Path, disk: Disk = SYSTEM_DISK, content: str = "usage") -> None:
        self.path = path
        self._content = content
        self._disk = disk
        # The content of the newest write.
        self.written = b""
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
                write_private(self.path, data, self._disk)
            except OSError as error:
                # A failure is logged once, not at each write; the counters stay in memory.
                if not self._is_failing:
                    log.warning("%s is not kept: %s: %s", self._content, self.path, error.strerror or error)
                self._is_failing = True
            else:
                self._is_failing = False
                self.written = data

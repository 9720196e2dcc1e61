"""Audit log of the daemon. A thread writes it, so that neither requests nor the event loop wait for the disk."""

import logging
import threading
from typing import Final

from gateway.access.audit_log import Audit, AuditEntry, AuditUnwritable
from gateway.single_thread import MakeThread, single_thread

log = logging.getLogger(__name__)

# Maximum number of pending lines. Further lines are lost and counted.
PENDING_MAX: Final = 1000


class AuditTrail:
    """Queue of audit lines, written in order. A line that is lost is counted and written to the daemon's
    log instead.
    """

    def __init__(self, audit: Audit, make_thread: MakeThread = single_thread) -> None:
        self._audit = audit
        self._thread = make_thread("audit")
        self._room = threading.Semaphore(PENDING_MAX)
        self.lost = 0

    def record(self, entry: AuditEntry) -> None:
        """Queue a line to be written."""
        if self._room.acquire(blocking=False):
            self._thread.submit(self._write, entry)
        else:
            self._lose(entry, "the disk does not keep up")

    def close(self) -> None:
        """Write all pending lines. No method may be called after this."""
        self._thread.shutdown()

    def _write(self, entry: AuditEntry) -> None:
        self._room.release()
        try:
            self._audit.record(entry)
        except AuditUnwritable as error:
            self._lose(entry, str(error))

    def _lose(self, entry: AuditEntry, why: str) -> None:
        self.lost += 1
        fields = {"action": entry.action, "target": entry.target, "outcome": entry.outcome, "uid": entry.uid}
        log.error("not in the audit log: %s", why, extra={"fields": fields})

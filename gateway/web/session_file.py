"""File with the sessions of the page, so that the next daemon honours them. It holds hashes, which open nothing."""

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from gateway.state_dir.snapshot import WriteOrder

log = logging.getLogger(__name__)

_CONTENT: Final = "the list of sessions of the page"


class SavedSession(Struct, frozen=True):
    """A session with the hash of its token and the Unix time of its last use."""

    id: str
    digest: bytes
    used: float


class SessionFile:
    """Reads the file once, and writes it whole after changes."""

    def __init__(self, path: Path) -> None:
        self._order = WriteOrder(path, content=_CONTENT)

    def read(self) -> list[SavedSession]:
        """Return the sessions; none if there is no file, or if it cannot be read, which is logged."""
        try:
            return msgspec.json.decode(self._order.path.read_bytes(), type=list[SavedSession])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s is not read: %s: %s", _CONTENT, self._order.path, error)
            return []

    async def write(self, sessions: Iterable[SavedSession]) -> None:
        """Write the sessions as they are now. A failure is logged; the sessions then end with the daemon."""
        number, data = self._order.take(), msgspec.json.encode(list(sessions))
        await asyncio.to_thread(self._order.write, number, data)

"""Sessions of the web page. A one-time code from the unix socket is exchanged for a bearer token.

Codes and tokens have 256 random bits. Only their hashes are kept: those of codes in memory, those of tokens also in a
private file, so that sessions outlive the daemon.
"""

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from gateway.wall_clock import WallClock
from gateway.web.session_file import SavedSession

# This prefix distinguishes tokens from API keys.
TOKEN_START: Final = "mlxd-ui-"
SECRET_BYTES: Final = 32
CODE_S: Final = 60.0
CODES_MAX: Final = 8
IDLE_S: Final = 14 * 86400.0
SESSIONS_MAX: Final = 32
# Uses are saved this often, so that a page that is looked at writes no file all the time.
SAVE_S: Final = 3600.0
_SECRET_CHARS_MAX: Final = 128


@dataclass(slots=True)
class WebSession:
    """One login. `id` identifies it in the audit log and grants no access."""

    id: str
    used: float
    saved: float = 0.0
    is_over: bool = False


class Sessions:
    """Valid codes and sessions. The number of each is bounded: a new code replaces the oldest code, and a new session
    the least recently used one.
    """

    def __init__(self, saved: Iterable[SavedSession] = (), clock: Callable[[], float] | None = None) -> None:
        """Continue the sessions that an earlier daemon has saved."""
        self._clock = clock or WallClock()
        # Maps the hash of each code to its expiry.
        self._codes: OrderedDict[bytes, float] = OrderedDict()
        # Maps the hash of each token to its session, the least recently used first.
        self._sessions: OrderedDict[bytes, WebSession] = OrderedDict(
            (each.digest, WebSession(each.id, each.used, each.used))
            for each in sorted(saved, key=lambda each: each.used)[-SESSIONS_MAX:]
        )

    def make_code(self) -> str:
        """Make a code that is valid for one login, within `CODE_S` seconds."""
        self._forget_old()
        if len(self._codes) >= CODES_MAX:
            self._codes.popitem(last=False)
        code = secrets.token_urlsafe(SECRET_BYTES)
        self._codes[_digest(code)] = self._clock() + CODE_S
        return code

    def redeem(self, code: str) -> tuple[str, WebSession] | None:
        """Exchange a code for a token and a session. None if the code is unknown, used or expired."""
        self._forget_old()
        if len(code) > _SECRET_CHARS_MAX or self._codes.pop(_digest(code), None) is None:
            return None
        if len(self._sessions) >= SESSIONS_MAX:
            self._sessions.popitem(last=False)[1].is_over = True
        token = TOKEN_START + secrets.token_urlsafe(SECRET_BYTES)
        session = WebSession(secrets.token_hex(4), self._clock())
        self._sessions[_digest(token)] = session
        return token, session

    def use(self, token: str) -> WebSession | None:
        """Return the session of a token and reset its idle time; None for an invalid token."""
        self._forget_old()
        key = _digest(token) if len(token) <= _SECRET_CHARS_MAX else b""
        session = self._sessions.get(key)
        if session is not None:
            session.used = self._clock()
            self._sessions.move_to_end(key)
        return session

    def is_alive(self, session: WebSession) -> bool:
        """Whether a session has neither ended nor expired. Does not reset its idle time."""
        return not session.is_over and self._clock() - session.used < IDLE_S

    def end(self, session: WebSession) -> None:
        session.is_over = True
        self._sessions = OrderedDict((key, kept) for key, kept in self._sessions.items() if kept is not session)

    def revoke(self) -> int:
        """End every session and code. Returns the number of sessions that ended."""
        self._forget_old()
        count = len(self._sessions)
        for session in self._sessions.values():
            session.is_over = True
        self._sessions.clear()
        self._codes.clear()
        return count

    @property
    def is_unsaved(self) -> bool:
        """Whether a session was used so long after its last save that the next daemon should know."""
        return any(session.used - session.saved >= SAVE_S for session in self._sessions.values())

    def save(self) -> list[SavedSession]:
        """Return the sessions for the file, as saved now."""
        self._forget_old()
        for session in self._sessions.values():
            session.saved = session.used
        return [SavedSession(session.id, digest, session.used) for digest, session in self._sessions.items()]

    def _forget_old(self) -> None:
        now = self._clock()
        while self._codes and next(iter(self._codes.values())) <= now:
            self._codes.popitem(last=False)
        while self._sessions and now - next(iter(self._sessions.values())).used >= IDLE_S:
            self._sessions.popitem(last=False)[1].is_over = True


def _digest(secret: str) -> bytes:
    return hashlib.blake2b(secret.encode(), digest_size=32, person=b"mlxd-ui").digest()

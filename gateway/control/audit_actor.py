"""Peer credentials of a unix socket: the user and the process at its other end, reported by the kernel."""

import socket
import struct
import sys
from typing import Final

from gateway.access.audit_log import AuditActor

# struct ucred of Linux: pid, uid, gid.
_UCRED: Final = struct.Struct("=iII")
# macOS's struct xucred begins with its version, which is 0, and the uid. The option numbers are from `sys/un.h`.
_XUCRED: Final = struct.Struct("=II")
_XUCRED_BYTES: Final = 76
_SOL_LOCAL: Final = 0
_LOCAL_PEERCRED: Final = 0x001
_LOCAL_PEERPID: Final = 0x002
_PID: Final = struct.Struct("=i")


def peer_of(connection: socket.socket) -> AuditActor:
    """Return the process at the other end of the socket. Fields that the system does not report are left out."""
    try:
        if sys.platform == "linux":
            return from_ucred(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if sys.platform == "darwin":
            credentials = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED_BYTES)
            return from_xucred(credentials, connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID, _PID.size))
    except OSError:
        pass  # The client has disconnected, so nothing more is known.
    return AuditActor()


def from_ucred(credentials: bytes) -> AuditActor:
    """Parse the credentials that Linux reports."""
    pid, uid, _ = _UCRED.unpack(credentials)
    return AuditActor(uid=uid, pid=pid)


def from_xucred(credentials: bytes, pid: bytes) -> AuditActor:
    """Parse the credentials that macOS reports, and add the pid."""
    version, uid = _XUCRED.unpack_from(credentials)
    return AuditActor(uid=uid if version == 0 else None, pid=_PID.unpack(pid)[0])

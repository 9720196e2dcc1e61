"""The daemon's listening sockets. If a socket cannot be opened, the error is readable."""

import errno
import os
import resource
import socket
from pathlib import Path
from typing import Final

BACKLOG: Final = 4096
# Each client needs one descriptor. macOS refuses more than its own maximum even if the hard limit is infinite.
FILES_WANTED: Final = (65536, 10240)


class CannotListen(Exception):
    """Raised when the address cannot be used; the message gives the reason."""


def listen_tcp(host: str, port: int) -> list[socket.socket]:
    """Open one socket for each address of `host`, all on one port. Raises `CannotListen`."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise CannotListen(f"the host {host!r} cannot be resolved: {error.strerror}") from error
    except UnicodeError:
        raise CannotListen(f"{host!r} is not a name of a host") from None
    sockets: list[socket.socket] = []
    for family, kind, protocol, _, address in dict.fromkeys(addresses):
        try:
            listener = socket.socket(family, kind, protocol)
        except OSError:
            continue  # This machine lacks the address family.
        sockets.append(listener)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address[0], port, *address[2:]))
            listener.listen(BACKLOG)
        except OSError as error:
            close_all(sockets)
            raise CannotListen(_why(error, host, port)) from error
        # If the port is 0, the system chooses one for the first address, and the other addresses use the same.
        port = listener.getsockname()[1]
    if not sockets:
        raise CannotListen(f"no address of {host!r} is available on this machine")
    return sockets


def listen_unix(path: Path) -> socket.socket:
    """Open a socket file of mode 0600 in place of a stale one. The home's lock must be held. Raises `CannotListen`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The umask makes the socket private from the start: between bind and chmod, any user could connect.
    mask = os.umask(0o177)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise CannotListen(f"cannot listen on {path}: {error.strerror or error}") from error
    finally:
        os.umask(mask)
    return listener


def close_all(sockets: list[socket.socket]) -> None:
    for one in sockets:
        one.close()


def file_limit() -> int:
    """Return the limit of this process's open files."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_file_limit() -> int:
    """Raise the limit of open files as far as the system allows, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in FILES_WANTED:
        target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if 0 <= soft < target:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            except (ValueError, OSError):
                continue
            return target
    return soft


def _why(error: OSError, host: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} on {host} is in use; stop what listens there, or choose another port with --port"
        case errno.EACCES:
            return f"port {port} needs more rights than this user has; choose one above 1023 with --port"
        case errno.EADDRNOTAVAIL:
            return f"{host} is not an address of this machine; see --host"
        case _:
            return f"cannot listen on {host} port {port}: {error.strerror or error}"

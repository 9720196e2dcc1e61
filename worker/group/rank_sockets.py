"""Sockets between the ranks of a group, with CURVE: only ranks of the same start are accepted."""

import logging
from typing import Final

import zmq
from zmq.auth.thread import ThreadAuthenticator

from protocol import group, sockets
from protocol.sockets import AllowedKeys, KeyPair
from protocol.spec import RankSpec
from worker.errors import PartnerLost

log = logging.getLogger("mlxd.worker")

Socket = zmq.Socket[bytes]
# The last message of an ending rank is dropped if it is not sent within this time.
LINGER_MS: Final = 1000


class RankSockets:
    """Sockets of one rank. Each socket belongs to the thread that requested it."""

    def __init__(self, rank: RankSpec) -> None:
        self._rank = rank
        self._keys = KeyPair(rank.public, rank.secret)
        self._context: zmq.Context[Socket] = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        if rank.rank == 0:
            # The authenticator must run before a socket is bound.
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("*", AllowedKeys(lambda: rank.members, _refused))

    def bind(self, address: str) -> Socket:
        """Bind rank 0's socket. Raises `PartnerLost` if the port is in use; the next start chooses another port."""
        try:
            return sockets.bind_secure_router(self._context, address, self._keys)
        except zmq.ZMQError as error:
            raise PartnerLost(f"rank 0 cannot listen on {address}: {error}") from error

    def connect(self, address: str) -> Socket:
        """Connect a follower's socket."""
        identity = group.identity(self._rank.rank)
        return sockets.connect_secure_dealer(self._context, address, identity, self._rank.server, self._keys)

    def close(self) -> None:
        """Close the context. All sockets must be closed before."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


def _refused(key: str) -> None:
    log.warning("refused a connection to the group by a key that is none of its ranks': %s", key)

"""Publisher of a prefix cache's events over ZeroMQ, in vLLM's format.

A PUB socket sends `[topic, sequence, batch]`. A batch is msgpack `[time, events]`; a sequence number has eight bytes,
big-endian. A subscriber that has missed batches sends `[sequence]` to a ROUTER socket, which replays all batches from
that number on and ends with the sequence number -1.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final

import msgspec
import zmq

from protocol.sockets import bind_events, bind_replays
from worker.prefix_cache.block_events import Event

log = logging.getLogger("mlxd.worker")

# Maximum number of batches that are kept for replays. A replay fits the send queue of a socket.
MAX_REPLAY_BATCHES: Final = 8192
# Maximum size in bytes of the batches that are kept for replays.
MAX_REPLAY_BYTES: Final = 64 << 20
POLL_S: Final = 0.1
# Timeout of binding the address, which the previous worker may still hold.
BIND_TIMEOUT_S: Final = 10.0
END_SEQUENCE: Final = (-1).to_bytes(8, signed=True)


class CannotPublish(Exception):
    """Raised if an address cannot be bound."""


class KvPublisher:
    """Publisher with its own thread. `put` may be called from one other thread."""

    def __init__(self, endpoint: str, replay: str = "", topic: str = "") -> None:
        """Bind the sockets and start the thread. Raises `CannotPublish`."""
        self._topic = topic.encode()
        self._waiting: SimpleQueue[Sequence[Event] | None] = SimpleQueue()
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_bytes = 0
        self._next = 0
        self._has_ended = False
        self._context = zmq.Context()
        self._events = self._bound(bind_events, endpoint)
        self._replays = self._bound(bind_replays, replay) if replay else None
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def put(self, events: Sequence[Event]) -> None:
        if not self._has_ended:
            self._waiting.put(events)

    def close(self) -> None:
        """Publish the queued events, then end the thread."""
        self._waiting.put(None)
        self._thread.join(POLL_S * 20)

    def _bound(self, bind: Callable[[zmq.Context[Any], str], Any], address: str) -> Any:
        end = time.monotonic() + BIND_TIMEOUT_S
        while True:
            try:
                return bind(self._context, address)
            except zmq.ZMQError as error:
                if time.monotonic() > end or error.errno != zmq.EADDRINUSE:
                    self._context.destroy(linger=0)
                    raise CannotPublish(f"kv_events: {address}: {error.strerror}") from None
                time.sleep(POLL_S)

    def _run(self) -> None:
        try:
            while self._publish_waiting():
                if self._replays is not None:
                    self._replay(self._replays)
        except Exception:  # the engine must go on without events after any error
            log.exception("events of the prefix cache are not published any more")
        finally:
            self._has_ended = True
            self._context.destroy(linger=1000)

    def _publish_waiting(self) -> bool:
        """Publish the queued events; if there are none, wait for the first. Return False if the publisher was
        closed."""
        with suppress(Empty):
            events = self._waiting.get(timeout=None if self._replays is None else POLL_S)
            while events is not None:
                self._publish(events)
                events = self._waiting.get_nowait()
            return False
        return True

    def _publish(self, events: Sequence[Event]) -> None:
        sequence, batch = self._next.to_bytes(8), msgspec.msgpack.encode([time.time(), events])
        self._next += 1
        self._kept.append((sequence, batch))
        self._kept_bytes += len(batch)
        while len(self._kept) > MAX_REPLAY_BATCHES or self._kept_bytes > MAX_REPLAY_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._events.send_multipart([self._topic, sequence, batch])

    def _replay(self, replays: Any) -> None:
        """Answer one pending replay request, or drop it if it is malformed; new events are published before the next
        request."""
        if not replays.poll(0):
            return
        client, *parts = replays.recv_multipart()
        if not parts or len(parts[-1]) != 8:
            return
        begin = int.from_bytes(parts[-1])
        for sequence, batch in self._kept:
            if int.from_bytes(sequence) >= begin:
                replays.send_multipart([client, b"", sequence, batch])
        replays.send_multipart([client, b"", END_SEQUENCE, b""])

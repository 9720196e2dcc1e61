"""Publisher of a prefix cache's events over ZeroMQ, in the form that vLLM has: `[topic, sequence, batch]` by PUB, and a
ROUTER that replays from a sequence number on what a subscriber has missed.

The batch is msgpack `[time, events]`; the sequence has eight bytes, the most significant first. A replay is asked for
with `[sequence]`, answered with a message for each batch, and ended by one of sequence -1.
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

# Batches that are kept for a replay, and their bytes: with its end, a replay is less than a socket holds for a client.
KEPT: Final = 8192
KEPT_BYTES: Final = 64 << 20
LOOK_S: Final = 0.1
# The worker before this one may still be ending.
BIND_S: Final = 10.0
END: Final = (-1).to_bytes(8, signed=True)


class CannotPublish(Exception):
    """An address that cannot be listened on."""


class KvPublisher:
    """Publishes on a thread of its own. `put` may be called by one other thread."""

    def __init__(self, endpoint: str, replay: str = "", topic: str = "") -> None:
        """Raises `CannotPublish`."""
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
        """Publish what waits, and end."""
        self._waiting.put(None)
        self._thread.join(LOOK_S * 20)

    def _bound(self, bind: Callable[[zmq.Context[Any], str], Any], address: str) -> Any:
        end = time.monotonic() + BIND_S
        while True:
            try:
                return bind(self._context, address)
            except zmq.ZMQError as error:
                if time.monotonic() > end or error.errno != zmq.EADDRINUSE:
                    self._context.destroy(linger=0)
                    raise CannotPublish(f"kv_events: {address}: {error.strerror}") from None
                time.sleep(LOOK_S)

    def _run(self) -> None:
        try:
            while self._publish_waiting():
                if self._replays is not None:
                    self._replay(self._replays)
        except Exception:  # the root of the thread
            log.exception("events of the prefix cache are not published any more")
        finally:
            self._has_ended = True
            self._context.destroy(linger=1000)

    def _publish_waiting(self) -> bool:
        """Publish all that waits, or what comes first; False at the end."""
        with suppress(Empty):
            events = self._waiting.get(timeout=None if self._replays is None else LOOK_S)
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
        while len(self._kept) > KEPT or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._events.send_multipart([self._topic, sequence, batch])

    def _replay(self, replays: Any) -> None:
        """Answer one client that has missed something: what is new comes before the next. Anything else is dropped."""
        if not replays.poll(0):
            return
        client, *parts = replays.recv_multipart()
        if not parts or len(parts[-1]) != 8:
            return
        begin = int.from_bytes(parts[-1])
        for sequence, batch in self._kept:
            if int.from_bytes(sequence) >= begin:
                replays.send_multipart([client, b"", sequence, batch])
        replays.send_multipart([client, b"", END, b""])

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
from queue import Empty, SimpleQueue
from typing import Any, Final

import msgspec
import zmq

from protocol.sockets import bind_events, bind_replays
from worker.cache.block_events import Event

log = logging.getLogger("mlxd.worker")

# Batches that are kept for a replay.
KEPT: Final = 10_000
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
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT)
        self._next = 0
        self._context = zmq.Context()
        self._events = self._bound(bind_events, endpoint)
        self._replays = self._bound(bind_replays, replay) if replay else None
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def put(self, events: Sequence[Event]) -> None:
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
        while True:
            try:
                events = self._waiting.get(timeout=None if self._replays is None else LOOK_S)
                if events is None:
                    break
                self._publish(events)
            except Empty:
                pass
            if self._replays is not None:
                self._replay(self._replays)
        self._context.destroy(linger=1000)

    def _publish(self, events: Sequence[Event]) -> None:
        sequence, batch = self._next.to_bytes(8), msgspec.msgpack.encode([time.time(), events])
        self._next += 1
        self._kept.append((sequence, batch))
        self._events.send_multipart([self._topic, sequence, batch])

    def _replay(self, replays: Any) -> None:
        """Answer those who have missed something. What they send else is dropped."""
        while replays.poll(0):
            client, *parts = replays.recv_multipart()
            if not parts or len(parts[-1]) != 8:
                continue
            begin = int.from_bytes(parts[-1])
            for sequence, batch in self._kept:
                if int.from_bytes(sequence) >= begin:
                    replays.send_multipart([client, b"", sequence, batch])
            replays.send_multipart([client, b"", END, b""])

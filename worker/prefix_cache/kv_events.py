"""KV events: blocks of tokens that a prefix cache stores or removes, and their publisher over ZeroMQ, in vLLM's format.

Events of a prefix cache: blocks of tokens that it stores or removes, in the form of vLLM's KV cache events.

The structs are encoded in msgpack as those of `vllm.distributed.kv_events`: arrays that begin with the name. A block's
hash covers all tokens up to its end and the salt of the request; it is only valid in this process.

Publisher of a prefix cache's events over ZeroMQ, in vLLM's format.

A PUB socket sends `[topic, sequence, batch]`. A batch is msgpack `[time, events]`; a sequence number has eight bytes,
big-endian. A subscriber that has missed batches sends `[sequence]` to a ROUTER socket, which replays all batches from
that number on and ends with the sequence number -1.
"""

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final

import msgspec
import numpy as np
import zmq

from protocol.sockets import bind_events, bind_replays
from protocol.stats import BLOCK
from worker.prefix_cache.radix_tree import RadixNode, Tokens, adapter_number

log = logging.getLogger("mlxd.worker")

# vLLM's name for the memory that holds a block.
MEDIUM: Final = "GPU"


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Consecutive blocks that were stored; `parent_block_hash` is the hash of the block before them.

    `lora_id` is the integer id of the blocks' adapter, equal in all workers with that adapter; None for the base model.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks that were removed."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Event that the cache has no blocks; the first event of a process."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(slots=True, frozen=True)
class _BlockHashes:
    """Hashes of consecutive blocks; `first` is the index of the first block."""

    first: int
    hashes: list[int]

    @property
    def end(self) -> int:
        """Position of the first token after the last block."""
        return (self.first + len(self.hashes)) * BLOCK


class BlockEventLog:
    """Events of one cache, passed to `publish` once per tick. Owned by the engine thread.

    Hashes are kept for each node, so that only new tokens are hashed: a long prompt is stored in many pieces.
    """

    def __init__(self, publish: Callable[[Sequence[Event]], None]) -> None:
        self._publish = publish
        self._events: list[Event] = [AllBlocksCleared()]
        self._held: set[int] = set()
        # Block hashes of nodes with KV. After a split, the lower node also has the hashes of blocks that end in the
        # upper node.
        self._blocks: dict[RadixNode, _BlockHashes] = {}

    def stored(self, salt: str, node: RadixNode) -> None:
        """Add an event for the blocks that end in a node whose KV was stored."""
        above, tokens, begin = self._unhashed(node)
        hashes = hash_blocks(salt.encode() if above is None else above.to_bytes(8), tokens)
        # The blocks between the last hashed block and this node end in nodes without hashes, so they are not counted
        # for this node.
        skipped = (node.begin - begin) // BLOCK
        own = hashes[skipped:]
        self._blocks[node] = _BlockHashes(node.begin // BLOCK, own)
        new = next((at for at, each in enumerate(own) if each not in self._held), len(own))
        if new == len(own):
            return
        at = skipped + new
        self._held.update(hashes[at:])
        ids = tokens[at * BLOCK : len(hashes) * BLOCK]
        self._events.append(
            BlockStored(hashes[at:], hashes[at - 1] if at else above, ids.tolist(), BLOCK, adapter_number(salt), MEDIUM)
        )

    def removed(self, salt: str, node: RadixNode) -> None:
        """Add an event for the blocks that end in a node whose KV is being removed."""
        blocks = self._blocks.pop(node, _BlockHashes(0, []))
        gone = [each for each in blocks.hashes[node.begin // BLOCK - blocks.first :] if each in self._held]
        if gone:
            self._held.difference_update(gone)
            self._events.append(BlockRemoved(gone, MEDIUM))

    def flush(self) -> None:
        """Publish the events that were added since the last call."""
        if self._events:
            events, self._events = self._events, []
            self._publish(events)

    def _unhashed(self, node: RadixNode) -> tuple[int | None, Tokens, int]:
        """Return the hash of the last hashed block above a node, or None; the tokens between that block and the node's
        end; and the position of the first of these tokens."""
        edges: list[Tokens] = []
        at: RadixNode | None = node
        while at is not None:
            blocks = self._blocks.get(at) if at is not node else None
            if blocks is not None and blocks.hashes and blocks.end >= at.begin:
                edges.append(at.tokens[blocks.end - at.begin :])
                return blocks.hashes[-1], np.concatenate(edges[::-1]), blocks.end
            edges.append(at.tokens)
            at = at.parent
        return None, np.concatenate(edges[::-1]), 0


def hash_blocks(above: bytes, tokens: Tokens) -> list[int]:
    """Return the hash of each whole block, chained from `above`."""
    hashes: list[int] = []
    for begin in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
        above = hashlib.blake2b(above + tokens[begin : begin + BLOCK].tobytes(), digest_size=8).digest()
        hashes.append(int.from_bytes(above))
    return hashes


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

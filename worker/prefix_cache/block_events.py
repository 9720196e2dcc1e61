"""Events of a prefix cache: blocks of tokens that it stores or removes, in the form of vLLM's KV cache events.

The structs are encoded in msgpack as those of `vllm.distributed.kv_events`: arrays that begin with the name. A block's
hash covers all tokens up to its end and the salt of the request; it is only valid in this process.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from protocol.stats import BLOCK
from worker.prefix_cache.radix_tree import RadixNode, Tokens
from worker.prefix_cache.salts import adapter_number

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

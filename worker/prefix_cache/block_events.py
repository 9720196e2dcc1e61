"""Journal of a prefix cache: blocks of tokens that it has come to hold or let go of, as vLLM's events of its KV cache.

The structs are those of `vllm.distributed.kv_events` as msgpack has them: arrays that begin with the name. A block's
hash stands for all tokens up to its end, and for the salt of the request; it means nothing beyond this process.
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

# The memory that holds a block, in vLLM's words.
MEDIUM: Final = "GPU"


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks that follow each other; `parent_block_hash` is that of the one before the first.

    `lora_id` is a number of their adapter, the same in each worker that has it, None of the base's.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks that are not held any more."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nothing is held: the first event of a process."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(slots=True, frozen=True)
class _Blocks:
    """Hashes of blocks that follow each other, the first with this index."""

    first: int
    hashes: list[int]

    @property
    def end(self) -> int:
        """The position behind the last."""
        return (self.first + len(self.hashes)) * BLOCK


class BlockEventLog:
    """Events of one cache, told to `tell` once a tick. Owned by the engine thread.

    Hashes are kept by node, so that only tokens that are new are hashed: a long prompt is stored in many pieces.
    """

    def __init__(self, tell: Callable[[Sequence[Event]], None]) -> None:
        self._tell = tell
        self._events: list[Event] = [AllBlocksCleared()]
        self._held: set[int] = set()
        # Of nodes with KV; a node that was cut since has hashes of blocks that end above it, too.
        self._blocks: dict[RadixNode, _Blocks] = {}

    def hold(self, salt: str, node: RadixNode) -> None:
        """A node has its KV: blocks that end in it are held."""
        above, tokens, begin = self._unhashed(node)
        hashes = hash_blocks(salt.encode() if above is None else above.to_bytes(8), tokens)
        # Blocks between the end of what was hashed and this node end in nodes that are too short to be kept.
        skipped = (node.begin - begin) // BLOCK
        own = hashes[skipped:]
        self._blocks[node] = _Blocks(node.begin // BLOCK, own)
        new = next((at for at, each in enumerate(own) if each not in self._held), len(own))
        if new == len(own):
            return
        at = skipped + new
        self._held.update(hashes[at:])
        ids = tokens[at * BLOCK : len(hashes) * BLOCK]
        self._events.append(
            BlockStored(hashes[at:], hashes[at - 1] if at else above, ids.tolist(), BLOCK, adapter_number(salt), MEDIUM)
        )

    def let_go(self, salt: str, node: RadixNode) -> None:
        """A node loses its KV: blocks that end in it are not held."""
        blocks = self._blocks.pop(node, _Blocks(0, []))
        gone = [each for each in blocks.hashes[node.begin // BLOCK - blocks.first :] if each in self._held]
        if gone:
            self._held.difference_update(gone)
            self._events.append(BlockRemoved(gone, MEDIUM))

    def flush(self) -> None:
        """Tell what has happened since the last time."""
        if self._events:
            events, self._events = self._events, []
            self._tell(events)

    def _unhashed(self, node: RadixNode) -> tuple[int | None, Tokens, int]:
        """The hash of the last block that is known above a node, None for none, the tokens behind it up to the node's
        end, and the position of the first of them."""
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
    """Of each whole block, chained from what is above."""
    hashes: list[int] = []
    for begin in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
        above = hashlib.blake2b(above + tokens[begin : begin + BLOCK].tobytes(), digest_size=8).digest()
        hashes.append(int.from_bytes(above))
    return hashes

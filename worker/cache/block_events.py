"""Journal of a prefix cache: blocks of tokens that it has come to hold or let go of, as vLLM's events of its KV cache.

The structs are those of `vllm.distributed.kv_events` as msgpack has them: arrays that begin with the name. A block's
hash stands for all tokens up to its end, and for the salt of the request; it means nothing beyond this process.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from protocol.stats import BLOCK
from worker.cache.radix_tree import Node, Tokens

# The memory that holds a block, in vLLM's words.
MEDIUM: Final = "GPU"


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Blocks that follow each other; `parent_block_hash` is that of the one before the first."""

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


class Journal:
    """Events of one cache, told to `tell` once a tick. Owned by the engine thread."""

    def __init__(self, tell: Callable[[Sequence[Event]], None]) -> None:
        self._tell = tell
        self._events: list[Event] = [AllBlocksCleared()]
        self._held: set[int] = set()

    def hold(self, salt: str, node: Node) -> None:
        """A node has its KV: blocks that end in it are held."""
        tokens, first = _path(node), node.begin // BLOCK
        hashes = _hashes(salt, tokens)
        new = [at for at in range(first, len(hashes)) if hashes[at] not in self._held]
        if not new:
            return
        self._held.update(hashes[at] for at in new)
        own = tokens[new[0] * BLOCK : len(hashes) * BLOCK]
        parent = hashes[new[0] - 1] if new[0] else None
        self._events.append(BlockStored(hashes[new[0] :], parent, own.tolist(), BLOCK, None, MEDIUM))

    def let_go(self, salt: str, node: Node) -> None:
        """A node loses its KV: blocks that end in it are not held."""
        hashes = _hashes(salt, _path(node))
        gone = [each for each in hashes[node.begin // BLOCK :] if each in self._held]
        if gone:
            self._held.difference_update(gone)
            self._events.append(BlockRemoved(gone, MEDIUM))

    def flush(self) -> None:
        """Tell what has happened since the last time."""
        if self._events:
            events, self._events = self._events, []
            self._tell(events)


def _path(node: Node) -> Tokens:
    """All tokens up to the end of a node."""
    edges: list[Tokens] = []
    at: Node | None = node
    while at is not None:
        edges.append(at.tokens)
        at = at.parent
    return np.concatenate(edges[::-1])


def _hashes(salt: str, tokens: Tokens) -> list[int]:
    """Of each whole block, chained from the first."""
    hashes: list[int] = []
    above = salt.encode()
    for begin in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
        above = hashlib.blake2b(above + tokens[begin : begin + BLOCK].tobytes(), digest_size=8).digest()
        hashes.append(int.from_bytes(above))
    return hashes

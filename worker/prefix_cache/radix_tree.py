"""Radix tree over token ids whose edges have KV, in memory, on disk, or both.

An edge owns the KV of its tokens; a node may own a checkpoint of the stateful layers at its end. A path from the root
is a prefix, shared by all sequences that begin with it. Each salt has its own tree.

A node is *held* if its KV is in memory; its ancestors are held then too. The recency order keeps every held node newer
than its held descendants, so that the oldest node is always a leaf, and eviction removes the oldest.

Salts of prefixes: KV is never used under another salt.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from worker.kv.spans_and_checkpoints import KvLayout, Span, arrays_of, copy_state, cut_span, extend_windows, slice_span
from worker.prefix_cache.disk import DiskEntry

_ADAPTER: Final = "lora:"


def adapter_salt(digest: str) -> str:
    """Return the prefix of the salts of rows with an adapter, from the hexadecimal digest of the adapter's files.

    The prefix comes first, because a client chooses the end of a salt, after the part of its API key and a NUL.
    """
    return f"{_ADAPTER}{digest}\0"


def salt_key(salt: str) -> str:
    """Return the name that stands for a salt in the cache and its files, because these must not reveal the salt. The
    integer id of an adapter is appended.
    """
    key = hashlib.blake2b(salt.encode(), digest_size=16).hexdigest()
    if not salt.startswith(_ADAPTER):
        return key
    digest, _, _ = salt.removeprefix(_ADAPTER).partition("\0")
    return f"{key}.{1 + int(digest[:8], 16) % (2**31 - 1)}"


def adapter_number(key: str) -> int | None:
    """Return the integer id of the adapter of a salt key, positive with 31 bits; None for the base model."""
    _, _, number = key.partition(".")
    return int(number) if number else None


Tokens = npt.NDArray[np.int32]
EMPTY: Tokens = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Extent:
    """Part [begin, end) of the tokens of a file's edge."""

    entry: DiskEntry
    begin: int
    end: int


@dataclass(slots=True, eq=False)
class RadixNode:
    """One edge: `tokens`, ending at position `end`.

    Their KV is `span` in memory and `extent` on disk; the checkpoint at the end is `state` in memory, `saved` on disk.
    """

    tokens: Tokens
    end: int
    parent: "RadixNode | None"
    span: Span | None = None
    state: list[Any] | None = None
    extent: Extent | None = None
    saved: DiskEntry | None = None
    # Whether the span has more tokens of the windowed layers than the node's file.
    is_longer: bool = False
    children: "dict[int, RadixNode]" = field(default_factory=dict)
    nbytes: int = 0
    arrays: int = 0
    # The request that used the node last.
    rid: int = 0

    @property
    def begin(self) -> int:
        return self.end - len(self.tokens)

    @property
    def is_held(self) -> bool:
        return self.span is not None

    @property
    def is_on_disk(self) -> bool:
        """Whether the edge is written to disk or queued to be written."""
        return self.extent is not None and self.extent.entry.is_live

    @property
    def is_readable(self) -> bool:
        return self.extent is not None and self.extent.entry.is_readable


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Nominal size of nodes, so that all ranks of a group evict the same nodes, although their layers differ."""

    token_bytes: int
    state_bytes: int
    arrays: int


Path = list[tuple[RadixNode, int]]
"""Edges along some tokens, each with the number of its matching tokens; only the last may match in part."""


class Listener(Protocol):
    """Listener to nodes that get or lose KV, with the salt of their tree."""

    def stored(self, salt: str, node: RadixNode) -> None: ...
    def removed(self, salt: str, node: RadixNode) -> None: ...


class Tree:
    """The nodes of all trees and their accounts. `nbytes` and `arrays` are exact sums over the nodes in memory."""

    def __init__(self, layout: KvLayout, listener: "Listener | None" = None) -> None:
        self.layout = layout
        self._listener = listener
        self.token_cost: TokenCost | None = None
        self.nbytes = 0
        self.arrays = 0
        self._roots: dict[str, RadixNode] = {}
        self._recency: OrderedDict[RadixNode, None] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of nodes whose KV is in memory."""
        return len(self._recency)

    @property
    def oldest(self) -> RadixNode:
        return next(iter(self._recency))

    def walk(self, tokens: Tokens, salt: str) -> Path:
        """Return the edges along `tokens`. Each token is compared once."""
        path: Path = []
        node, depth = self._roots.get(salt), 0
        while node is not None and depth < len(tokens):
            child = node.children.get(int(tokens[depth]))
            if child is None:
                break
            if not child.is_held and not child.is_on_disk:
                self._detach(child)  # the file of `child` was deleted, and no node below `child` can be reached
                break
            matched = common_prefix(child.tokens, tokens[depth:])
            path.append((child, matched))
            depth += matched
            node = child if matched == len(child.tokens) else None
        return path

    def descend(self, tokens: Tokens, salt: str) -> tuple[RadixNode, int]:
        """Return the node where `tokens` leave the tree, and the number of tokens up to it. Splits an edge if
        necessary."""
        path = self.walk(tokens, salt)
        if not path:
            return self._roots.setdefault(salt, RadixNode(EMPTY, 0, None)), 0
        node, matched = path[-1]
        depth = node.begin + matched
        is_inside = depth == len(tokens) and node.is_held and not self.layout.needs_checkpoints
        if matched == len(node.tokens) or is_inside:
            return node, depth
        return self.split(node, matched), depth

    def split(self, node: RadixNode, at: int) -> RadixNode:
        """Split an edge. Returns the upper half, which has no checkpoint."""
        parent, extent, size = node.parent, node.extent, len(node.tokens)
        assert parent is not None
        upper = RadixNode(node.tokens[:at].copy(), node.begin + at, parent, rid=node.rid)
        parent.children[int(upper.tokens[0])] = upper
        node.tokens, node.parent = node.tokens[at:].copy(), upper
        upper.children[int(node.tokens[0])] = node
        if extent is not None:
            middle = extent.begin + at
            upper.extent = Extent(extent.entry, extent.begin, middle)
            node.extent = Extent(extent.entry, middle, extent.end)
        if node.span is not None:
            upper_span, lower_span = cut_span(node.span, size, at)
            mx.async_eval(arrays_of([*upper_span, *lower_span], []))
            node.span = lower_span
            self._account(node)
            upper.is_longer = node.is_longer
            # The upper half becomes the newest node, so that it is newer than its descendants.
            self.hold(upper, upper_span)
        return upper

    def append(self, parent: RadixNode, tokens: Tokens) -> RadixNode:
        """Add a child without KV to a node."""
        node = RadixNode(tokens.copy(), parent.end + len(tokens), parent)
        parent.children[int(tokens[0])] = node
        return node

    def hold(self, node: RadixNode, span: Span) -> None:
        """Put the KV of a node into memory. The caller must `touch` the path when it is complete."""
        assert not node.is_held
        node.span = span
        self._recency[node] = None
        self._account(node)
        if self._listener is not None:
            self._listener.stored(self._salt(node), node)

    def set_state(self, node: RadixNode, state: list[Any]) -> None:
        node.state = state
        self._account(node)

    def fill(self, node: RadixNode, caches: Sequence[Any]) -> None:
        """Put the KV of the whole path to `node` into memory, from caches that have processed all of its tokens."""
        missing: list[RadixNode] = []
        while node.parent is not None:
            if not node.is_held:
                missing.append(node)
            node = node.parent
        for each in reversed(missing):
            span = slice_span(caches, each.begin, each.end)
            mx.async_eval(arrays_of(span, []))
            self.hold(each, span)
            # The file of a longer edge may lack a part of the windows that end at this node.
            is_part = each.extent is not None and each.extent.end < len(each.extent.entry.tokens)
            each.is_longer = is_part and bool(self.layout.windows)

    def covers(self, node: RadixNode) -> bool:
        """Whether the path to `node` has, in memory, the KV of all windows that end at this node."""
        return next(self.lacking(node), None) is None

    def lacking(self, node: RadixNode) -> Iterator[RadixNode]:
        """Yield the nodes of the path to `node` whose span lacks KV of a window that ends at `node`."""
        for size, at in self.layout.windows:
            need = min(size, node.end)
            step: RadixNode | None = node
            while need > 0 and step is not None and step.span is not None:
                if step.span[at][0].shape[2] < min(need, len(step.tokens)):
                    yield step
                need -= len(step.tokens)
                step = step.parent

    def widen(self, node: RadixNode, span: Span) -> None:
        """Replace a node's span by one that has more KV of the windowed layers, if `span` does."""
        assert node.span is not None
        counts = [(span[at][0].shape[2], node.span[at][0].shape[2]) for _, at in self.layout.windows]
        if any(new > old for new, old in counts) and all(new >= old for new, old in counts):
            node.span = span
            self._account(node)

    def cover(self, node: RadixNode, caches: Sequence[Any]) -> None:
        """Store the missing KV of windowed layers before a checkpoint. An edge only has the last tokens of these
        layers, so KV is missing in an edge that was split off or was computed as a part of a longer edge."""
        if self.covers(node):
            return
        begin = node.end - max(size for size, _ in self.layout.windows)
        step: RadixNode | None = node
        while step is not None and step.span is not None and step.end > begin:
            step.span = extend_windows(step.span, caches, max(begin, step.begin), step.end)
            step.is_longer = True
            mx.async_eval(arrays_of(step.span, []))
            self._account(step)
            step = step.parent

    def touch(self, node: RadixNode, rid: int = 0) -> None:
        """Make a path the newest, leaf first, so that ancestors stay newer than their descendants."""
        while node.parent is not None:
            self._recency.move_to_end(node)
            node.rid = rid or node.rid
            node = node.parent

    def span_bytes(self, tokens: int, span: Span, state: Sequence[Any] | None) -> int:
        """Return the bytes of the KV of `tokens` tokens, and of the checkpoint at their end."""
        if self.token_cost is not None:
            return tokens * self.token_cost.token_bytes + (0 if state is None else self.token_cost.state_bytes)
        return sum(array.nbytes for array in arrays_of(span, state or []))

    def set_token_cost(self, token_cost: TokenCost | None) -> None:
        if token_cost != self.token_cost:
            self.token_cost = token_cost
            for node in self._recency:
                self._account(node)

    def path_bytes(self, node: RadixNode) -> int:
        total = 0
        while node.parent is not None:
            total += node.nbytes
            node = node.parent
        return total

    def release(self, node: RadixNode) -> None:
        """Free the KV of a leaf, and of the nodes above it that only the leaf needed."""
        parent = node.parent
        assert parent is not None
        self._free(node)
        self.drop_useless(parent)

    def clear(self) -> None:
        """Free all KV, the deepest nodes first: a call that raised may have left a leaf newer than its ancestors."""
        for node in sorted(self._recency, key=lambda node: node.end, reverse=True):
            if node.is_held:
                self.release(node)
        self.prune()

    def drop_useless(self, node: RadixNode) -> None:
        """Free edges that end a path without a checkpoint, if checkpoints are needed: such edges cannot be reused."""
        while self.layout.needs_checkpoints and node.is_held and node.state is None and not _has_held_children(node):
            parent = node.parent
            assert parent is not None
            self._free(node)
            node = parent
        if node.parent is None and not node.children:
            self._roots = {salt: root for salt, root in self._roots.items() if root is not node}

    def prune(self) -> None:
        """Remove the nodes that are neither in memory nor on disk, because their files were deleted."""
        for node in list(self._nodes()):
            if node.parent is not None and not node.is_held and not node.is_on_disk:
                self._detach(node)

    def place(self, entry: DiskEntry, above: RadixNode | None) -> RadixNode:
        """Add a file on disk below the node at which its parent's tokens end. Return the node at which the file's own
        tokens end."""
        node = above or self._roots.setdefault(entry.salt, RadixNode(EMPTY, 0, None))
        while node.begin >= entry.begin and node.parent is not None:
            node = node.parent
        if node.end != entry.begin:
            node = self.split(node, entry.begin - node.begin)
        at = 0
        while at < len(entry.tokens):
            child = node.children.get(int(entry.tokens[at]))
            if child is None:
                child = self.append(node, entry.tokens[at:])
                child.extent = Extent(entry, at, len(entry.tokens))
            matched = common_prefix(child.tokens, entry.tokens[at:])
            node = child if matched == len(child.tokens) else self.split(child, matched)
            at += matched
        if entry.has_state:
            node.saved = entry
            if at:  # the file of a longer edge may lack a part of the windows before this position
                node.extent = Extent(entry, at - len(node.tokens), at)
        return node

    def _free(self, node: RadixNode) -> None:
        assert not _has_held_children(node)
        if self._listener is not None:
            self._listener.removed(self._salt(node), node)
        del self._recency[node]
        node.span = node.state = None
        node.is_longer = False
        self._account(node)
        if not node.is_on_disk:
            self._detach(node)

    def _salt(self, node: RadixNode) -> str:
        top = node
        while top.parent is not None:
            top = top.parent
        return next(salt for salt, root in self._roots.items() if root is top)

    def _detach(self, node: RadixNode) -> None:
        """Remove a node and its descendants, none of which may be in memory."""
        assert node.parent is not None
        del node.parent.children[int(node.tokens[0])]
        if node.parent.parent is None and not node.parent.children:
            self._roots = {salt: root for salt, root in self._roots.items() if root is not node.parent}

    def _account(self, node: RadixNode) -> None:
        self.nbytes -= node.nbytes
        self.arrays -= node.arrays
        arrays = arrays_of(node.span or [], node.state or [])
        size = self.span_bytes(len(node.tokens), node.span or [], node.state) + node.tokens.nbytes
        node.nbytes = size if node.is_held else 0
        node.arrays = len(arrays) if self.token_cost is None or not node.is_held else self.token_cost.arrays
        self.nbytes += node.nbytes
        self.arrays += node.arrays

    def _nodes(self) -> Iterator[RadixNode]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def new_state(layout: KvLayout, caches: Sequence[Any]) -> list[Any] | None:
    return copy_state(caches) if layout.needs_checkpoints else None


def common_prefix(left: Tokens, right: Tokens) -> int:
    """Return the length of the common prefix."""
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    at = int(differs.argmax()) if size else 0
    return at if size and differs[at] else size


def _has_held_children(node: RadixNode) -> bool:
    return any(child.is_held for child in node.children.values())

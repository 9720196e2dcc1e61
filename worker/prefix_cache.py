"""Prefixes that were computed before: a radix tree over token ids whose edges hold KV.

An edge owns the KV of its tokens; a node may own a checkpoint of the stateful layers at its end. A path from the root
is a prefix, shared by all that begin with it. Models with only sliceable layers reuse any number of tokens; others
reuse up to the deepest checkpoint on the path. Each salt has a tree of its own, and nothing crosses.

Look-up compares each token once. Recency order keeps every node newer than its descendants, so that the oldest node is
always a leaf and evicting is popping.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from worker.counts import Counts
from worker.kv import Layout, Span, arrays_of, assemble, copy_state, cut_span, slice_span, view_span

Tokens = npt.NDArray[np.int32]

# Metal allows a process 499,000 buffers; many small nodes reach that long before any budget of bytes.
MAX_ARRAYS: Final = 200_000
# Less than this is not worth a node when only a part of a prefix fits the budget.
MIN_TOKENS: Final = 64


@dataclass(slots=True, eq=False)
class Node:
    """One edge: `tokens` and their KV, ending at position `end`, with a checkpoint there or not."""

    tokens: Tokens
    end: int
    span: Span
    state: list[Any] | None
    parent: "Node | None"
    children: "dict[int, Node]" = field(default_factory=dict)
    nbytes: int = 0
    arrays: int = 0

    @property
    def begin(self) -> int:
        return self.end - len(self.tokens)


class PrefixCache:
    """Owned by the engine thread. `nbytes` is exactly the sum over the nodes and never above `budget` between calls."""

    def __init__(self, layout: Layout, budget: int, max_arrays: int = MAX_ARRAYS) -> None:
        self._layout = layout
        self._budget = budget
        self._max_arrays = max_arrays
        self._roots: dict[str, Node] = {}
        self._recency: OrderedDict[Node, None] = OrderedDict()
        self.nbytes = 0
        self.arrays = 0
        self.counts = Counts()

    def __len__(self) -> int:
        return len(self._recency)

    @property
    def is_on(self) -> bool:
        return self._budget > 0

    @property
    def needs_checkpoints(self) -> bool:
        return self._layout.needs_checkpoints

    def longest(self, tokens: Tokens, salt: str = "") -> int:
        """How many leading tokens could be reused; changes nothing."""
        return self._usable(self._walk(tokens, salt))[0]

    def fetch(self, tokens: Tokens, salt: str = "") -> tuple[int, list[Any]]:
        """The longest reusable prefix: (number of tokens, a cache of its own to go on with, or [] for none)."""
        path = self._walk(tokens, salt)
        reusable, node = self._usable(path)
        self.counts.queries += 1
        self.counts.query_tokens += len(tokens)
        if reusable == 0 or node is None:
            return 0, []
        self._touch(node)
        self.counts.hits += 1
        self.counts.hit_tokens += reusable
        spans: list[Span] = []
        for step, matched in path:
            if step.begin >= reusable:
                break
            spans.append(step.span if matched == len(step.tokens) else view_span(step.span, 0, matched))
        return reusable, assemble(self._layout, spans, node.state or [])

    def store(self, tokens: Tokens, caches: Sequence[Any], salt: str = "") -> None:
        """Keep what `caches` hold for `tokens`, all of which they have processed; known prefixes cost nothing."""
        if self._budget <= 0 or len(tokens) == 0:
            return
        node, depth = self._descend(tokens, salt)
        if depth < len(tokens):
            node = self._append(node, tokens, depth, caches)
        elif self._layout.needs_checkpoints and node.state is None:
            state = copy_state(caches)
            if self._room(node) >= _nbytes([], state):
                node.state = state
                self._account(node)
                mx.async_eval(arrays_of([], state))
        self._touch(node)
        self._evict()
        self._forget_empty(salt)

    def clear(self) -> None:
        self._roots.clear()
        self._recency.clear()
        self.nbytes = self.arrays = 0

    def check(self) -> None:
        """Raise AssertionError if the books are wrong. Looks at every node: for tests, and for when in doubt."""
        reached: list[Node] = []
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            for first, child in node.children.items():
                assert child.parent is node
                assert first == int(child.tokens[0])
                assert child.begin == node.end
                reached.append(child)
                stack.append(child)
        age = {node: at for at, node in enumerate(self._recency)}
        assert set(reached) == set(age)
        assert all(age[node.parent] > at for node, at in age.items() if node.parent in age), "a leaf is the oldest"
        assert self.nbytes == sum(node.nbytes for node in reached) <= self._budget
        assert self.arrays == sum(node.arrays for node in reached) <= self._max_arrays
        for node in reached:
            assert node.nbytes == _nbytes(node.span, node.state or []) + node.tokens.nbytes
        if self._layout.needs_checkpoints:
            assert all(node.state is not None or node.children for node in reached), "every edge leads somewhere"
        assert all(root.children for root in self._roots.values()), "an empty tree is forgotten"

    # -- the tree ----------------------------------------------------------------------------------------------------

    def _walk(self, tokens: Tokens, salt: str) -> list[tuple[Node, int]]:
        """The edges along `tokens`, each with how many of its tokens match; only the last may match in part."""
        path: list[tuple[Node, int]] = []
        node, depth = self._roots.get(salt), 0
        while node is not None and depth < len(tokens):
            child = node.children.get(int(tokens[depth]))
            if child is None:
                break
            matched = common_prefix(child.tokens, tokens[depth:])
            path.append((child, matched))
            depth += matched
            node = child if matched == len(child.tokens) else None
        return path

    def _usable(self, path: list[tuple[Node, int]]) -> tuple[int, Node | None]:
        """(tokens that can be reused, the node that ends them). The deepest node counts when only slices are needed."""
        for node, matched in reversed(path):
            if not self._layout.needs_checkpoints:
                return node.begin + matched, node
            if node.state is not None and matched == len(node.tokens):
                return node.end, node
        return 0, None

    def _descend(self, tokens: Tokens, salt: str) -> tuple[Node, int]:
        """The node where `tokens` leave the tree and how deep it is, splitting an edge if need be."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(_EMPTY, 0, [], None, None)
        path = self._walk(tokens, salt)
        if not path:
            return root, 0
        node, matched = path[-1]
        depth = node.begin + matched
        if matched == len(node.tokens):
            return node, depth
        if depth == len(tokens) and not self._layout.needs_checkpoints:
            return node, depth  # all of it is there already, inside a longer edge
        return self._split(node, matched), depth

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge in two; returns the upper half, which has no checkpoint."""
        assert node.parent is not None
        upper_span, lower_span = cut_span(node.span, at)
        upper = Node(node.tokens[:at].copy(), node.begin + at, upper_span, None, node.parent)
        node.parent.children[int(upper.tokens[0])] = upper
        node.tokens, node.span, node.parent = node.tokens[at:].copy(), lower_span, upper
        upper.children[int(node.tokens[0])] = node
        self._account(upper)
        self._account(node)
        # Newer than its descendants, wherever those are.
        self._recency[upper] = None
        mx.async_eval(arrays_of([*upper_span, *lower_span], []))
        return upper

    def _append(self, parent: Node, tokens: Tokens, depth: int, caches: Sequence[Any]) -> Node:
        """A new leaf for tokens[depth:], or for the part that fits the budget; `parent` if nothing does."""
        state = copy_state(caches) if self._layout.needs_checkpoints else None
        span = slice_span(caches, depth, len(tokens))
        room, size = self._room(parent), _nbytes(span, state or []) + tokens[depth:].nbytes
        if size > room:
            # Better a part of this prefix, or nothing of it, than everything else evicted and this as well.
            fitting = depth + room * (len(tokens) - depth) // size
            if state is not None or fitting - depth < MIN_TOKENS:
                return parent
            tokens = tokens[:fitting]
            span = slice_span(caches, depth, fitting)
        node = Node(tokens[depth:].copy(), len(tokens), span, state, parent)
        parent.children[int(node.tokens[0])] = node
        self._recency[node] = None
        self._account(node)
        mx.async_eval(arrays_of(span, state or []))
        return node

    def _room(self, node: Node) -> int:
        """Bytes left of the budget beside the path to `node`."""
        room = self._budget
        while node.parent is not None:
            room -= node.nbytes
            node = node.parent
        return room

    def _touch(self, node: Node) -> None:
        """Make a path the newest, leaf first, so that ancestors stay newer than their descendants."""
        while node.parent is not None:
            self._recency.move_to_end(node)
            node = node.parent

    def _evict(self) -> None:
        while self.nbytes > self._budget or self.arrays > self._max_arrays:
            self._remove(next(iter(self._recency)))
            self.counts.evictions += 1

    def _remove(self, node: Node) -> None:
        """Drop a leaf, and the inner nodes that served only it."""
        while True:
            parent = node.parent
            assert parent is not None
            assert not node.children
            del self._recency[node]
            self.nbytes -= node.nbytes
            self.arrays -= node.arrays
            del parent.children[int(node.tokens[0])]
            # Where checkpoints are needed, an edge without one is only a way to others.
            is_useless = self._layout.needs_checkpoints and parent.state is None and not parent.children
            if parent.parent is None or not is_useless:
                break
            node = parent
        if parent.parent is None and not parent.children:
            self._roots = {salt: root for salt, root in self._roots.items() if root is not parent}

    def _forget_empty(self, salt: str) -> None:
        root = self._roots.get(salt)
        if root is not None and not root.children:
            del self._roots[salt]

    def _account(self, node: Node) -> None:
        self.nbytes -= node.nbytes
        self.arrays -= node.arrays
        arrays = arrays_of(node.span, node.state or [])
        node.nbytes, node.arrays = sum(array.nbytes for array in arrays) + node.tokens.nbytes, len(arrays)
        self.nbytes += node.nbytes
        self.arrays += node.arrays


_EMPTY: Tokens = np.empty(0, dtype=np.int32)


def common_prefix(left: Tokens, right: Tokens) -> int:
    """Length of the common prefix."""
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    at = int(differs.argmax()) if size else 0
    return at if size and differs[at] else size


def _nbytes(span: Span, state: Sequence[Any]) -> int:
    return sum(array.nbytes for array in arrays_of(span, state))

"""Prefix cache: KV of earlier sequences, in memory and on disk.

Models with only sliceable layers reuse any number of tokens; others reuse up to the deepest checkpoint on the path.
Evicted KV can be read back if it was written to disk. Other threads do these reads, and a `Ticket` tracks them.

Cursor of a row in the prefix tree. Drafts are taken from the tokens that followed the same text in earlier
sequences.

Records of what a lookup in the prefix cache found, and of KV that the cache lost, to explain misses.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import mlx.core as mx

from protocol.stats import Stats
from worker.kv.spans_and_checkpoints import KvLayout, Span, arrays_of, assemble, part_span, slice_span, view_start
from worker.prefix_cache.disk import CacheDisk, DiskEntry, DiskRead
from worker.prefix_cache.kv_events import BlockEventLog
from worker.prefix_cache.radix_tree import EMPTY, Extent, Path, RadixNode, TokenCost, Tokens, Tree, new_state, salt_key


class PrefixCursor:
    """Position of a row in the prefix tree. The cursor reads only tokens, each in constant time. Owned by the engine
    thread.

    Edges may be split or evicted while the cursor holds a node, because the node keeps its tokens and its parent.
    """

    __slots__ = ("_at", "_node")

    def __init__(self, node: RadixNode, at: int) -> None:
        """`at` is the number of the row's tokens. The last of them is in `node`."""
        self._node = node
        self._at = at

    def advance(self, tokens: Sequence[int]) -> bool:
        """Move over these tokens of the row. Returns False if they are not in the tree."""
        for token in tokens:
            node = self._edge()
            if self._at == node.end:
                child = node.children.get(token)
                if child is None:
                    return False
                node = child
            elif node.tokens[self._at - node.begin] != token:
                return False
            self._node = node
            self._at += 1
        return True

    def next_tokens(self, most: int) -> list[int]:
        """Return at most `most` tokens that follow the row's position along the newest edges, up to a medium."""
        node, at, following = self._edge(), self._at, list[int]()
        while len(following) < most:
            if at == node.end:
                if not node.children:
                    break
                node = next(reversed(node.children.values()))
            tokens = node.tokens[at - node.begin :][: most - len(following)].tolist()
            medium = next((index for index, token in enumerate(tokens) if token < 0), None)
            if medium is not None:
                return following + tokens[:medium]
            following += tokens
            at += len(tokens)
        return following

    def _edge(self) -> RadixNode:
        """Return the edge of the row's last token, which may have been split off `_node`."""
        node = self._node
        while self._at <= node.begin and node.parent is not None:
            node = node.parent
        return node


# Maximum number of evictions that are remembered.
MAX_EVICTIONS: Final = 1024
# End of an eviction that has removed all KV.
EVERYTHING: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class Eviction:
    """Tokens [begin, end) of a path whose KV has left the memory `at` this time of the monotonic clock.

    `owner` is the rid of the request that used them last, 0 if all KV was freed. `by` is the rid of the request that
    needed the memory; 0 if the model's share of memory shrank, and the owner if its KV is larger than the cache.
    """

    at: float
    owner: int
    begin: int
    end: int
    by: int


@dataclass(frozen=True, slots=True)
class CacheLookup:
    """Result of a row's first lookup: `reused` tokens, of which `restored` came from disk, and the `known` tokens that
    are in the tree, with or without KV.

    `problem` is `disk` if a file was not read in time or was unusable, `scored` for a prompt that must be computed
    completely, else empty.
    """

    reused: int = 0
    restored: int = 0
    known: int = 0
    problem: str = ""


SCORED: Final = CacheLookup(problem="scored")


# Maximum number of arrays of prefixes and running rows together. Metal allows 499,000 buffers per process, and ends a
# process that allocates more; many small nodes would reach that long before any budget of bytes.
MAX_ARRAYS: Final = 200_000
# Minimum number of tokens of a file and of a read. A node whose tokens exceed the budget is cut to the tokens that fit,
# or left out if these are fewer than this minimum.
MIN_TOKENS: Final = 64
READ_TIMEOUT_S: Final = 30.0
CLOSE_TIMEOUT_S: Final = 5.0
# A node whose file is gone is removed when a walk meets it. Once this many files were lost, all such nodes are removed.
_PRUNE_INTERVAL_FILES: Final = 256

_Write = tuple[DiskEntry, Span, list[Any] | None]


class HeldSpan(NamedTuple):
    """Span of a node with its number of tokens, because the node may be split later, and the node's `is_longer`."""

    span: Span
    tokens: int
    is_longer: bool


@dataclass(frozen=True, slots=True)
class Ticket:
    """Pending reads from disk for one row, and the spans in memory that the row will also need."""

    reads: dict[DiskEntry, DiskRead]
    held: dict[RadixNode, HeldSpan]
    deadline: float

    @property
    def is_done(self) -> bool:
        return all(read.is_done for read in self.reads.values()) or time.monotonic() > self.deadline

    @property
    def has_failed(self) -> bool:
        """Whether a read is late, or its file was unusable."""
        return any(read.span is None for read in self.reads.values())


class PrefixCache:
    """Prefix cache, owned by the engine thread. Between calls its memory never exceeds its budgets."""

    def __init__(
        self,
        layout: KvLayout,
        budget: int,
        max_arrays: int = MAX_ARRAYS,
        disk: CacheDisk | None = None,
        disk_min_tokens: int = 0,
        journal: BlockEventLog | None = None,
    ) -> None:
        self._layout = layout
        self.budget = budget
        self._max_arrays = max_arrays
        # Number of arrays of a running row, and of all running rows.
        self.arrays_per_row = 0
        self._row_arrays = 0
        self._tree = Tree(layout, journal)
        self._journal = journal
        self.disk = disk
        self._disk_min_tokens = max(MIN_TOKENS, disk_min_tokens)
        # Writes that `persist` chose in this tick.
        self._chosen: list[_Write] = []
        # Writes that `persist` chose in the previous tick.
        self._due: list[_Write] = []
        self._lost = 0
        self.counts = Stats()
        # Result of the newest `fetch`, and the newest evictions, which other threads may copy.
        self.lookup = CacheLookup()
        self.evictions: deque[Eviction] = deque(maxlen=MAX_EVICTIONS)
        # Newest failure to store a row's KV.
        self.failure: Exception | None = None
        if disk is not None:
            ends: dict[str, RadixNode] = {}
            for entry in disk.start():
                ends[entry.key] = self._tree.place(entry, ends[entry.parent.key] if entry.parent else None)

    def __len__(self) -> int:
        return len(self._tree)

    @property
    def nbytes(self) -> int:
        return self._tree.nbytes

    @property
    def arrays(self) -> int:
        return self._tree.arrays

    @property
    def is_on(self) -> bool:
        return self.budget > 0

    @property
    def needs_checkpoints(self) -> bool:
        return self._layout.needs_checkpoints

    def longest(self, tokens: Tokens, salt: str = "", whole: Callable[[int], int] | None = None) -> int:
        """Return the number of leading tokens that can be reused from memory; `whole` has the same meaning as in
        `fetch`."""
        return self._cut(*self._usable(self._tree.walk(tokens, salt_key(salt))), whole)[0]

    def branch(self, tokens: Tokens, salt: str = "") -> PrefixCursor | None:
        """Return a cursor after these tokens if all of them are in the tree, else None."""
        path = self._tree.walk(tokens, salt_key(salt))
        if not path or path[-1][0].begin + path[-1][1] < len(tokens):
            return None
        return PrefixCursor(path[-1][0], len(tokens))

    def attach(self, tokens: Tokens, salt: str, ticket: Ticket, rid: int = 0) -> None:
        """Put the results of a prefix's reads into memory, as far as they fit."""
        self._attach(self._tree.walk(tokens, salt_key(salt)), ticket)
        self._evict(rid)

    def fetch(
        self,
        tokens: Tokens,
        salt: str = "",
        ticket: Ticket | None = None,
        whole: Callable[[int], int] | None = None,
        rid: int = 0,
    ) -> tuple[int, list[Any]]:
        """Return the longest reusable prefix: its number of tokens, and copied caches, [] if there is none.

        `whole` returns the last position, up to a given one, at which a prefix may end. `rid` is the request whose
        prefix it is.
        """
        path = self._tree.walk(tokens, salt_key(salt))
        in_memory, _ = self._usable(path)
        if ticket is not None:
            self._attach(path, ticket)
        reusable, node = self._cut(*self._usable(path), whole)
        self.counts.prefix_queries += 1
        self.counts.prefix_query_tokens += len(tokens)
        known = path[-1][0].begin + path[-1][1] if path else 0
        problem = "disk" if ticket is not None and ticket.has_failed else ""
        self.lookup = CacheLookup(reusable, max(0, reusable - in_memory), known, problem)
        if node is None:
            self._evict(rid)
            return 0, []
        self._tree.touch(node, rid)
        self.counts.prefix_hits += 1
        self.counts.prefix_hit_tokens += reusable
        self.counts.disk_hits += reusable > in_memory
        self.counts.disk_restored_tokens += reusable - in_memory
        spans: list[Span] = []
        for step, matched in path:
            if step.begin >= reusable:
                break
            assert step.span is not None
            matched = min(matched, reusable - step.begin)
            spans.append(step.span if matched == len(step.tokens) else view_start(step.span, matched))
        caches = assemble(self._layout, spans, node.state or [], reusable)
        self._evict(rid)
        return reusable, caches

    def store(self, tokens: Tokens, caches: Sequence[Any], salt: str = "", rid: int = 0) -> None:
        """Store the KV of `tokens` from `caches`, which have processed all of them; only new tokens are copied. `rid`
        is the request that has computed them."""
        if self.budget <= 0 or len(tokens) == 0:
            return
        node, depth = self._tree.descend(tokens, salt_key(salt))
        self._tree.fill(node, caches)
        if depth < len(tokens):
            node = self._append(node, tokens, depth, caches)
            if node.end < len(tokens):
                self.evictions.append(Eviction(time.monotonic(), rid, node.end, len(tokens), rid))
        elif self._layout.needs_checkpoints and node.state is None:
            self._add_state(node, caches)
        if node.state is not None:
            self._tree.cover(node, caches)
        self._tree.touch(node, rid)
        self._tree.drop_useless(node)
        self._evict(rid)

    def make_room_for(self, rows: int) -> None:
        """Leave room for the arrays of this number of running rows. Evicts the excess at once."""
        before, self._row_arrays = self._row_arrays, rows * self.arrays_per_row
        if self._row_arrays > before:
            self._evict()

    def resize(self, budget: int, token_cost: TokenCost | None = None) -> None:
        """Set the budget in bytes, and the nominal sizes in a group. Evicts the excess at once."""
        self.budget = budget
        self._tree.set_token_cost(token_cost)
        self._evict()

    def clear(self) -> None:
        """Free all memory; files stay known. It is also safe after a `store` or `fetch` that raised."""
        self.evictions.append(Eviction(time.monotonic(), 0, 0, EVERYTHING, 0))
        self._tree.clear()

    def fail(self, error: Exception) -> None:
        """Count a failure to store a row's KV, and free all memory, because a part of that KV may be in memory."""
        # A traceback would hold the KV in its frames.
        self.failure = error.with_traceback(None)
        self.counts.prefix_failures += 1
        self.clear()

    # -- disk --------------------------------------------------------------------------------------------------------

    def restore(self, tokens: Tokens, salt: str = "") -> Ticket | None:
        """Start to read the part of this prefix that is only on disk. Returns None if that part is too short."""
        if self.disk is None:
            return None
        path = self._tree.walk(tokens, salt_key(salt))
        reach, target = self._reach(path)
        if target is None or reach - self._usable(path)[0] < MIN_TOKENS:
            return None
        wanted: dict[DiskEntry, bool] = {}
        held: dict[RadixNode, HeldSpan] = {}
        for node, _ in path:
            if node.span is not None:
                held[node] = HeldSpan(node.span, len(node.tokens), node.is_longer)
            elif node.extent is not None:
                wanted.setdefault(node.extent.entry, False)
            if node is target:
                break
        if self._layout.needs_checkpoints and target.state is None and target.saved is not None:
            wanted[target.saved] = True
            # An edge that was computed as a part of a longer one has less KV of windows in memory than its file.
            for node in self._tree.lacking(target):
                if node.extent is not None and node.is_readable:
                    wanted.setdefault(node.extent.entry, False)
        reads = {entry: self.disk.read(entry, with_state=with_state) for entry, with_state in wanted.items()}
        return Ticket(reads, held, time.monotonic() + READ_TIMEOUT_S)

    def persist(self, tokens: Tokens, checkpoints: Collection[int], salt: str = "") -> None:
        """Choose the path of `tokens` for writing, parents first, with checkpoints at these positions; `hand_over`
        queues the writes."""
        if self.disk is None or len(tokens) < self._disk_min_tokens:
            return
        key = salt_key(salt)
        above: DiskEntry | None = None
        path = self._tree.walk(tokens, key)
        # The end of a path is not written before it has MIN_TOKENS new tokens, so that many short answers do not become
        # as many files.
        new = next((node.begin for node, _ in path if not node.is_on_disk), len(tokens))
        stop = len(tokens) if len(tokens) - new >= MIN_TOKENS else new
        for node, matched in path:
            if node.span is None or matched < len(node.tokens) or node.end > stop:
                break
            is_saved = node.saved is not None and node.saved.is_live and not node.is_longer
            state = node.state if node.end in checkpoints and not is_saved else None
            if node.extent is None or not node.extent.entry.is_live or node.is_longer:
                node.is_longer = False
                has_state = state is not None
                entry = self.disk.entry(above, key, node.begin, node.tokens, bool(node.span), has_state)
                node.extent = Extent(entry, 0, len(node.tokens))
                self._chosen.append((entry, node.span, state))
            elif state is not None:
                entry = self.disk.entry(node.extent.entry, key, node.end, EMPTY, False, True)
                self._chosen.append((entry, [], state))
            if state is not None:
                node.saved = self._chosen[-1][0]
            above = node.extent.entry

    def hand_over(self) -> None:
        """Queue the writes that `persist` chose a tick ago, whose arrays have been computed by now. Called once per
        tick.

        Raises errors of computing the arrays; writes that were not queued are then dropped.
        """
        if self.disk is None:
            return
        due, self._due, self._chosen = self._due, self._chosen, []
        handed_over = 0
        try:
            for entry, span, state in due:
                mx.eval(arrays_of(span, state or []))
                self.disk.write(entry, span, state)
                handed_over += 1
        finally:
            if handed_over < len(due):
                for entry, _, _ in (*due[handed_over:], *self._due):
                    self.disk.drop(entry)
                self._due = []
        if self.disk.lost - self._lost > _PRUNE_INTERVAL_FILES:
            self._lost = self.disk.lost
            self._tree.prune()

    def publish_events(self) -> None:
        """Publish the block events of this tick."""
        if self._journal is not None:
            self._journal.flush()

    def flush(self) -> None:
        """Queue all chosen writes, for the case that no tick follows."""
        self.hand_over()
        self.hand_over()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Finish writing within `timeout_s`."""
        self.flush()
        if self.disk is not None:
            self.disk.close(timeout_s)

    def _reach(self, path: Path) -> tuple[int, RadixNode | None]:
        """Return the number of reusable tokens and the node at their end, like `_usable`, but also count KV that is
        only on disk."""
        reach, target = 0, None
        for node, matched in path:
            if not node.is_held and not node.is_readable:
                break
            if not self._layout.needs_checkpoints:
                reach, target = node.begin + matched, node
            elif matched == len(node.tokens):
                has_state = node.state is not None or (node.saved is not None and node.saved.is_readable)
                reach, target = (node.end, node) if has_state else (reach, target)
        return reach, target

    def _attach(self, path: Path, ticket: Ticket) -> None:
        """Put the results of reads into the nodes of a path."""
        last: RadixNode | None = None
        for node, _ in path:
            if not node.is_held:
                held = ticket.held.get(node)
                is_whole = held is not None and held.tokens == len(node.tokens)
                span = held.span if held is not None and is_whole else _part_read(ticket, node)
                if span is None:
                    break
                self._tree.hold(node, span)
                node.is_longer = held is not None and is_whole and held.is_longer
            elif (span := _part_read(ticket, node)) is not None:
                self._tree.widen(node, span)
            last = node
            read = ticket.reads.get(node.saved) if node.saved is not None else None
            state = read.state if read is not None and read.is_done else None
            if node.state is None and state is not None and self._tree.covers(node):
                self._tree.set_state(node, state)
        if last is not None:
            self._tree.touch(last)
            self._tree.drop_useless(last)

    # -- memory ------------------------------------------------------------------------------------------------------

    def _usable(self, path: Path) -> tuple[int, RadixNode | None]:
        """Return the number of reusable tokens and the node at their end: the deepest node in memory, or the deepest
        checkpoint."""
        for node, matched in reversed(path):
            if not node.is_held:
                continue
            if not self._layout.needs_checkpoints:
                return node.begin + matched, node
            if node.state is not None and matched == len(node.tokens) and self._tree.covers(node):
                return node.end, node
        return 0, None

    def _cut(
        self, reusable: int, node: RadixNode | None, whole: Callable[[int], int] | None
    ) -> tuple[int, RadixNode | None]:
        """Cut the result of `_usable` back to a position where a prefix may end. With checkpoints, the result becomes 0
        instead, because checkpoints are only taken at such positions."""
        if whole is None or whole(reusable) == reusable:
            return reusable, node
        reusable = 0 if self._layout.needs_checkpoints else whole(reusable)
        return reusable, node if reusable else None

    def _append(self, parent: RadixNode, tokens: Tokens, depth: int, caches: Sequence[Any]) -> RadixNode:
        """Add a leaf for tokens[depth:], or for the part that fits the budget. Returns `parent` if nothing fits."""
        state = new_state(self._layout, caches)
        span = slice_span(caches, depth, len(tokens))
        room = self.budget - self._tree.path_bytes(parent)
        size = self._tree.span_bytes(len(tokens) - depth, span, state) + tokens[depth:].nbytes
        if size > room:
            # Tokens beyond the budget are left out: storing all tokens would evict everything else, and finally this
            # prefix, too.
            fitting = depth + room * (len(tokens) - depth) // size
            if state is not None or fitting - depth < MIN_TOKENS:
                return parent
            tokens = tokens[:fitting]
            span = slice_span(caches, depth, fitting)
        node = self._tree.append(parent, tokens[depth:])
        node.state = state
        self._tree.hold(node, span)
        mx.async_eval(arrays_of(span, state or []))
        return node

    def _add_state(self, node: RadixNode, caches: Sequence[Any]) -> None:
        state = new_state(self._layout, caches)
        if state is None or self._tree.path_bytes(node) + self._tree.span_bytes(0, [], state) > self.budget:
            return
        self._tree.set_state(node, state)
        mx.async_eval(arrays_of([], state))

    def _evict(self, by: int = 0) -> None:
        """Evict the oldest KV until the rest fits; `by` is the request that needs the memory."""
        while len(self) and (self.nbytes > self.budget or self.arrays + self._row_arrays > self._max_arrays):
            node = self._tree.oldest
            end, above = node.end, node.parent
            self._tree.release(node)
            while above is not None and above.parent is not None and not above.is_held:
                above = above.parent
            self.evictions.append(Eviction(time.monotonic(), node.rid, above.end if above else 0, end, by))
            self.counts.prefix_evictions += 1


def _part_read(ticket: Ticket, node: RadixNode) -> Span | None:
    """Return a node's span from the reads of a ticket; the node may have been split since then."""
    extent = node.extent
    read = ticket.reads.get(extent.entry) if extent is not None else None
    if extent is None or read is None or not read.is_done or read.span is None:
        return None
    size = len(extent.entry.tokens)
    if extent.begin == 0 and extent.end == size:
        return read.span
    part = part_span(read.span, size, extent.begin, extent.end)
    mx.async_eval(arrays_of(part, []))
    return part

"""Batch caches of KV whose rows can be rewound by different numbers of tokens.

mlx-lm's `BatchKVCache` is right-justified: all rows end at the same slot, so rewinding rows by different numbers of
tokens moves their KV, and attention needs a mask even without padding. Here each row begins at slot 0: a rewind is a
subtraction, and rows of equal length need no mask. A row also stays where it is in memory while others join and leave:
a row that joins is written after the last row, and the last row moves into the place of a row that leaves.

Batch cache of a sliding window whose rows can be rewound by different numbers of tokens.
"""

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import add
from typing import Any, Final, Self, cast

import mlx.core as mx
from mlx_lm.models.cache import BatchRotatingKVCache, KVCache, RotatingKVCache
from mlx_lm.models.cache import dynamic_roll as roll_rows


class RaggedWindowCache(BatchRotatingKVCache):
    """Batch form of mlx-lm's sliding window, with rewinds, and without a mask where none is needed.

    `held` has the total number of tokens of each row, including tokens that have left the window.
    """

    held: list[int]

    @classmethod
    def merge(cls, caches: Sequence[RotatingKVCache]) -> Self:
        merged = super().merge(caches)
        merged.held = [cache.offset for cache in caches]
        return merged

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.held = [length + keys.shape[2] for length in self.held]
        return cast(tuple[mx.array, mx.array], super().update_and_fetch(keys, values))

    def make_mask(
        self,
        N: int,  # noqa: N803 - the name in mlx-lm
        window_size: int | None = None,
        return_array: bool = False,
    ) -> mx.array | str | None:
        if not return_array and window_size in (None, self.max_size):
            if N == 1 and min(self.held) + 1 >= min(self._offset + 1, self.max_size):
                return None
            if N > 1 and min(self.held) == self._offset and self._offset + N <= self.max_size:
                return "causal"
        return cast(mx.array, super().make_mask(N, window_size, return_array))

    def begin(self, _lengths: Sequence[int], count: int) -> None:
        """Put the buffer in temporal order before a pass of several tokens.

        mlx-lm reorders the buffer when it stores the tokens, but makes their mask before: for a rotated buffer, that
        mask hides the oldest token.
        """
        if count > 1:
            self._temporal_order()

    def rewind(self, drop: tuple[int, ...]) -> None:
        """Remove the newest `drop[i]` tokens of row i, at most the tokens of the newest block.

        The buffer still has the window before the block, which becomes visible again.
        """
        if not any(drop):
            return
        size = self.keys.shape[2]
        common = min(drop) if size == self._offset else min(*drop, max(0, size - self.max_size))
        if common:
            self.keys, self.values = self.keys[..., : size - common, :], self.values[..., : size - common, :]
            self.offset = self.offset - common
            self._offset -= common
            self._idx -= common
        rest = [less - common for less in drop]
        if any(rest):
            roll = mx.array(rest)
            self.keys = roll_rows(self.keys, roll[:, None], axis=2)
            self.values = roll_rows(self.values, roll[:, None], axis=2)
            self.left_padding = self.left_padding + roll
            self.offset = self.offset - roll
        self.held = [length - less for length, less in zip(self.held, drop, strict=True)]

    def contents(self) -> tuple[mx.array, mx.array, mx.array]:
        """Return the same as `RaggedKVCache.contents`, with slots in the order of the buffer."""
        slots, end = mx.arange(self.keys.shape[2], dtype=mx.int32), self._idx
        if self.rotated:
            slots, end = (slots - end) % self.max_size, self.max_size
        held = mx.array(self.held)[:, None]
        positions = held - end + slots
        is_held = (slots < end) & (positions >= mx.maximum(held - self.max_size, 0))
        return self.keys, self.values, mx.where(is_held, positions, -1)

    def filter(self, batch_indices: Sequence[int]) -> None:
        super().filter(mx.array(list(batch_indices)))
        self.held = [self.held[row] for row in batch_indices]

    def extend(self, other: Self) -> None:
        super().extend(other)
        self.held = self.held + other.held

    def extract(self, idx: int) -> RotatingKVCache:
        """Return the same as mlx-lm's `extract`, but with views instead of copies."""
        if self.empty():
            return RotatingKVCache(self.max_size)
        views, end = [array[idx : idx + 1] for array in (self.keys, self.values)], self._idx
        if self.rotated:
            views, end = [mx.roll(view, -end, 2) for view in views], self.max_size
        begin = end - min(self.held[idx], self.max_size, end)
        keys, values = (view[:, :, begin:end] for view in views)
        state = (keys, values, self.held[idx], 0, self.max_size, int(keys.shape[2]))
        return RotatingKVCache.from_state(state)


# Caches grow in steps of this many tokens, as in mlx-lm.
STEP: Final = 256
# Metal compiles a kernel of ours again for an input of fewer elements than this.
PADDED_ROWS: Final = 8
# CUDA's attention is compiled for each width and number of slots; a compilation takes as long as several steps. So
# attention on CUDA sees all allocated slots, and widths are powers of two; elsewhere it sees only the slots in use.
sees_room = mx.cuda.is_available() and mx.default_device() == mx.gpu


def wide(count: int) -> int:
    """Return the width of a forward pass in which a row has up to `count` tokens."""
    return 1 << (count - 1).bit_length() if sees_room else count


class Lengths:
    """Lengths of a batch's rows in tokens, and the arrays that are derived from these lengths.

    All layers of a batch switch from one `Lengths` object to the next together, so that each array is made once for all
    layers. The next token of row i is at position `of[i] + skipped[i]`; `skipped` is empty if no row has a sparse
    prompt.
    """

    __slots__ = (
        "_begins", "_end", "_index", "_masks", "_next", "_offset", "_padded_begins", "_slots", "is_level", "longest",
        "of", "skipped",
    )  # fmt: skip

    def __init__(self, lengths: Sequence[int], skipped: Sequence[int] = ()) -> None:
        self.of = tuple(lengths)
        self.skipped = tuple(skipped) if any(skipped) else ()
        self.longest = max(self.of, default=0)
        self.is_level = min(self.of, default=0) == self.longest
        self._offset: mx.array | None = None
        self._begins: mx.array | None = None
        self._padded_begins: mx.array | None = None
        # Width of the pass that `begin` has prepared, and the end of the slots that the pass uses; None if `begin` had
        # nothing to prepare.
        self._end: tuple[int, int] | None = None
        self._slots: tuple[int, mx.array] | None = None
        self._index: tuple[mx.array, mx.array, mx.array] | None = None
        # Masks by the number of next tokens per row and the window.
        self._masks: dict[tuple[int, int | None], mx.array] = {}
        # The newest change of these lengths, and the lengths that resulted from it.
        self._next: tuple[object, Lengths] | None = None

    @property
    def offset(self) -> mx.array:
        """Position of each row's next token, `[rows]`."""
        if not self.skipped:
            return self.begins
        if self._offset is None:
            self._offset = mx.array(list(map(add, self.of, self.skipped)), dtype=mx.int32)
        return self._offset

    @property
    def begins(self) -> mx.array:
        """Slot of each row's next token, `[rows]`."""
        if self._begins is None:
            self._begins = mx.array(list(self.of), dtype=mx.int32)
        return self._begins

    @property
    def padded_begins(self) -> mx.array:
        """`begins`, then zeros up to `PADDED_ROWS`, for a kernel that Metal would compile again for a shorter input."""
        if self._padded_begins is None:
            missing = PADDED_ROWS - len(self.of)
            self._padded_begins = mx.array([*self.of, *[0] * missing], dtype=mx.int32) if missing > 0 else self.begins
        return self._padded_begins

    def begin(self, lengths: Sequence[int], count: int) -> None:
        """Prepare a pass of `count` tokens per row: row i has `lengths[i]` tokens, then padding. All padding beyond the
        end of the longest row shares one slot.
        """
        if self.is_level and not sees_room:
            return
        end = count, min(self.longest + count, 1 + max(map(add, self.of, lengths)))
        if self._end != end:
            self._end, self._slots, self._index, self._masks = end, None, None, {}

    def end(self, count: int) -> int:
        """Return the number of slots in use once each row has `count` more tokens."""
        return self._end[1] if self._end is not None and self._end[0] == count else self.longest + count

    def has_slots(self, count: int) -> bool:
        """Whether each padding token has its own slot."""
        return self.end(count) == self.longest + count

    def seen(self, count: int) -> int:
        """Return the number of slots that attention sees in a pass of `count` tokens per row."""
        return room(self.end(count)) if sees_room and (count > 1 or not self.is_level) else self.end(count)

    def slots(self, count: int) -> mx.array:
        """Return the slots of each row's next tokens, `[rows, 1, count, 1]`."""
        if self._slots is None or self._slots[0] != count:
            slots = self.begins[:, None] + mx.arange(count, dtype=mx.int32)
            if not self.has_slots(count):
                slots = mx.minimum(slots, self.end(count) - 1)
            self._slots = count, slots[:, None, :, None]
        return self._slots[1]

    def index(self, count: int, heads: int) -> tuple[mx.array, mx.array, mx.array]:
        """Return the index `[rows, heads, count]` of each row's next tokens in arrays `[rows, heads, slots, …]`."""
        slots = self.slots(count)[..., 0]
        if self._index is None or self._index[2].shape != slots.shape or self._index[1].size != heads:
            rows = mx.arange(len(self.of), dtype=mx.int32)[:, None, None]
            self._index = rows, mx.arange(heads, dtype=mx.int32)[None, :, None], slots
        return self._index

    def mask(self, count: int, window: int | None) -> mx.array:
        """Return the mask `[rows, 1, count, slots]` of the slots that each next token sees, its own included."""
        if (count, window) not in self._masks:
            own, slots = self.slots(count), mx.arange(self.seen(count), dtype=mx.int32)
            mask = slots <= own
            self._masks[count, window] = mask & (slots > own - window) if window else mask
        return self._masks[count, window]

    def window_of(self, mask: mx.array | str | None, count: int) -> int | None:
        """Return the window of a mask that `make_mask` returned, 0 if that mask has no window, or None for another
        mask."""
        if mask is None or isinstance(mask, str):
            is_ours = self.is_level and (mask == "causal" or (mask is None and count == 1))
            return 0 if is_ours else None
        ours = (window or 0 for (width, window), made in self._masks.items() if made is mask and width == count)
        return next(ours, None)

    def placed(self, skipped: tuple[int, ...]) -> "Lengths":
        """Return lengths with the same slots, but with the next tokens at other positions."""
        if self.skipped == skipped or not (self.skipped or any(skipped)):
            return self
        return self._derive(("skipped", *skipped), lambda: Lengths(self.of, skipped))

    def grown(self, count: int) -> "Lengths":
        return self._derive(count, lambda: Lengths([length + count for length in self.of], self.skipped))

    def shortened(self, drop: tuple[int, ...]) -> "Lengths":
        def shorten() -> Lengths:
            return Lengths([length - less for length, less in zip(self.of, drop, strict=True)], self.skipped)

        return self._derive(drop, shorten)

    def kept(self, rows: Sequence[int]) -> "Lengths":
        def keep() -> Lengths:
            return Lengths([self.of[row] for row in rows], [self.skipped[row] for row in rows] if self.skipped else ())

        return self._derive(("rows", *rows), keep)

    def joined(self, other: "Lengths") -> "Lengths":
        skipped = (*self._all_skipped(), *other._all_skipped())
        return self._derive(("join", other.of, other.skipped), lambda: Lengths([*self.of, *other.of], skipped))

    def _all_skipped(self) -> tuple[int, ...]:
        return self.skipped or (0,) * len(self.of)

    def _derive(self, change: object, make: Callable[[], "Lengths"]) -> "Lengths":
        if self._next is None or self._next[0] != change:
            self._next = change, make()
        return self._next[1]


class RaggedKVCache:
    """KV of several rows; each row begins at slot 0. The layers of a batch share one `lengths` object as long as the
    layers' rows change in the same way.

    `arrays` are keys and values, `[allocated rows, heads, slots, dim]`, or their quantized form; the tuple is empty
    before the first tokens. The first allocated rows are those in `lengths`; the others are free for rows that join.
    """

    def __init__(self, lengths: Lengths) -> None:
        self.arrays: tuple[mx.array, ...] = ()
        self.lengths = lengths
        # Number of slots that the newest pass saw, the lengths before that pass, and a weak reference to the keys that
        # it got.
        self._seen = 0
        self._before = lengths
        self._given: Callable[[], mx.array | None] = lambda: None

    @classmethod
    def merge(cls, caches: Sequence[Any], lengths: Lengths) -> Self:
        """Merge caches of one sequence each into a batch; `lengths` are the lengths of those sequences."""
        merged = cls(lengths)
        merged._fill([(cache.keys, cache.values) if cache.offset else () for cache in caches])
        return merged

    @property
    def offset(self) -> mx.array:
        return self.lengths.offset

    @property
    def keys(self) -> mx.array | None:
        """The first of the arrays. Models that run on several machines replace this array by one that depends on their
        communication."""
        return self.arrays[0] if self.arrays else None

    @keys.setter
    def keys(self, array: mx.array) -> None:
        self.arrays = (array, *self.arrays[1:])

    @property
    def values(self) -> mx.array | None:
        return self.arrays[len(self.arrays) // 2] if self.arrays else None

    @values.setter
    def values(self, array: mx.array) -> None:
        half = len(self.arrays) // 2
        self.arrays = (*self.arrays[:half], array, *self.arrays[half + 1 :])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        before, count = self.lengths, keys.shape[2]
        end = before.end(count)
        entries = self._entries(keys, values)
        arrays = self._grown(end, entries)
        if before.is_level and before.has_slots(count):
            for array, new in zip(arrays, entries, strict=True):
                array[: len(before.of), :, before.longest : end] = new
        elif count:
            index = before.index(count, keys.shape[1])
            for array, new in zip(arrays, entries, strict=True):
                array[index] = new
        self.arrays, self.lengths = arrays, before.grown(count)
        self._seen, self._before = before.seen(count), before
        keys, values = self.keys_and_values()
        # The reference is weak, because a live view would prevent the next pass from writing in place.
        self._given = weakref.ref(keys[0] if isinstance(keys, tuple) else keys)
        return keys, values

    def before(self, keys: Any) -> Lengths | None:
        """Return the lengths before the newest pass if that pass got these keys; None for other keys."""
        given = self._given()
        is_given = given is not None and given is (keys[0] if isinstance(keys, tuple) else keys)
        return self._before if is_given else None

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return the keys and values that the newest pass saw. Models whose layers share KV call this."""
        keys, values = (array[: len(self.lengths.of), :, : self._seen] for array in self.arrays)
        return keys, values

    def make_mask(
        self,
        N: int,  # noqa: N803 - the name in mlx-lm
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | str | None:
        """Return the mask of the next N tokens: None if each row sees all of its slots, `causal` if that suffices."""
        lengths = self.lengths
        window = window_size if window_size and lengths.longest + N > window_size else None
        if lengths.is_level and window is None:
            if N == 1:
                return None
            if not return_array and lengths.seen(N) == lengths.longest + N:
                return "causal"
        return lengths.mask(N, window)

    def place(self, skipped: tuple[int, ...]) -> None:
        """Put the next token of row i `skipped[i]` positions ahead of its slot, for a sparse prompt."""
        self.lengths = self.lengths.placed(skipped)

    def begin(self, lengths: Sequence[int], count: int) -> None:
        """Prepare a pass of `count` tokens per row: row i has `lengths[i]` tokens, then padding."""
        self.lengths.begin(lengths, count)

    def rewind(self, drop: tuple[int, ...]) -> None:
        """Remove the newest `drop[i]` tokens of row i."""
        self.lengths = self.lengths.shortened(drop)

    def moves(self, rows: Sequence[int]) -> dict[int, tuple[mx.array, ...]] | None:
        """Return copies of the rows that `filter` must move, by their new places. Return None if `filter` must copy all
        rows: to halve the arrays, or because a row would leave a place that stays in use."""
        moved = {to: row for to, row in enumerate(rows) if to != row}
        if any(row < len(rows) for row in moved.values()):
            return None
        if self.arrays:
            allocated, _, slots, _ = self.arrays[0].shape
            if 2 * len(rows) <= allocated or 2 * room(self.lengths.kept(rows).longest) <= slots:
                return None
        return {to: self._copies([row], self.lengths.of[row]) for to, row in moved.items()}

    def filter(self, rows: Sequence[int], moves: Mapping[int, tuple[mx.array, ...]] | None) -> None:
        """Keep only these rows, in this order. `moves` is the result of the method `moves` for these rows."""
        self.lengths = self.lengths.kept(rows)
        if moves is None:
            self.arrays = self._copies(rows, self.lengths.longest)
        else:
            for to, moved in moves.items():
                self._write(to, moved)

    def extend(self, other: Self) -> None:
        """Append the rows of another cache."""
        mine, both = len(self.lengths.of), self.lengths.joined(other.lengths)
        like = self.arrays or other.arrays
        if like:
            self.arrays = self._allocated(len(both.of), both.longest, like)
        if other.arrays:
            used = slice(0, len(other.lengths.of)), slice(None), slice(0, other.lengths.longest)
            self._write(mine, [array[used] for array in other.arrays])
        self.lengths = both

    def take(self, rows: Sequence[int]) -> Self:
        """Return a new cache with copies of these rows."""
        taken = copy.copy(self)
        taken.lengths = self.lengths.kept(rows)
        taken.arrays = self._copies(rows, taken.lengths.longest)
        return taken

    def compact(self) -> None:
        """Free the memory of rows and slots that are not in use."""
        rows, slots = len(self.lengths.of), room(self.lengths.longest)
        if self.arrays and (rows, slots) != (self.arrays[0].shape[0], self.arrays[0].shape[2]):
            self.arrays = self._copies(range(rows), self.lengths.longest)

    def extract(self, row: int) -> Any:
        """Return a row as a cache of one sequence, whose arrays are views of this cache's arrays."""
        if not self.arrays:
            return KVCache()
        return KVCache.from_state((*self._views(row), self.lengths.of[row]))

    def size(self) -> int:
        return self.lengths.longest

    def empty(self) -> bool:
        return not self.arrays

    def is_trimmable(self) -> bool:
        """Return False: mlx-lm's `trim` of all rows is not supported; see `rewind`."""
        return False

    @property
    def state(self) -> tuple[mx.array, ...]:
        return self.arrays

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def contents(self) -> tuple[mx.array, mx.array, mx.array | None]:
        """Return keys and values of all rows, and the position of the token in each slot, `[rows, slots]`. The position
        is -1 for an empty slot; if no slot is empty, None replaces the array."""
        end = self.lengths.longest
        keys, values = (array[: len(self.lengths.of), :, :end] for array in self.arrays)
        if self.lengths.is_level:
            return keys, values, None
        slots = mx.arange(end, dtype=mx.int32)
        return keys, values, mx.where(slots < mx.array(list(self.lengths.of))[:, None], slots, -1)

    def _entries(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        """Return the KV of new tokens in the form of `arrays`."""
        return keys, values

    def _fill(self, rows: Sequence[tuple[mx.array, ...]]) -> None:
        """Set the arrays from each row's own arrays; a row without tokens has none."""
        like, lengths = next((arrays for arrays in rows if arrays), ()), self.lengths.of
        self.arrays = tuple(
            _stacked(
                [arrays[at][..., :length, :] if arrays else None for arrays, length in zip(rows, lengths, strict=True)],
                self.lengths.longest,
                each,
            )
            for at, each in enumerate(like)
        )

    def _views(self, row: int) -> list[mx.array]:
        end = self.lengths.of[row]
        return [array[row : row + 1, :, :end] for array in self.arrays]

    def _copies(self, rows: Sequence[int], tokens: int) -> tuple[mx.array, ...]:
        """Return new arrays of these rows with room for `tokens` tokens."""
        return tuple(_stacked([array[row : row + 1] for row in rows], tokens, array) for array in self.arrays)

    def _write(self, row: int, parts: Sequence[mx.array]) -> None:
        """Write KV `[rows, heads, slots, dim]` over the rows from `row` on, from slot 0 on."""
        for array, part in zip(self.arrays, parts, strict=True):
            array[row : row + part.shape[0], :, : part.shape[2]] = part

    def _grown(self, end: int, like: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
        """Return the arrays, grown to at least `end` slots."""
        return self._allocated(like[0].shape[0], end, like)

    def _allocated(self, rows: int, slots: int, like: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
        """Return arrays with room for this many rows and slots: the current arrays if they are large enough, otherwise
        larger copies."""
        if self.arrays and rows <= self.arrays[0].shape[0] and slots <= self.arrays[0].shape[2]:
            return self.arrays
        used = len(self.lengths.of) if self.arrays else 0
        added = [None] * (rows - used)
        parts = [[array[:used]] for array in self.arrays] or [[] for _ in like]
        return tuple(
            _stacked([*held, *added], max(slots, self.lengths.longest), each)
            for held, each in zip(parts, like, strict=True)
        )


def room(tokens: int, least: int = STEP) -> int:
    """Return the number of slots for `tokens` tokens, rounded up to a multiple of `least`.

    On CUDA, the step of rounding is at least an eighth of `tokens`, so that few sizes are ever compiled.
    """
    step = max(least, 1 << max(0, (tokens - 1).bit_length() - 3)) if sees_room else least
    return -(-tokens // step) * step


def _stacked(parts: Sequence[mx.array | None], tokens: int, like: mx.array) -> mx.array:
    """Return a new array of the rows of these parts, with room for `tokens` tokens. None is a row without tokens.
    Other sizes, and the dtype, are those of `like`."""
    rows = sum(1 if part is None else part.shape[0] for part in parts)
    array, row = mx.zeros((rows, like.shape[1], room(tokens), like.shape[3]), like.dtype), 0
    for part in parts:
        if part is None:
            row += 1
            continue
        part = part[:, :, : array.shape[2]]
        if part.shape == array.shape:  # MLX's assignment would keep the part's whole buffer
            return mx.contiguous(part)
        array[row : row + part.shape[0], :, : part.shape[2]] = part
        row += part.shape[0]
    return array

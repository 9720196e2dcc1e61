"""Adapters of one loaded model, by name: loaded and unloaded while rows run.

Linear layers with adapters: each row of a forward pass gets the update of its own adapter, or none.

An adapter has a slot, the same in all layers; slot 0 is the base model. For each adapted layer, the matrices of all
slots are one array, with zeros where a slot changes nothing. One multiplication can then serve rows of different
adapters. `Slots` holds the slot of each row, and is set around each forward pass.

Linear layer whose rows add their own adapters.

Conversion of an adapter's tensors to the matrices of its updates, in the dtype of the model.
"""

import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from protocol.failures import Code, Failure
from protocol.from_worker import AdapterInfo
from protocol.spec import ADAPTERS_MAX
from worker.errors import LoadFailed, RequestInvalid, is_allocation_failure
from worker.kv import batched
from worker.kv.quantized import make_caches
from worker.model.batch_mode import BatchMode
from worker.model.linears import LinearPlace, Linears
from worker.model.loader import resolve
from worker.model.lora.adapter_files import Files, StoredTensor, UnusableAdapter, Update, read
from worker.model.packing import PackingTurn, Shape, packing_of, split
from worker.model.rank_split import agreement_of
from worker.prefix_cache.radix_tree import adapter_salt

log = logging.getLogger("mlxd.worker")

BASE: Final = 0


class SlotChoice:
    """Adapter slots of the rows in one part of a packed pass. At least one row has an adapter."""

    __slots__ = ("_arrays", "_slots", "rows", "single", "used")

    def __init__(self, slots: Sequence[int]) -> None:
        self.rows = len(slots)
        self.used = frozenset(slots) - {BASE}
        # Slot of all rows if they have the same slot, otherwise None.
        self.single = slots[0] if len(set(slots)) == 1 else None
        self._slots = slots
        self._arrays: dict[int, mx.array] = {}

    def within(self, count: int) -> mx.array:
        """Return the slots `[rows]`, with slots from `count` on replaced by the base's: MLX checks no bounds."""
        array = self._arrays.get(count)
        if array is None:
            within = [slot if slot < count else BASE for slot in self._slots]
            array = self._arrays[count] = mx.array(within, dtype=mx.uint32)
        return array


@dataclass(frozen=True, slots=True, eq=False)
class Matrices:
    """Update of one layer by one adapter: `a` `[inputs, rank]`, and `b` `[rank, outputs]`, which includes the scale.

    With DoRA, the layer's own output is multiplied by `gain` `[outputs]`, which `b` already includes.
    """

    a: mx.array
    b: mx.array
    gain: mx.array | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[1]

    @property
    def arrays(self) -> list[mx.array]:
        return [self.a, self.b, *([self.gain] if self.gain is not None else [])]


class Slots:
    """Adapter slot of each row in the forward pass whose graph is being built. Owned by the engine thread."""

    def __init__(self, turn: PackingTurn | None) -> None:
        self.turn = turn or PackingTurn()
        # Only Metal gathers during the multiplication; on a CPU or CUDA each row gets a copy of its matrix.
        self.gathers = mx.metal.is_available()
        # Adapter slots of each part of the packed pass; None if all rows use the base model.
        self.choices: Sequence[SlotChoice | None] | None = None
        self.shapes: Sequence[Shape] = ()

    @contextmanager
    def rows(self, slots: Sequence[Sequence[int]], shapes: Sequence[Shape]) -> Generator[None]:
        """Set the adapter slots of each part's rows during a pass."""
        choices = [SlotChoice(part) if any(part) else None for part in slots]
        if any(choice is not None for choice in choices):
            self.choices, self.shapes = choices, shapes
        try:
            yield
        finally:
            self.choices = None


@dataclass(frozen=True, slots=True, eq=False)
class StackedWeights:
    """Updates of one layer by slot, and evaluated arrays of all slots.

    Their shapes are `[slots, inputs, rank]`, `[slots, rank, outputs]` and, if some have a gain, `[slots, outputs]`.
    """

    updates: dict[int, Matrices]
    a: mx.array
    b: mx.array
    gain: mx.array | None

    @classmethod
    def of(cls, updates: dict[int, Matrices]) -> "StackedWeights":
        """Stack at least one update. The updates become views of the stacked arrays, so nothing is stored twice."""
        first = next(iter(updates.values()))
        rank = max(each.rank for each in updates.values())
        every = [updates.get(slot) for slot in range(max(updates) + 1)]
        shapes = (first.a.shape[0], rank), (rank, first.b.shape[1])
        a = mx.stack([_padded(None if each is None else each.a, shapes[0], first.a.dtype) for each in every])
        b = mx.stack([_padded(None if each is None else each.b, shapes[1], first.b.dtype) for each in every])
        gain = None
        if any(each.gain is not None for each in updates.values()):
            ones = mx.ones((first.b.shape[1],), dtype=first.b.dtype)
            gain = mx.stack([ones if each is None or each.gain is None else each.gain for each in every])
        own = {
            slot: Matrices(
                a[slot, :, : each.rank], b[slot, : each.rank], None if gain is None or each.gain is None else gain[slot]
            )
            for slot, each in updates.items()
        }
        mx.eval(a, b, *([gain] if gain is not None else []), [array for each in own.values() for array in each.arrays])
        return cls(own, a, b, gain)

    @property
    def slots(self) -> int:
        return self.a.shape[0]

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes + (self.gain.nbytes if self.gain is not None else 0)

    def changed(self, slot: int, matrices: Matrices | None) -> "StackedWeights | None":
        """Return a copy with another update, or no update, in a slot; None if no update is left."""
        updates = {at: each for at, each in self.updates.items() if at != slot}
        if matrices is not None:
            updates[slot] = matrices
        return StackedWeights.of(updates) if updates else None


def _padded(matrix: mx.array | None, shape: tuple[int, int], dtype: Any) -> mx.array:
    """Pad a matrix of a smaller rank with zeros to `shape`; None becomes zeros."""
    if matrix is None:
        return mx.zeros(shape, dtype=dtype)
    return mx.pad(matrix, [(0, want - have) for want, have in zip(shape, matrix.shape, strict=True)])


class AdaptedLinear(nn.Module):
    """Linear layer with the updates of adapters.

    The wrapped layer is only reachable by calls: code that reads the weights directly would ignore the adapter.
    """

    def __init__(self, linear: Any, place: LinearPlace, slots: Slots, stacked: StackedWeights) -> None:
        super().__init__()
        self.linear = linear
        self._place = place
        self._slots = slots
        # StackedWeights is not a module, so its arrays are not parameters of the model.
        self.stacked = stacked

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.linear(x)
        choices = self._slots.choices
        return y if choices is None else self._updated(x, y, choices)

    def _updated(self, x: mx.array, y: mx.array, choices: Sequence[SlotChoice | None]) -> mx.array:
        turn = self._slots.turn.at
        if len(choices) == 1 or self._place.is_head or turn is not None:
            # The head only gets tokens of the first part of the pass, so the first choice applies.
            return self._add(x, y, choices[0 if self._place.is_head else turn or 0])
        shapes = self._slots.shapes
        flat_x, flat_y = x.reshape(1, -1, x.shape[-1]), y.reshape(1, -1, y.shape[-1])
        if flat_x.shape[1] != sum(rows * width for rows, width in shapes):
            raise ValueError(f"{self._place.path} is given other tokens than those of the pass")
        parts = zip(split(flat_x, shapes), split(flat_y, shapes), choices, strict=True)
        added = [self._add(own_x, own_y, choice).reshape(1, -1, y.shape[-1]) for own_x, own_y, choice in parts]
        return mx.concatenate(added, axis=1).reshape(y.shape)

    def _add(self, x: mx.array, y: mx.array, choice: SlotChoice | None) -> mx.array:
        """Add to `y` the updates for a part's rows, whose tokens are consecutive in `x`."""
        stacked = self.stacked
        if choice is None or choice.used.isdisjoint(stacked.updates):
            return y
        if choice.single is not None:
            own = stacked.updates[choice.single]
            return self._scaled(y, own.gain) + ((x @ own.a) @ own.b).astype(y.dtype)
        slots = choice.within(stacked.slots)
        rows, by_row = x.reshape(choice.rows, -1, x.shape[-1]), y.reshape(choice.rows, -1, y.shape[-1])
        if self._slots.gathers:
            z = mx.gather_mm(mx.gather_mm(rows, stacked.a, rhs_indices=slots), stacked.b, rhs_indices=slots)
        else:
            z = (rows @ stacked.a[slots]) @ stacked.b[slots]
        gain = None if stacked.gain is None else stacked.gain[slots][:, None]
        return (self._scaled(by_row, gain) + z.astype(y.dtype)).reshape(y.shape)

    def _scaled(self, y: mx.array, gain: mx.array | None) -> mx.array:
        """Scale the layer's own output. A gain of 1 leaves it bit-identical."""
        if gain is None:
            return y
        return y * gain + self.linear.bias * (1 - gain) if "bias" in self.linear else y * gain


_TYPES: Final[dict[str, Any]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def matrices(update: Update, data: bytes, linear: Any, dtype: Any) -> Matrices:
    """Return the evaluated update of a layer whose output has `dtype`. Raises `UnusableAdapter` if it is not finite."""
    a, b = _array(update.a, data), _array(update.b, data)
    if update.is_transposed:
        a, b = a.T, b.T
    b = b * update.scale
    gain: mx.array | None = None
    if update.magnitude is not None:
        adapted = _weight(linear) + b.T @ a.T
        gain = _array(update.magnitude, data) / mx.linalg.norm(adapted, axis=1)
        b = b * gain
    result = Matrices(
        mx.contiguous(a.astype(dtype)), mx.contiguous(b.astype(dtype)), None if gain is None else gain.astype(dtype)
    )
    if not all(bool(mx.all(mx.isfinite(array)).item()) for array in result.arrays):
        name = str(dtype).rpartition(".")[2]
        raise UnusableAdapter(f"{update.place.path}: its numbers are not finite in the model's arithmetic ({name})")
    return result


def dtype_of(model: Any, linear: Any) -> Any:
    """Return the dtype of a layer's output; a model's activations have the dtype of its norms."""
    own = (linear.get(name) for name in ("bias", "biases", "scales", "weight"))
    floating = (array.dtype for array in own if array is not None and mx.issubdtype(array.dtype, mx.floating))
    norms = (module for module in model.modules() if isinstance(module, nn.RMSNorm | nn.LayerNorm))
    return next(floating, None) or next((norm.weight.dtype for norm in norms if "weight" in norm), mx.float32)


def _array(tensor: StoredTensor, data: bytes) -> mx.array:
    """Return a tensor in float32."""
    kind = np.dtype(_TYPES[tensor.dtype])
    count = (tensor.end - tensor.begin) // kind.itemsize
    numbers = np.frombuffer(data, dtype=kind, count=count, offset=tensor.begin).reshape(tensor.shape)
    array = mx.array(numbers)
    return (array.view(mx.bfloat16) if tensor.dtype == "BF16" else array).astype(mx.float32)


def _weight(linear: Any) -> mx.array:
    """Return the weight `[outputs, inputs]` in float32."""
    weight: mx.array = linear.weight
    if isinstance(linear, nn.QuantizedLinear):
        weight = mx.dequantize(
            weight,
            linear.scales,
            linear.get("biases"),
            group_size=linear.group_size,
            bits=linear.bits,
            mode=linear.mode,
        )
    return weight.astype(mx.float32)


# Token ids of the trial run of an adapter.
_TRIAL_TOKENS: Final = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """Loaded adapter. `salt` separates the KV of its rows from that of the base and of other adapters."""

    slot: int
    info: AdapterInfo

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def salt(self) -> str:
        return adapter_salt(self.info.digest)


class Adapters:
    """Registry of a model's adapters. Owned by the engine thread; any thread may call `find`."""

    def __init__(self, model: Any, linears: Linears, mode: BatchMode) -> None:
        self._model = model
        self._linears = linears
        self._mode = mode
        packing = packing_of(model)
        self.slots = Slots(packing.turn if packing is not None else None)
        self._layers: dict[str, tuple[LinearPlace, AdaptedLinear]] = {}
        self._by_name: dict[str, Adapter] = {}
        # Adapters that take no new requests, and are unloaded when no row uses them.
        self._retiring: list[Adapter] = []
        # Requested adapters that cannot be served.
        self._failures: dict[str, AdapterInfo] = {}

    @property
    def is_on(self) -> bool:
        """Whether any row may have an adapter."""
        return bool(self._layers)

    @property
    def nbytes(self) -> int:
        return sum(layer.stacked.nbytes for _, layer in self._layers.values())

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        """State of each requested adapter, served or failed."""
        return (*(adapter.info for adapter in list(self._by_name.values())), *list(self._failures.values()))

    def find(self, name: str) -> Adapter:
        """Return the adapter of a request. Raises `RequestInvalid`."""
        adapter = self._by_name.get(name)
        if adapter is None:
            info = self._failures.get(name)
            reason = info.failure.message if info and info.failure else f"the adapter {name!r} is not loaded"
            raise RequestInvalid(Code.MODEL_MISSING, reason, param="model")
        return adapter

    def has(self, name: str) -> bool:
        return name in self._by_name

    def holds(self, adapter: Adapter) -> bool:
        """Whether new rows may use this adapter."""
        return self._by_name.get(adapter.name) is adapter

    def read(self, name: str, path: str) -> Files | Failure:
        """Read and check an adapter in a folder, or a repository in the local cache. Returns a failure if the adapter
        cannot be served.

        May be called from any thread.
        """
        if agreement_of(self._model) is not None:
            return refused(name, "a model that several processes run has no adapters")
        try:
            return read(resolve(path), self._linears)
        except UnusableAdapter as reason:
            return refused(name, str(reason))
        except LoadFailed as error:
            return refused(name, error.failure.message)
        except Exception as error:  # files that others wrote may cause any error
            log.exception("the adapter %s could not be read", name)
            return refused(name, f"its files could not be read: {type(error).__name__}")

    def missing(self, wanted: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return the wanted adapters that are not loaded from their path. May be called from any thread."""
        have = {(each.name, each.info.path) for each in list(self._by_name.values())}
        return [each for each in wanted if each not in have]

    def change(self, wanted: Sequence[tuple[str, str]], read: Mapping[tuple[str, str], Files | Failure]) -> None:
        """Replace the set of adapters; `read` has the files of new adapters, or their failures."""
        for info in self.infos:
            if info.failure is not None or (info.name, info.path) not in wanted:
                self.retire(info.name)
        for name, path in self.missing(wanted):
            if (files := read.get((name, path))) is not None:
                self.install(name, path, files)

    def fail(self, name: str, path: str, failure: Failure) -> None:
        """Record that an adapter cannot be served, and retire it if it is loaded."""
        log.error("%s", failure.message)
        self.retire(name)
        self._failures[name] = AdapterInfo(name, path, failure=failure)

    def install(self, name: str, path: str, files: Files | Failure) -> None:
        """Load an adapter from files that were read, and register its name. If it cannot be served, record its
        failure."""
        result = files if isinstance(files, Failure) else self._tried(name, path, files)
        if isinstance(result, Failure):
            self.fail(name, path, result)
            return
        log.info("adapter %s: rank %d, %d bytes, %s", name, result.info.rank, result.info.nbytes, path)
        self._by_name[name] = result

    def _tried(self, name: str, path: str, files: Files) -> Adapter | Failure:
        try:
            return self._install(name, path, files)
        except UnusableAdapter as reason:
            return refused(name, str(reason))
        except (MemoryError, RuntimeError) as error:  # MLX raises RuntimeError if it cannot allocate
            if not is_allocation_failure(error):
                raise
            return Failure(Code.OUT_OF_MEMORY, f"there is no memory for the adapter {name!r}", repr(error))

    def retire(self, name: str) -> None:
        """Accept no more requests for an adapter, and forget its failure if it failed."""
        self._failures.pop(name, None)
        if (adapter := self._by_name.pop(name, None)) is not None:
            self._retiring.append(adapter)

    @property
    def is_retiring(self) -> bool:
        return bool(self._retiring)

    def sweep(self, used: Callable[[], set[int]]) -> bool:
        """Unload retired adapters whose slots no row uses; return whether any adapter was unloaded."""
        if not self._retiring:
            return False
        in_use = used()
        free = [adapter for adapter in self._retiring if adapter.slot not in in_use]
        self._retiring = [adapter for adapter in self._retiring if adapter.slot in in_use]
        for adapter in free:
            self._empty(adapter.slot)
        return bool(free)

    def _install(self, name: str, path: str, files: Files) -> Adapter:
        taken = {adapter.slot for adapter in (*self._by_name.values(), *self._retiring)}
        if len(taken) >= ADAPTERS_MAX:
            raise UnusableAdapter(f"{ADAPTERS_MAX} adapters are loaded already, the most that there may be")
        slot = next(slot for slot in range(1, ADAPTERS_MAX + 1) if slot not in taken)
        added = [(update.place, self._stacked(files, at, slot)) for at, update in enumerate(files.updates)]
        before = self.nbytes
        for place, stacked in added:
            self._put(place, stacked)
        with ExitStack() as undo:
            undo.callback(self._empty, slot)
            self._try(slot)
            undo.pop_all()
        nbytes = self.nbytes - before
        return Adapter(slot, AdapterInfo(name, path, files.rank, files.is_dora, nbytes, files.digest, files.base))

    def _stacked(self, files: Files, at: int, slot: int) -> StackedWeights:
        """Return the stacked weights of an updated layer, to which the new slot is added."""
        update = files.updates[at]
        _, adapted = self._layers.get(update.place.path, (None, None))
        linear = adapted.linear if adapted is not None else update.place.holder[update.place.key]
        own = matrices(update, files.data, linear, dtype_of(self._model, linear))
        stacked = adapted.stacked.changed(slot, own) if adapted is not None else StackedWeights.of({slot: own})
        assert stacked is not None
        return stacked

    def _put(self, place: LinearPlace, stacked: StackedWeights | None) -> None:
        """Replace the updates of a layer; without updates, restore the original layer."""
        known = self._layers.get(place.path)
        if known is not None and stacked is not None:
            known[1].stacked = stacked
        elif known is not None:
            place.holder[place.key] = known[1].linear
            del self._layers[place.path]
        elif stacked is not None:
            layer = AdaptedLinear(place.holder[place.key], place, self.slots, stacked)
            place.holder[place.key] = layer
            self._layers[place.path] = place, layer

    def _empty(self, slot: int) -> None:
        for place, layer in list(self._layers.values()):
            if slot in layer.stacked.updates:
                self._put(place, layer.stacked.changed(slot, None))

    def _try(self, slot: int) -> None:
        """Run a row with the adapter, together with a base row if the batch mode allows that. The base row must not
        change."""
        rows = [slot] if self._mode is BatchMode.SINGLE else [BASE, slot]
        try:
            base, adapted = self._logits([BASE] * len(rows)), self._logits(rows)
        except ValueError as error:
            raise UnusableAdapter(f"the model cannot be run with it: {error}") from error
        if not bool(mx.all(mx.isfinite(adapted)).item()):
            raise UnusableAdapter("with it the model's logits are not finite")
        if len(rows) > 1 and not bool(mx.array_equal(base[0], adapted[0]).item()):
            raise UnusableAdapter("beside it, rows of the base change")

    def _logits(self, slots: Sequence[int]) -> mx.array:
        tokens, caches = mx.array([_TRIAL_TOKENS] * len(slots)), make_caches(self._model)
        if len(slots) > 1:
            caches = batched.merge([caches, *(make_caches(self._model) for _ in slots[1:])])
        with self.slots.rows([slots], [(len(slots), len(_TRIAL_TOKENS))]):
            logits: mx.array = self._model(tokens, cache=caches)
        mx.eval(logits)
        return logits


def refused(name: str, reason: str) -> Failure:
    return Failure(Code.BAD_CONFIG, f"the adapter {name!r} cannot be served: {reason}")


def read_all(adapters: Adapters, wanted: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Files | Failure]:
    """Read the wanted adapters that are not loaded yet. May be called from any thread."""
    return {each: adapters.read(*each) for each in adapters.missing(wanted)}


def attach(model: Any, linears: Linears, mode: BatchMode) -> Adapters:
    """Enable adapters for a model."""
    adapters = model.adapters = Adapters(model, linears, mode)
    return adapters


def adapters_of(model: Any) -> Adapters | None:
    """Return the adapters of a model; None if adapters are not enabled."""
    adapters: Adapters | None = getattr(model, "adapters", None)
    return adapters


def adapted(model: Any, slots: Callable[[], list[list[int]]], shapes: Sequence[Shape]) -> AbstractContextManager[None]:
    """Set the slots of rows during a forward pass; this costs nothing for a model without adapters."""
    adapters = adapters_of(model)
    return adapters.slots.rows(slots(), shapes) if adapters is not None and adapters.is_on else nullcontext()

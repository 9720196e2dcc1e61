"""Adapters of one loaded model, by name: loaded and unloaded while rows run."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from protocol.failures import Code, Failure
from protocol.model_info import AdapterInfo
from protocol.spec import ADAPTERS_MAX
from worker.errors import LoadFailed, RequestInvalid, is_allocation_failure
from worker.kv import batched
from worker.kv.quantized import make_caches
from worker.model.batch_mode import BatchMode
from worker.model.division import agreement_of
from worker.model.linears import LinearPlace, Linears
from worker.model.loader import resolve
from worker.model.lora.adapted_linear import AdaptedLinear
from worker.model.lora.adapter_files import Files, read
from worker.model.lora.matrices import dtype_of, matrices
from worker.model.lora.slots import BASE, Slots, StackedWeights
from worker.model.lora.tensors import UnusableAdapter
from worker.model.packing import Shape, packing_of
from worker.prefix_cache.salts import adapter_salt

log = logging.getLogger("mlxd.worker")

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

"""Commands that load and unload adapters, handled between two ticks, and the memory that adapters take."""

from collections.abc import Callable, Iterable
from typing import Final

from protocol.failures import Code, Failure
from protocol.from_worker import AdaptersSet
from worker.engine.inbox import AdapterOrder
from worker.engine.row import Row
from worker.engine.scheduling.memory_limits import MemoryLimits
from worker.model.loader import LoadedModel
from worker.model.lora.adapters import Adapters, adapters_of

# An adapter is refused if it would leave memory for a context of fewer tokens than this.
MIN_CONTEXT: Final = 256


class AdapterOrders:
    """Adapters of an engine. `rows` returns the engine's rows, and `apply` applies changed memory limits."""

    def __init__(
        self,
        loaded: LoadedModel,
        epoch: int,
        memory: MemoryLimits,
        rows: Callable[[], Iterable[Row]],
        apply: Callable[[], None],
    ) -> None:
        # This field is None if the model was not loaded to serve requests.
        self._adapters = adapters_of(loaded.model)
        self._base_bytes = loaded.weights_bytes - (self._adapters.nbytes if self._adapters is not None else 0)
        self._epoch = epoch
        self._memory = memory
        self._rows = rows
        self._apply = apply
        # Callback of the newest command, which gets a report when an adapter has been freed.
        self._reply: Callable[[AdaptersSet], None] | None = None

    def refusal(self, row: Row) -> Failure | None:
        """Return the failure of a row whose adapter was unloaded after the request was read."""
        if row.adapter is None or (self._adapters is not None and self._adapters.holds(row.adapter)):
            return None
        message = f"the adapter {row.adapter.name!r} was unloaded before the request began"
        return Failure(Code.MODEL_MISSING, message, param="model")

    def handle(self, order: AdapterOrder) -> None:
        adapters = self._adapters
        if adapters is None:
            return
        self._reply = order.reply
        adapters.change(order.wanted, order.read)
        self._weigh(adapters)
        for name, path in order.wanted:
            room = self._memory.kv_cost.longest(self._memory.kv.limit)
            if (name, path) in order.read and adapters.has(name) and room < MIN_CONTEXT:
                message = f"beside the adapter {name!r} there would be no memory left for KV"
                adapters.fail(name, path, Failure(Code.OUT_OF_MEMORY, message))
                self._weigh(adapters)
        self._report(adapters, order.call_id)

    def tend(self) -> None:
        """Free retired adapters that no row uses any more."""
        adapters = self._adapters
        if adapters is not None and adapters.is_retiring:
            before = adapters.nbytes
            self._weigh(adapters)
            if adapters.nbytes != before:
                self._report(adapters, 0)

    def _weigh(self, adapters: Adapters) -> None:
        """Free adapters that no row uses, then divide memory again with the present size of the weights."""
        adapters.sweep(lambda: {row.adapter_slot for row in self._rows()})
        self._memory.share.weigh(self._base_bytes + adapters.nbytes)
        self._apply()

    def _report(self, adapters: Adapters, call_id: int) -> None:
        if self._reply is not None:
            self._reply(AdaptersSet(self._epoch, call_id, adapters.infos, self._base_bytes + adapters.nbytes))

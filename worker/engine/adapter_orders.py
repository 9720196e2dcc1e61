"""Orders to load and to let go of adapters, obeyed between two ticks, and the memory that they take."""

from collections.abc import Callable
from typing import Final

from protocol.failures import Code, Failure
from protocol.from_worker import AdaptersSet
from worker.engine.inbox import AdapterOrder
from worker.engine.row import Row
from worker.engine.scheduling.memory_limits import MemoryLimits
from worker.model.loader import LoadedModel
from worker.model.lora.adapters import Adapters, adapters_of

# With room for less than this beside it, an adapter is of no use.
LEAST_CONTEXT: Final = 256


class AdapterOrders:
    """Owned by the engine; `used` are the slots of its rows, and `apply` puts changed limits of memory into force."""

    def __init__(
        self,
        loaded: LoadedModel,
        epoch: int,
        memory: MemoryLimits,
        used: Callable[[], set[int]],
        apply: Callable[[], None],
    ) -> None:
        # None of a model that was loaded for something else than to be served.
        self._adapters = adapters_of(loaded.model)
        self._base_bytes = loaded.weights_bytes - (self._adapters.nbytes if self._adapters is not None else 0)
        self._epoch = epoch
        self._memory = memory
        self._used = used
        self._apply = apply
        # Who gave the newest order is told when an adapter is gone.
        self._reply: Callable[[AdaptersSet], None] | None = None

    def refusal(self, row: Row) -> Failure | None:
        """The reason for which a row may not begin: what it names is gone since it was read."""
        if row.adapter is None or (self._adapters is not None and self._adapters.holds(row.adapter)):
            return None
        message = f"the adapter {row.adapter.name!r} was unloaded before the request began"
        return Failure(Code.MODEL_MISSING, message, param="model")

    def obey(self, order: AdapterOrder) -> None:
        adapters = self._adapters
        if adapters is None:
            return
        self._reply = order.reply
        adapters.change(order.wanted, order.read)
        self._weigh(adapters)
        for name, path in order.wanted:
            room = self._memory.kv_cost.longest(self._memory.kv.limit)
            if (name, path) in order.read and adapters.has(name) and room < LEAST_CONTEXT:
                message = f"beside the adapter {name!r} there would be no memory left for KV"
                adapters.give_up(name, path, Failure(Code.OUT_OF_MEMORY, message))
                self._weigh(adapters)
        self._tell(adapters, order.call_id)

    def tend(self) -> None:
        """Let go of retired adapters once no row has them."""
        adapters = self._adapters
        if adapters is not None and adapters.is_retiring:
            before = adapters.nbytes
            self._weigh(adapters)
            if adapters.nbytes != before:
                self._tell(adapters, 0)

    def _weigh(self, adapters: Adapters) -> None:
        """Divide memory by what the weights take now."""
        adapters.sweep(self._used)
        self._memory.share.weigh(self._base_bytes + adapters.nbytes)
        self._apply()

    def _tell(self, adapters: Adapters, call_id: int) -> None:
        if self._reply is not None:
            self._reply(AdaptersSet(self._epoch, call_id, adapters.infos, self._base_bytes + adapters.nbytes))

"""Intake of text requests: turns them into rows for the engine, and reads adapters from disk."""

import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from protocol.to_worker import Generate, SetAdapters
from worker.engine.gauges import Gauges
from worker.engine.inbox import AdapterOrder, EngineInbox
from worker.engine.row import Row
from worker.link import GatewayLink
from worker.model.loader import LoadedModel
from worker.model.lora.adapters import adapters_of, read_all
from worker.prompt.intake import Intake
from worker.prompt.tokenize_calls import ExplainMiss
from worker.start.job_intake import Refusing, start_intake


def start_text_intake(
    loaded: LoadedModel,
    intake: Intake,
    inbox: EngineInbox,
    link: GatewayLink,
    gauges: Gauges,
    refusing: Refusing,
    compilers: ThreadPoolExecutor,
    explain: ExplainMiss,
) -> None:
    """Call `start_intake` for a text model. Requests become rows in order, except those that wait for their grammar to
    be compiled or for their questions to be encoded."""
    orders: SimpleQueue[SetAdapters] = SimpleQueue()

    def restrict(row: Row, request: Generate) -> None:
        with refusing(row.rid):
            intake.restrict(row, request)
            inbox.put(row)

    def ask(request: Generate, arrived: float) -> None:
        with refusing(request.rid):
            inbox.put(intake.row(request, arrived))

    def prepare(request: Generate, arrived: float) -> None:
        if request.questions:  # encoding hundreds of questions may take seconds
            compilers.submit(ask, request, arrived)
            return
        row = intake.row(request, arrived)
        if intake.is_restricted(request):
            compilers.submit(restrict, row, request)
        else:
            inbox.put(row)

    threading.Thread(target=_read_adapters, args=(loaded, orders, inbox, link), name="adapters", daemon=True).start()
    start_intake(intake, prepare, orders.put, inbox.put, link, gauges, refusing, explain)


def _read_adapters(
    loaded: LoadedModel, orders: SimpleQueue[SetAdapters], inbox: EngineInbox, link: GatewayLink
) -> None:
    """Read and check adapters on a thread of their own, where they delay no row."""
    adapters = adapters_of(loaded.model)
    assert adapters is not None, "load_checked attaches them"
    while True:
        order = orders.get()
        read = read_all(adapters, order.adapters)
        inbox.put(AdapterOrder(order.call_id, order.adapters, read, link.announce_adapters))

"""Requests on their way from the link to the engine: they become rows, and orders for adapters are read from disk."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from msgspec import structs

from protocol.messages import Abort, Generate, SetAdapters
from worker.engine.gauges import Gauges
from worker.engine.inbox import AdapterOrder, EngineInbox
from worker.engine.row import Row
from worker.link import Control, GatewayLink, Question
from worker.model.loader import LoadedModel
from worker.model.lora.adapters import adapters_of, read_all
from worker.prompt.intake import Intake
from worker.prompt.questions import TokenizeCalls
from worker.start.job_intake import Refusing

Requests = SimpleQueue[tuple[Generate, float]]


def take_prompts(
    loaded: LoadedModel,
    intake: Intake,
    inbox: EngineInbox,
    link: GatewayLink,
    gauges: Gauges,
    refusing: Refusing,
    compilers: ThreadPoolExecutor,
) -> None:
    """From here on, what the link receives goes to the thread that it is for."""
    requests: Requests = SimpleQueue()
    questions = TokenizeCalls(intake, link.send, refusing, gauges)

    def take(request: Question) -> None:
        if isinstance(request, Generate):
            requests.put((request, time.monotonic()))
        else:
            questions.put(request)

    orders: SimpleQueue[SetAdapters] = SimpleQueue()

    def control(command: Control) -> None:
        if isinstance(command, SetAdapters):
            orders.put(command)
            return
        if isinstance(command, Abort):
            command = structs.replace(command, rids=tuple(questions.abort(command.rids)))
        inbox.put(command)

    questions.start()
    threading.Thread(target=_read_adapters, args=(loaded, orders, inbox, link), name="adapters", daemon=True).start()
    preparing = (intake, requests, inbox, refusing, compilers)
    threading.Thread(target=_prepare, args=preparing, name="intake", daemon=True).start()
    link.on_control = control
    link.on_question = take


def _read_adapters(
    loaded: LoadedModel, orders: SimpleQueue[SetAdapters], inbox: EngineInbox, link: GatewayLink
) -> None:
    """Files of adapters are read and checked here, where they hold up no row."""
    adapters = adapters_of(loaded.model)
    assert adapters is not None, "load_checked attaches them"
    while True:
        order = orders.get()
        read = read_all(adapters, order.adapters)
        inbox.put(AdapterOrder(order.call_id, order.adapters, read, link.announce_adapters))


def _prepare(
    intake: Intake, requests: Requests, inbox: EngineInbox, refusing: Refusing, compilers: ThreadPoolExecutor
) -> None:
    """Requests become rows in order, but for those that wait for the compiler of their grammar."""

    def restrict(row: Row, request: Generate) -> None:
        with refusing(row.rid):
            intake.restrict(row, request)
            inbox.put(row)

    while True:
        request, arrived = requests.get()
        with refusing(request.rid):
            row = intake.row(request, arrived)
            if intake.is_restricted(request):
                compilers.submit(restrict, row, request)
            else:
                inbox.put(row)

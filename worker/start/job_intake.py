"""Intake of requests: a thread between the link and a model's loop, which prepares requests one after another."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, Protocol

from msgspec import structs

from protocol.failures import Code, Failure
from protocol.from_worker import AdapterInfo, AdaptersSet
from protocol.to_worker import Abort, Generate, SetAdapters
from worker.engine.gauges import Gauges
from worker.link import ClientRequest, Control, GatewayLink
from worker.prompt.tokenize_calls import CallAnswerer, ExplainMiss, TokenizeCalls

Refusing = Callable[[int], AbstractContextManager[None]]


class JobPreparation(CallAnswerer, Protocol):
    """Port to the intake that makes jobs of requests, and answers tokenize and detokenize calls."""

    def job(self, request: Generate, arrived: float) -> Any:
        """Return a validated job in the form that the inbox takes. Raises `RequestInvalid`."""
        ...


def start_intake(
    answerer: CallAnswerer,
    prepare: Callable[[Generate, float], None],
    set_adapters: Callable[[SetAdapters], None],
    put: Callable[[Any], None],
    link: GatewayLink,
    gauges: Gauges,
    refusing: Refusing,
    explain: ExplainMiss | None = None,
) -> None:
    """Route the messages of the link to their threads from now on; `put` adds to the loop's inbox and never blocks.

    `prepare` runs on the intake's thread with a request and its arrival, puts the result into the inbox, and may raise
    `RequestInvalid`. `set_adapters` runs on the link's thread and never waits.
    """
    requests: SimpleQueue[tuple[Generate, float]] = SimpleQueue()
    calls = TokenizeCalls(answerer, link.send, refusing, gauges, explain)

    def prepare_all() -> None:
        while True:
            request, arrived = requests.get()
            with refusing(request.rid):
                prepare(request, arrived)

    def receive(request: ClientRequest) -> None:
        if isinstance(request, Generate):
            requests.put((request, time.monotonic()))
        else:
            calls.put(request)

    def control(command: Control) -> None:
        if isinstance(command, SetAdapters):
            set_adapters(command)
            return
        if isinstance(command, Abort):
            command = structs.replace(command, rids=tuple(calls.abort(command.rids)))
        put(command)

    calls.start()
    threading.Thread(target=prepare_all, name="intake", daemon=True).start()
    link.on_control = control
    link.on_request = receive


def start_job_intake(
    epoch: int,
    weights_bytes: int,
    preparer: JobPreparation,
    put: Callable[[Any], None],
    link: GatewayLink,
    gauges: Gauges,
    refusing: Refusing,
) -> None:
    """Call `start_intake` for a model that generates no text and so has no adapters."""

    def prepare(request: Generate, arrived: float) -> None:
        put(preparer.job(request, arrived))

    def refuse_adapters(command: SetAdapters) -> None:
        refused = refused_adapters(command.adapters)
        link.announce_adapters(AdaptersSet(epoch, command.call_id, refused, weights_bytes))

    start_intake(preparer, prepare, refuse_adapters, put, link, gauges, refusing)


def refused_adapters(adapters: tuple[tuple[str, str], ...]) -> tuple[AdapterInfo, ...]:
    """Return each adapter with the reason for its refusal, for a model that generates no text."""
    why = "cannot be served: adapters are for models that generate text"
    failures = {name: Failure(Code.UNSUPPORTED, f"the adapter {name!r} {why}") for name, _ in adapters}
    return tuple(AdapterInfo(name, path, failure=failures[name]) for name, path in adapters)

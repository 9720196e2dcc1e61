"""Orders for models from the page, which are accepted at once and carried out by a task."""

from collections.abc import Awaitable, Callable
from typing import Final, Literal

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.access.audit_log import Action
from gateway.access.caller import OWNER
from gateway.control.command_body import read_order
from gateway.control.commands import Command, note
from gateway.control_types import ModelRef
from gateway.http.exchange import send_body
from gateway.services import Services
from gateway.web.schemas import OrderAccepted
from gateway.workers.supervisor.state import ModelUnavailable

Verb = Literal["load", "unload", "restart", "pin", "unpin"]

_model_ref: Final = msgspec.json.Decoder(ModelRef)


def routes(services: Services, prefix: str) -> list[Route]:
    """Return one route for each verb."""
    pool = services.pool
    verbs: tuple[tuple[Verb, Action, Callable[[str], Awaitable[None]]], ...] = (
        ("load", "model.load", pool.load),
        ("unload", "model.unload", pool.unload),
        ("restart", "model.restart", pool.restart),
        ("pin", "model.pin", pool.pin),
        ("unpin", "model.unpin", pool.unpin),
    )
    orders = ModelOrders(services)
    return [
        Route(f"{prefix}/models/{verb}", ModelOrder(services, orders, verb, action, run), methods=["POST"])
        for verb, action, run in verbs
    ]


class ModelOrders:
    """Orders in progress; a repeated order joins the running one."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._running: set[tuple[str, str]] = set()

    def start(self, verb: Verb, model: str, run: Callable[[str], Awaitable[None]]) -> None:
        """Start an order. Its failure is shown as the model's `last_failure`."""
        key = (verb, model)
        if key not in self._running:
            self._running.add(key)
            self._services.tasks.start(self._carry_out(key, model, run), f"{verb} of model {model}")

    async def _carry_out(self, key: tuple[str, str], model: str, run: Callable[[str], Awaitable[None]]) -> None:
        try:
            await run(model)
        except ModelUnavailable:
            pass  # the model's state machine has logged it, and reports it to all viewers
        finally:
            self._running.discard(key)


class ModelOrder:
    """`POST /ui/api/models/{load,unload,restart,pin,unpin}`."""

    def __init__(
        self, services: Services, orders: ModelOrders, verb: Verb, action: Action, run: Callable[[str], Awaitable[None]]
    ) -> None:
        self._services = services
        self._orders = orders
        self._verb: Verb = verb
        self._action: Action = action
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ref = await read_order(scope, receive, _model_ref)
        order = note(scope, Command(self._action, ref.model))
        order.target = name = self._services.router.resolve(ref.model, OWNER).name
        self._orders.start(self._verb, name, self._run)
        await send_body(send, 202, msgspec.json.encode(OrderAccepted(name, self._verb)))

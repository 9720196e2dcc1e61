"""Commands for models from the web page. They are accepted immediately and carried out by a task."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.access.caller import OWNER
from gateway.control.command_body import read_order
from gateway.control.commands import Command, ModelCommand, model_commands, note
from gateway.control_types import ModelRef
from gateway.http.exchange import json_response
from gateway.services import Services
from gateway.web.schemas import OrderAccepted
from gateway.workers.supervisor.state import ModelUnavailable

_model_ref: Final = msgspec.json.Decoder(ModelRef)


def routes(services: Services, prefix: str) -> list[Route]:
    """Return one route for each verb."""
    orders = ModelOrders(services)
    return [
        Route(f"{prefix}/models/{command[0]}", partial(orders.accept, command), methods=["POST"])
        for command in model_commands(services.pool)
    ]


class ModelOrders:
    """Commands that are being carried out. A repeated command joins the running one."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._running: set[tuple[str, str]] = set()

    async def accept(self, command: ModelCommand, request: Request) -> Response:
        """Answer `POST /ui/api/models/VERB`. If the command fails, the model's `last_failure` shows it."""
        verb, action, run = command
        ref = await read_order(request.scope, request.receive, _model_ref)
        order = note(request.scope, Command(action, ref.model))
        order.target = model = self._services.router.resolve(ref.model, OWNER).name
        key = (verb, model)
        if key not in self._running:
            self._running.add(key)
            self._services.tasks.start(self._carry_out(key, model, run), f"{verb} of model {model}")
        return json_response(OrderAccepted(model, verb), 202)

    async def _carry_out(self, key: tuple[str, str], model: str, run: Callable[[str], Awaitable[None]]) -> None:
        try:
            await run(model)
        except ModelUnavailable:
            pass  # The model's state machine has logged the error and reports it to all viewers.
        finally:
            self._running.discard(key)

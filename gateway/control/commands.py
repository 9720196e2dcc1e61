"""Orders of the operator, over the unix socket or by the page, and their lines in the audit log."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.audit_log import Action, AuditActor, Fact, entry
from gateway.access.audit_trail import AuditTrail
from gateway.control.socket_peer import peer_of
from gateway.errors import ApiError
from gateway.http.direct_write import outlet_of
from gateway.request.record import record_of

KEY: Final = "mlxd.order"


@dataclass(slots=True)
class Command:
    """An admin command of a request, recorded by its endpoint before it is executed; `facts` may follow."""

    action: Action
    target: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict[str, Fact])


class AuditedCommand:
    """Pure ASGI. Records the order of each request that gives one, with who gave it and how it ended.

    Over the unix socket that is the process at its other end; over TCP it is a `session` of the page.
    """

    def __init__(self, app: ASGIApp, trail: AuditTrail, session: Callable[[Scope], str] | None = None) -> None:
        self._app = app
        self._trail = trail
        self._session = session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outlet = outlet_of(scope)
        # Asked now: a client may leave before it is obeyed.
        actor = AuditActor() if outlet is None or self._session is not None else peer_of(outlet.socket)
        outcome = "interrupted"
        try:
            await self._app(scope, receive, send)
            outcome = "ok"
        except ApiError as error:
            outcome = error.outcome
            raise
        finally:
            order: Command | None = scope.get(KEY)
            if order is not None:
                client = str(record_of(scope).client)
                facts = dict(order.facts)
                if self._session is not None:
                    facts["session"] = self._session(scope)
                self._trail.record(
                    entry(order.action, order.target, outcome=outcome, client=client, actor=actor, facts=facts)
                )


def note(scope: Scope, order: Command) -> Command:
    """Say what this request orders."""
    scope[KEY] = order
    return order

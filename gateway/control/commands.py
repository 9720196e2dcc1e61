"""Commands of the operator, over the unix socket or from the web page, and their lines in the audit log."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.audit_log import Action, AuditActor, Fact, entry
from gateway.access.audit_trail import AuditTrail
from gateway.control.audit_actor import peer_of
from gateway.errors import ApiError
from gateway.http.direct_write import writer_of
from gateway.request.record import record_of
from gateway.workers.pool.pool import Pool

ModelVerb = Literal["load", "unload", "restart", "pin", "unpin"]
# A verb, its name in the audit log, and the function that carries it out for a model.
ModelCommand = tuple[ModelVerb, Action, Callable[[str], Awaitable[None]]]

_SCOPE_KEY: Final = "mlxd.command"


def model_commands(pool: Pool) -> tuple[ModelCommand, ...]:
    """Return the commands to a model, which the unix socket and the web page offer."""
    return (
        ("load", "model.load", pool.load),
        ("unload", "model.unload", pool.unload),
        ("restart", "model.restart", pool.restart),
        ("pin", "model.pin", pool.pin),
        ("unpin", "model.unpin", pool.unpin),
    )


@dataclass(slots=True)
class Command:
    """Command of a request. Its endpoint notes the command before carrying it out, and may add `facts` afterwards."""

    action: Action
    target: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict[str, Fact])


class AuditedCommand:
    """ASGI middleware that records each command with its outcome and its sender.

    The sender is the process at the other end of the unix socket or, over TCP, a `session` of the page.
    """

    def __init__(self, app: ASGIApp, trail: AuditTrail, session: Callable[[Scope], str] | None = None) -> None:
        self._app = app
        self._trail = trail
        self._session = session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = writer_of(scope)
        # The credentials are read first, because a client may disconnect while its command is carried out.
        actor = AuditActor() if writer is None or self._session is not None else peer_of(writer.socket)
        outcome = "interrupted"
        try:
            await self._app(scope, receive, send)
            outcome = "ok"
        except ApiError as error:
            outcome = error.outcome
            raise
        finally:
            command: Command | None = scope.get(_SCOPE_KEY)
            if command is not None:
                client = str(record_of(scope).client)
                facts = dict(command.facts)
                if self._session is not None:
                    facts["session"] = self._session(scope)
                self._trail.record(
                    entry(command.action, command.target, outcome=outcome, client=client, actor=actor, facts=facts)
                )


def note(scope: Scope, command: Command) -> Command:
    """Set the command of a request, for the audit log."""
    scope[_SCOPE_KEY] = command
    return command

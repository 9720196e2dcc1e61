"""Authorization of Ollama requests that unload a model or download one: they need an admin key.

Without keys every program on this machine may use the models, and none may administer them.
"""

from gateway.access.audit_log import Action, AuditActor, entry
from gateway.errors import Forbidden
from gateway.request.record import RequestRecord
from gateway.services import Services


def order(services: Services, record: RequestRecord, action: Action, target: str, what: str) -> None:
    """Check that the caller may give an order, and record it in the audit log. Raises `Forbidden`."""
    caller = record.caller
    if caller.key is None or not caller.is_admin:
        raise Forbidden(f"{what} needs an admin key: mlxctl keys create NAME --admin")
    line = entry(action, target, client=str(record.client), actor=AuditActor(), facts={"key": caller.key})
    services.audit.record(line)

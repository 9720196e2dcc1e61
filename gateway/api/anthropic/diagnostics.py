"""Anthropic's `diagnostics`: why the prompt of an earlier message was not a prefix of this one."""

from collections.abc import Callable
from typing import Final

from msgspec import UNSET

from gateway.api.anthropic.request import MessagesRequest
from gateway.api.anthropic.response import AnthropicDiagnostics, CacheMissReason, Diagnostics
from gateway.request.diagnosis import Diagnosis
from gateway.request.record import RequestRecord
from gateway.services import Services
from protocol.from_worker import MissCause, MissCode

_TYPES: Final[dict[str, str]] = {
    MissCode.SYSTEM: "system_changed",
    MissCode.TOOLS: "tools_changed",
    MissCode.TOOL_ORDER: "tools_changed",
    MissCode.MESSAGE: "messages_changed",
    MissCode.DATE: "messages_changed",
    MissCode.MEDIA: "messages_changed",
    MissCode.THOUGHTS_UNSENT: "messages_changed",
}
_UNAVAILABLE: Final = "unavailable"


def diagnostics_of(services: Services, record: RequestRecord, request: MessagesRequest) -> Callable[[], Diagnostics]:
    """Return the function that makes the field of the answer, and begin the comparison that the request asks for."""
    if request.diagnostics is None:
        return lambda: UNSET
    if request.diagnostics.previous_message_id is None:
        return lambda: None
    diagnosis = Diagnosis(services, record, request.diagnostics.previous_message_id)
    record.comparison = diagnosis
    return lambda: _diagnostics(diagnosis)


def _diagnostics(diagnosis: Diagnosis) -> AnthropicDiagnostics | None:
    if diagnosis.other is None:
        return AnthropicDiagnostics(CacheMissReason("previous_message_not_found"))
    if diagnosis.is_other_model:
        return AnthropicDiagnostics(CacheMissReason("model_changed", diagnosis.other.timing.prompt_tokens))
    if not diagnosis.is_settled:
        return AnthropicDiagnostics(None)
    if (cause := diagnosis.difference) is not None:
        return AnthropicDiagnostics(_reason(diagnosis, cause))
    return None if diagnosis.is_compared else AnthropicDiagnostics(CacheMissReason(_UNAVAILABLE))


def _reason(diagnosis: Diagnosis, cause: MissCause) -> CacheMissReason:
    kind = _TYPES.get(cause.code, _UNAVAILABLE)
    if cause.code == MissCode.DATE and cause.role == "system":
        kind = "system_changed"
    tokens = UNSET if kind == _UNAVAILABLE else cause.tokens
    return CacheMissReason(kind, tokens, diagnosis.words(cause))

"""OpenAI's `prompt_cache_diagnostics`: why the prompt of another response was not a prefix of this one."""

from collections.abc import Callable
from typing import Final

from msgspec import UNSET, UnsetType

from gateway.api.responses.request import ResponsesRequest
from gateway.api.responses.response import PromptCacheDiagnostics
from gateway.request.diagnosis import Diagnosis
from gateway.request.record import RequestRecord
from gateway.services import Services
from protocol.from_worker import MissCode

MakeDiagnostics = Callable[[], PromptCacheDiagnostics | UnsetType]

_REASONS: Final[dict[str, str]] = {
    MissCode.TOOLS: "tools_changed",
    MissCode.TOOL_ORDER: "tools_changed",
    MissCode.SETTINGS: "reasoning_effort_changed",
    MissCode.TRUNCATED: "context_compacted",
    MissCode.SALT: "prompt_cache_key_changed",
}


def no_diagnostics() -> UnsetType:
    return UNSET


def diagnostics_of(services: Services, record: RequestRecord, request: ResponsesRequest) -> MakeDiagnostics:
    """Return the function that makes the field of the answer, and begin the comparison that the request asks for.
    Raises `BadRequest`.
    """
    if not (answer_id := request.comparison_id):
        return no_diagnostics
    diagnosis = Diagnosis(services, record, answer_id)
    record.comparison = diagnosis
    return lambda: _diagnostics(diagnosis)


def _diagnostics(diagnosis: Diagnosis) -> PromptCacheDiagnostics:
    if diagnosis.other is None:
        return PromptCacheDiagnostics("comparison_response_not_found")
    if diagnosis.is_other_model:
        return PromptCacheDiagnostics("cache_miss", "model_changed", diagnosis.other.timing.prompt_tokens, 0)
    cause, explained = diagnosis.difference, diagnosis.explained
    if cause is not None and explained is not None:
        reason = _REASONS.get(cause.code, "input_changed")
        words = diagnosis.words(cause)
        return PromptCacheDiagnostics("cache_miss", reason, cause.tokens, explained.common, words)
    is_hit = explained is not None and diagnosis.is_compared and not explained.causes
    return PromptCacheDiagnostics("cache_hit" if is_hit else "unavailable")

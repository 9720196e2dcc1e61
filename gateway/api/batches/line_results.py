"""Lines of a batch's results, in the forms of OpenAI and Anthropic."""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec
from msgspec import Raw, Struct

from gateway.api.batches.inner_request import InnerAnswer
from gateway.api.batches.records import BatchTokens, Outcome, new_name

_OK: Final = 200
_REQUEST_PREFIX: Final = "batch_req_"
_UNSERVED: Final[Mapping[Outcome, tuple[str, str]]] = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "canceled": ("batch_cancelled", "This request was not executed, because its batch was cancelled."),
}


class LineAnswer(Struct, frozen=True):
    """HTTP answer to a line."""

    status_code: int
    request_id: str
    body: Raw


class LineError(Struct, frozen=True):
    """Reason for which a line was not run."""

    code: str
    message: str


class LineResult(Struct, frozen=True):
    """OpenAI's form of a result."""

    id: str
    custom_id: str
    response: LineAnswer | None
    error: LineError | None


class SucceededResult(Struct, frozen=True, tag_field="type", tag="succeeded"):
    message: Raw


class ErroredResult(Struct, frozen=True, tag_field="type", tag="errored"):
    error: Raw


class CanceledResult(Struct, frozen=True, tag_field="type", tag="canceled"):
    pass


class ExpiredResult(Struct, frozen=True, tag_field="type", tag="expired"):
    pass


MessageResult = SucceededResult | ErroredResult | CanceledResult | ExpiredResult


class MessageBatchResult(Struct, frozen=True):
    """Anthropic's form of a result."""

    custom_id: str
    result: MessageResult


class _Kind(Struct, frozen=True):
    type: Outcome = "succeeded"


class _Code(Struct, frozen=True):
    code: str = ""


class _InputDetails(Struct, frozen=True):
    cached_tokens: int = 0


class _OutputDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


class _Usage(Struct, frozen=True):
    """Usage in the forms of all endpoints."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _InputDetails | None = None
    completion_tokens_details: _OutputDetails | None = None
    input_tokens_details: _InputDetails | None = None
    output_tokens_details: _OutputDetails | None = None


class _AnswerBody(Struct, frozen=True):
    usage: _Usage | None = None


class _Response(Struct, frozen=True):
    status_code: int
    body: _AnswerBody


class WrittenResult(Struct, frozen=True):
    """Facts of a result that was written, in any form."""

    custom_id: str
    response: _Response | None = None
    error: _Code | None = None
    result: _Kind | None = None

    @property
    def outcome(self) -> Outcome:
        if self.result is not None:
            return self.result.type
        if self.response is not None:
            return "succeeded" if self.response.status_code == _OK else "errored"
        codes: dict[str, Outcome] = {code: outcome for outcome, (code, _) in _UNSERVED.items()}
        return codes.get(self.error.code if self.error is not None else "", "errored")

    def add_to(self, tokens: BatchTokens) -> BatchTokens:
        """Return the tokens with those of this result."""
        usage = self.response.body.usage if self.response is not None else None
        if usage is None:
            return tokens
        inputs = usage.input_tokens_details or usage.prompt_tokens_details or _InputDetails()
        outputs = usage.output_tokens_details or usage.completion_tokens_details or _OutputDetails()
        return BatchTokens(
            tokens.prompt + usage.prompt_tokens + usage.input_tokens,
            tokens.cached + inputs.cached_tokens,
            tokens.completion + usage.completion_tokens + usage.output_tokens,
            tokens.reasoning + outputs.reasoning_tokens,
        )


_encode = msgspec.json.Encoder().encode
_written = msgspec.json.Decoder(WrittenResult)


def read_result(line: bytes) -> WrittenResult:
    """Read a written line. Raises `msgspec.DecodeError` if it was not written completely."""
    return _written.decode(line)


def served_line(custom_id: str, answer: InnerAnswer, is_anthropic: bool) -> tuple[Outcome, bytes]:
    """Return the outcome and the result of a line that was answered."""
    outcome: Literal["succeeded", "errored"] = "succeeded" if answer.status == _OK else "errored"
    body = Raw(answer.body)
    if not is_anthropic:
        response = LineAnswer(answer.status, answer.request_id, body)
        return outcome, _written_line(LineResult(new_name(_REQUEST_PREFIX), custom_id, response, None))
    result = SucceededResult(body) if outcome == "succeeded" else ErroredResult(body)
    return outcome, _written_line(MessageBatchResult(custom_id, result))


def unserved_line(custom_id: str, outcome: Outcome, is_anthropic: bool) -> bytes:
    """Return the result of a line that was not run, because its batch was cancelled or has expired."""
    if is_anthropic:
        return _written_line(
            MessageBatchResult(custom_id, CanceledResult() if outcome == "canceled" else ExpiredResult())
        )
    error = LineError(*_UNSERVED[outcome])
    return _written_line(LineResult(new_name(_REQUEST_PREFIX), custom_id, None, error))


def _written_line(result: Struct) -> bytes:
    return _encode(result) + b"\n"

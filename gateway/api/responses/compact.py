"""`POST /v1/responses/compact`: a conversation as its user's words and the model's summary of the rest."""

import secrets
from collections.abc import Sequence
from typing import Final

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.api.common import serve
from gateway.api.responses import response as out
from gateway.api.responses.history import ResponseHistory, numbered
from gateway.api.responses.lowering import lower_prompt, lower_responses, seal
from gateway.api.responses.request import ContentPart, InputItem, InputTokensRequest, ResponsesRequest, decode_count
from gateway.api.responses.tools import toolbox
from gateway.request.record import record_of
from gateway.services import Services
from protocol.from_worker import Delta, DeltaKind, Usage

SUMMARY_TOKENS_MAX: Final = 4096
ASK: Final = (
    "Summarize our conversation so far, for yourself: from now on you will see your summary and my messages only. "
    "Keep what is needed to go on: decisions, facts, names of files, results of tools, and what is still to be done. "
    "Answer with the summary alone."
)

_encode = msgspec.json.Encoder().encode


class Compact:
    """An ASGI endpoint."""

    def __init__(self, services: Services, history: ResponseHistory) -> None:
        self._services = services
        self._history = history

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, record = self._services, record_of(scope)
        request, ignored = await serve.read(services, record, scope, receive, decode_count)
        items = await self._history.resolved(record, request.items)
        before = [*await self._history.before(record, request.previous_response_id), *items]
        # What could not be answered cannot be summed up either.
        whole, asking = msgspec.structs.replace(request, input=None), _asking(request)
        work, size = services.bodies.work, record.body_bytes
        await work(size, lower_prompt, whole, toolbox(request), before)
        prompt, left_out = await work(size, lower_prompt, asking, toolbox(asking), before)
        model, seed = serve.begin(services, record, request.model, False, None, [*ignored, *left_out])
        prompt = await serve.with_media(services, record, model, prompt, self._history.media(record))
        deadline_ms, next_rid = serve.deadline_ms(services), services.link.next_rid
        generates = await serve.lower(
            services, record, model, lambda: lower_responses(asking, prompt, model, next_rid, seed, deadline_ms)
        )
        job = serve.PreparedRequest(services, record, model, generates)
        await job.whole(_Summary(before), receive, send)


def _asking(request: InputTokensRequest) -> ResponsesRequest:
    """The request that has a summary for its answer: no tools, and no long thoughts about it."""
    return ResponsesRequest(
        model=request.model,
        instructions=request.instructions,
        input=ASK,
        reasoning_effort="none",
        max_output_tokens=SUMMARY_TOKENS_MAX,
        store=False,
    )


class _Summary:
    """A `Fold`."""

    def __init__(self, conversation: Sequence[InputItem]) -> None:
        self._conversation = conversation
        self._texts: list[str] = []
        self._usage = Usage(0, 0, 0)

    def bind(self, rids: Sequence[int]) -> None:
        assert len(rids) == 1, "a summary is one sequence"

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.kind is DeltaKind.TEXT:
                self._texts.append(delta.text)
            if delta.usage is not None:
                self._usage = delta.usage

    def result(self) -> bytes:
        stem = secrets.token_hex(20)
        kept = [_listed(item) for item in numbered(self._conversation, stem) if _is_users(item)]
        summary = InputItem("compaction", f"cmp_{stem}", encrypted_content=seal("".join(self._texts)))
        usage = out.ResponseUsage.of(self._usage)
        return _encode(out.CompactedResponse(f"resp_{stem}", serve.now(), [*kept, summary], usage))


def _is_users(item: InputItem) -> bool:
    return item.kind == "message" and item.role == "user"


def _listed(item: InputItem) -> InputItem:
    content = [ContentPart("input_text", item.content)] if isinstance(item.content, str) else item.content
    return msgspec.structs.replace(item, content=content, status="completed")

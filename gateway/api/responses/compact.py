"""Compaction of a conversation: the user's messages, and the model's summary of the rest."""

import secrets
from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.api.common import serve
from gateway.api.responses import response as out
from gateway.api.responses.history import id_of, numbered
from gateway.api.responses.lowering import seal
from gateway.api.responses.request import ContentPart, InputItem, InputTokensRequest, ResponsesRequest
from protocol.from_worker import Delta, DeltaKind, Usage

SUMMARY_TOKENS_MAX: Final = 4096
SUMMARY_INSTRUCTION: Final = (
    "Summarize our conversation so far, for yourself: from now on you will see your summary and my messages only. "
    "Keep what is needed to go on: decisions, facts, names of files, results of tools, and what is still to be done. "
    "Answer with the summary alone."
)

_encode = msgspec.json.Encoder().encode


def summary_request(request: InputTokensRequest) -> ResponsesRequest:
    """Return the request for a summary of the conversation of `request`, without tools or reasoning."""
    return ResponsesRequest(
        model=request.model,
        instructions=request.instructions,
        input=SUMMARY_INSTRUCTION,
        reasoning_effort="none",
        max_output_tokens=SUMMARY_TOKENS_MAX,
        store=False,
    )


class SummaryFold:
    """`Fold` that collects the model's summary. The answer has the summary and the user's messages of the
    conversation.
    """

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
        kept = [
            _listed(item)
            for item in numbered(self._conversation, stem)
            if item.kind == "message" and item.role == "user"
        ]
        summary = InputItem("compaction", f"cmp_{stem}", encrypted_content=seal("".join(self._texts)))
        usage = out.ResponseUsage.of(self._usage)
        return _encode(out.CompactedResponse(id_of(stem), serve.now(), [*kept, summary], usage))


def _listed(item: InputItem) -> InputItem:
    content = [ContentPart("input_text", item.content)] if isinstance(item.content, str) else item.content
    return msgspec.structs.replace(item, content=content, status="completed")

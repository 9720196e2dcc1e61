"""State of a response before its generation: the fields of the request with defaults filled in.

All events about a response repeat these fields. A large one is encoded once, as `Raw`, which replaces the decoded value
in the response. An event is encoded with a gap in its place, and the value is sent in slices.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw

from gateway.api.common.sampling import sampling_values
from gateway.api.responses import response as out
from gateway.api.responses.request import ResponsesRequest, SummarizedReasoning, TextSpec
from gateway.api.responses.tools import Toolbox, plain_choice
from gateway.config.settings import ModelConfig
from gateway.http.direct_write import EventWriter
from gateway.http.exchange import SLICE_BYTES

# A field of at least this size is large.
LARGE_FIELD_BYTES: Final = 64 * 1024
# Values of the fields in events that leave the large ones out.
_EMPTY: Final[dict[str, Any]] = {
    "instructions": None,
    "tools": [],
    "tool_choice": "auto",
    "text": out.TextEcho(out.FormatEcho()),
    "metadata": {},
    "user": UNSET,
    "prompt_cache_key": None,
    "safety_identifier": None,
}
# Before the digit of a field in an event with gaps. JSON has no such byte.
_GAP: Final = b"\0"

_encode = msgspec.json.Encoder().encode


def echo(
    request: ResponsesRequest, box: Toolbox, model: ModelConfig, response_id: str, created_at: int, is_stored: bool
) -> out.Response:
    """Return the response with which a stream begins."""
    sampling = sampling_values(request, model.sampling)
    return out.Response(
        id=response_id,
        created_at=created_at,
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=model.full_name,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        presence_penalty=sampling["presence_penalty"],
        frequency_penalty=sampling["frequency_penalty"],
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=_reasoning(request.reasoning),
        safety_identifier=request.safety_identifier,
        store=is_stored,
        temperature=sampling["temperature"],
        text=_text(request.text),
        tool_choice=plain_choice(request.tool_choice),
        tools=box.echo,
        top_logprobs=request.top_logprobs or 0,
        top_p=sampling["top_p"],
        truncation=request.truncation or "disabled",
        user=UNSET if request.user is None else request.user,
        metadata=request.metadata or {},
    )


def _reasoning(spec: SummarizedReasoning | None) -> out.ReasoningEcho:
    return out.ReasoningEcho(None, None) if spec is None else out.ReasoningEcho(spec.effort, spec.summary)


def _text(spec: TextSpec | None) -> out.TextEcho:
    if spec is None:
        return out.TextEcho(out.FormatEcho())
    fields = {} if spec.format is None else msgspec.structs.asdict(spec.format)
    return out.TextEcho(out.FormatEcho(**fields), spec.verbosity or "medium")


def with_large_encoded(response: out.Response) -> out.Response:
    """Return the response with its large fields encoded. May run in any thread."""
    encoded = {name: _encode(value) for name, value in _fields(response) if value is not UNSET}
    large = {name: Raw(data) for name, data in encoded.items() if len(data) >= LARGE_FIELD_BYTES}
    return msgspec.structs.replace(response, **large) if large else response


def large_values(response: out.Response) -> dict[int, memoryview]:
    """Return the encoded large fields by the numbers of their gaps."""
    return {number: memoryview(value) for number, (_, value) in enumerate(_fields(response)) if isinstance(value, Raw)}


def large_bytes(response: out.Response) -> int:
    """Return the size of the encoded large fields."""
    return sum(map(len, large_values(response).values()))


def without_large(response: out.Response) -> out.Response:
    """Return the response with its large fields left empty."""
    large = {name: _EMPTY[name] for name, value in _fields(response) if isinstance(value, Raw)}
    return msgspec.structs.replace(response, **large) if large else response


def with_gaps(response: out.Response) -> out.Response:
    """Return the response with gaps in place of its large fields, for JSON that is sent in parts."""
    names = list(_EMPTY)
    large = {names[number]: Raw(_GAP + b"%d" % number) for number in large_values(response)}
    return msgspec.structs.replace(response, **large) if large else response


def pieces(data: bytes) -> list[bytes | int]:
    """Split JSON at its gaps: the number of each gap stands between two pieces."""
    first, *rest = data.split(_GAP)
    split: list[bytes | int] = [first]
    for piece in rest:
        split += [int(piece[:1]), piece[1:]]
    return split


def parts(response: out.Response, data: bytes) -> Sequence[memoryview]:
    """Return JSON in parts, with the large fields of the response in its gaps."""
    values = large_values(response)
    return [values[piece] if isinstance(piece, int) else memoryview(piece) for piece in pieces(data)]


def slices(response: out.Response, data: bytes, writer: EventWriter | None) -> Iterator[bytes] | None:
    """Return slices of events whose gaps have the large fields of the response; None if the events are small and have
    no gaps.
    """
    if len(data) <= SLICE_BYTES and _GAP not in data:
        return None
    return _slices(response, data, writer)


def _slices(response: out.Response, data: bytes, writer: EventWriter | None) -> Iterator[bytes]:
    if writer is not None:
        writer.is_within_event = True
    for part in parts(response, data):
        for at in range(0, len(part), SLICE_BYTES):
            yield bytes(part[at : at + SLICE_BYTES])
    if writer is not None:
        writer.is_within_event = False


def _fields(response: out.Response) -> list[tuple[str, Any]]:
    return [(name, getattr(response, name)) for name in _EMPTY]

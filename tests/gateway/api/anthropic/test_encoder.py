"""Canonical events as Anthropic's: the grammar of the stream, and that the whole answer is its fold."""

import json
from typing import Any

from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from gateway.api.anthropic.response import MessageFold, MessageStream
from gateway.errors import ApiError, Unavailable
from protocol.from_worker import Delta, DeltaKind, Finish, ToolCallDelta, Usage
from tests.support.merged import merge_blocks

RID = 10
_published: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def events(data: bytes) -> list[Any]:
    """The data of each event, whose name is its type."""
    found: list[Any] = []
    for block in data.decode().split("\n\n")[:-1]:
        name, line = block.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def encode(*batches: list[Delta]) -> tuple[list[Any], Any]:
    stream, fold = MessageStream("msg_1", "m"), MessageFold("msg_1", "m")
    stream.bind([RID])
    fold.bind([RID])
    data = stream.begin(9)
    for batch in batches:
        data += stream.encode(batch)
        fold.add(batch)
    return events(data + stream.end()), json.loads(fold.result())


# -- any sequence of events ------------------------------------------------------------------------------------------

_texts = st.text(max_size=6)
_arguments = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=3).map(json.dumps)


@st.composite
def _sequence(draw: st.DrawFn) -> list[Delta]:
    deltas: list[Delta] = []
    tools = 0
    for kind in draw(
        st.lists(st.sampled_from([DeltaKind.TEXT, DeltaKind.REASONING, DeltaKind.TOOL_BEGIN]), max_size=8)
    ):
        if kind is not DeltaKind.TOOL_BEGIN:
            deltas.append(Delta(RID, kind, draw(_texts)))
            continue
        arguments = draw(_arguments)
        arguments = arguments[: draw(st.integers(0, len(arguments)))] if draw(st.booleans()) else arguments
        cut = draw(st.integers(0, len(arguments)))
        deltas.append(Delta(RID, kind, tool=ToolCallDelta(tools, f"call_{tools}", "f")))
        deltas += [
            Delta(RID, DeltaKind.TOOL_ARGS, t, tool=ToolCallDelta(tools)) for t in (arguments[:cut], arguments[cut:])
        ]
        deltas.append(Delta(RID, DeltaKind.TOOL_END, tool=ToolCallDelta(tools)))
        tools += 1
    finish = draw(st.sampled_from([Finish.STOP, Finish.LENGTH, Finish.TOOL_CALLS]))
    stop = draw(st.sampled_from(["", "END"]))
    cached, fresh, completion = draw(st.integers(0, 9)), draw(st.integers(1, 9)), draw(st.integers(0, 9))
    usage = Usage(fresh + cached, cached, completion, draw(st.integers(0, completion)))
    return [*deltas, Delta(RID, text=draw(_texts), finish=finish, usage=usage, stop=stop)]


@given(_sequence(), st.integers(1, 5))
def test_the_whole_message_is_the_fold_of_its_stream(deltas: list[Delta], size: int) -> None:
    stream, whole = encode(*[deltas[at : at + size] for at in range(0, len(deltas), size)])

    assert merge_blocks(stream) == whole["content"]
    assert stream[-2]["delta"] == {key: whole[key] for key in ("stop_reason", "stop_sequence")}
    assert stream[-2]["usage"] == whole["usage"]
    start = stream[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["input_tokens"]) == ([], None, 9)
    assert {key: start[key] for key in ("id", "model", "role", "type")} == {
        key: whole[key] for key in ("id", "model", "role", "type")
    }


@given(_sequence())
def test_everything_has_the_published_shape(deltas: list[Delta]) -> None:
    stream, whole = encode(deltas)

    Message.model_validate(whole, strict=True)
    for event in stream:
        _published.validate_python(event, strict=True)


# -- shapes ----------------------------------------------------------------------------------------------------------


def _end(finish: Finish = Finish.STOP, **fields: Any) -> Delta:
    return Delta(RID, finish=finish, usage=Usage(9, 4, 3, 2), **fields)


def test_thinking_then_text_then_calls() -> None:
    stream, whole = encode(
        [
            Delta(RID, DeltaKind.REASONING, "hm"),
            Delta(RID, text="Listing."),
            Delta(RID, DeltaKind.TOOL_BEGIN, tool=ToolCallDelta(0, "toolu_1", "ls")),
            Delta(RID, DeltaKind.TOOL_ARGS, '{"path": "."}', tool=ToolCallDelta(0)),
            Delta(RID, DeltaKind.TOOL_END, tool=ToolCallDelta(0)),
            _end(Finish.TOOL_CALLS),
        ]
    )

    assert [event["type"].removeprefix("content_block_") for event in stream] == [
        *("message_start", "start", "delta", "delta", "stop", "start", "delta", "stop", "start", "delta", "stop"),
        *("message_delta", "message_stop"),
    ]
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][0]["signature"]
    assert whole["content"][2] == {"type": "tool_use", "id": "toolu_1", "name": "ls", "input": {"path": "."}}
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"] == {
        "input_tokens": 5,
        "output_tokens": 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens_details": {"thinking_tokens": 2},
    }


def test_a_stop_sequence_is_reported() -> None:
    _, whole = encode([Delta(RID, text="a"), _end(stop="END")])

    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "END")


def test_each_block_of_thinking_has_a_signature_of_its_own() -> None:
    said = [Delta(RID, DeltaKind.REASONING, "a"), Delta(RID, text="b"), Delta(RID, DeltaKind.REASONING, "a"), _end()]
    _, whole = encode(said)

    first, _, second = whole["content"]
    assert first["signature"] == second["signature"]


def test_an_answer_of_nothing_has_one_empty_text() -> None:
    stream, whole = encode([_end()])

    assert whole["content"] == merge_blocks(stream) == [{"type": "text", "text": ""}]


def test_pings_and_errors_are_events() -> None:
    stream = MessageStream("msg_1", "m")

    assert events(stream.keepalive()) == [{"type": "ping"}]
    assert events(stream.error(Unavailable("gone", 1, "worker_died"))) == [
        {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}}
    ]


def test_an_overflow_has_the_words_that_clients_parse() -> None:
    error = ApiError(400, "too long", code="context_length_exceeded", numbers=(5000, 4096))
    [event] = events(MessageStream("msg_1", "m").error(error))

    assert event["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 5000 tokens > 4096 maximum",
    }

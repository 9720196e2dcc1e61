import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.api.responses import response as out
from gateway.api.responses.encoder import QueuedStream, ResponseEncoder, ResponseRun, echo
from gateway.api.responses.items import InputReader, ResponseOutput
from gateway.api.responses.request import decode_responses, toolbox
from gateway.config.settings import ModelConfig
from gateway.errors import Overloaded, Unavailable, from_failure
from gateway.request.body_memory import LARGE_BYTES
from protocol.failures import Code, Failure
from protocol.from_worker import Delta, DeltaKind, Finish, TokenLogprob, ToolCallDelta, Usage
from tests.support.merged import merge_items

RID = 5
TOOLS = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "ns", "description": "d", "tools": [{"type": "function", "name": "g"}]},
]
BODY: dict[str, Any] = {"model": "m", "input": "hi", "tools": TOOLS, "metadata": {"a": "b"}}
_event = TypeAdapter[Any](ResponseStreamEvent)


def run(kept: list[out.Response] | None = None, sealed: bool = False) -> ResponseRun:
    request = decode_responses(json.dumps(BODY).encode())[0]
    box = toolbox(request)
    response = echo(request, box, ModelConfig(name="m", path="m"), "resp_1", 100, is_stored=True)
    return ResponseRun(
        response,
        ResponseOutput("1", box.forms, sealed),
        lambda: 200,
        ([] if kept is None else kept).append,
        lambda rids: None,
    )


def events(data: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for block in data.decode().split("\n\n")[:-1]:
        name, _, body = block.partition("\n")
        event = json.loads(body.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


# -- any sequence of events ------------------------------------------------------------------------------------------

_texts = st.text(max_size=5)
_logprobs = st.none() | st.lists(st.builds(TokenLogprob, st.binary(max_size=3), st.floats(-9, 0)), max_size=2).map(
    tuple
)


@st.composite
def _batches(draw: st.DrawFn) -> list[list[Delta]]:
    deltas: list[Delta] = []
    tools = 0
    for kind in draw(
        st.lists(st.sampled_from([DeltaKind.TEXT, DeltaKind.REASONING, DeltaKind.TOOL_BEGIN]), max_size=7)
    ):
        if kind is not DeltaKind.TOOL_BEGIN:
            deltas.append(Delta(RID, kind, draw(_texts), logprobs=draw(_logprobs)))
            continue
        name = draw(st.sampled_from(["f", "patch", "ns__g", "unknown"]))
        deltas.append(Delta(RID, kind, tool=ToolCallDelta(tools, f"call_{tools}", name)))
        pieces = draw(
            st.lists(st.sampled_from(['{"input"', ': "a', "\\n", "\\ud83d", "\\ude00", '"}', "zz"]), max_size=6)
        )
        deltas += [Delta(RID, DeltaKind.TOOL_ARGS, piece, tool=ToolCallDelta(tools)) for piece in pieces]
        deltas.append(Delta(RID, DeltaKind.TOOL_END, tool=ToolCallDelta(tools)))
        tools += 1
    finish = draw(st.sampled_from([Finish.STOP, Finish.LENGTH, Finish.TOOL_CALLS]))
    usage = Usage(draw(st.integers(1, 9)), draw(st.integers(0, 9)), draw(st.integers(0, 9)))
    deltas.append(Delta(RID, text=draw(_texts), logprobs=draw(_logprobs), finish=finish, usage=usage))
    batches: list[list[Delta]] = []
    while deltas:
        size = draw(st.integers(1, len(deltas)))
        batches.append(deltas[:size])
        del deltas[:size]
    return batches


@given(_batches(), st.booleans())
def test_a_response_is_the_fold_of_its_stream(batches: list[list[Delta]], sealed: bool) -> None:
    stream, fold = ResponseEncoder(run(sealed=sealed)), ResponseEncoder(run(sealed=sealed))
    stream.bind([RID])
    fold.bind([RID])
    data = b""
    for index, batch in enumerate(batches):
        # The beginning is written when there is something to write after it.
        first = stream.encode(batch)
        data += stream.begin(3) + first if index == 0 else first
        fold.add(batch)
    found = events(data + stream.end())
    whole = json.loads(fold.result())

    assert found[-1]["response"] == whole
    assert merge_items(found) == whole["output"]
    assert found[0]["type"] == "response.created"
    assert found[1]["type"] == "response.in_progress"
    expected = "response.incomplete" if whole["status"] == "incomplete" else "response.completed"
    assert found[-1]["type"] == expected


@given(_batches())
def test_every_event_and_response_is_of_the_published_shape(batches: list[list[Delta]]) -> None:
    stream = ResponseEncoder(run())
    stream.bind([RID])
    data = stream.begin(0) + b"".join(stream.encode(batch) for batch in batches) + stream.end()
    for event in events(data):
        _event.validate_python(event)
    last = events(data)[-1]["response"]

    assert Response.model_validate(last).id == "resp_1"
    assert last["usage"]["input_tokens_details"]["cache_write_tokens"] == 0
    assert "user" not in last
    assert last["tools"][0]["strict"] is False


# -- single cases ----------------------------------------------------------------------------------------------------


def said(*deltas: Delta, finish: Finish = Finish.STOP) -> list[dict[str, Any]]:
    stream = ResponseEncoder(run())
    stream.bind([RID])
    body = stream.encode([*deltas, Delta(RID, finish=finish, usage=Usage(1, 0, 1))])
    return events(stream.begin(1) + body + stream.end())


def test_a_text_has_its_events_in_the_order_of_the_specification() -> None:
    found = said(Delta(RID, text="a"), Delta(RID, text="b"))

    assert [event["type"].removeprefix("response.") for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert found[-1]["response"]["completed_at"] == 200


def test_reasoning_is_an_item_with_its_text_and_an_empty_summary() -> None:
    found = said(Delta(RID, DeltaKind.REASONING, "hm"), Delta(RID, text="a"))
    [reasoning, message] = found[-1]["response"]["output"]

    assert reasoning == {
        "type": "reasoning",
        "id": reasoning["id"],
        "content": [{"type": "reasoning_text", "text": "hm"}],
        "summary": [],
    }
    assert message["content"][0]["text"] == "a"
    assert "response.reasoning_text.done" in [event["type"] for event in found]


def test_a_custom_call_is_told_as_plain_text_while_it_is_written() -> None:
    pieces = ['{"in', 'put": "*** Be', "gin\\", 'n\\"x', '\\u00e9"', "}"]
    deltas = [Delta(RID, DeltaKind.TOOL_ARGS, piece, tool=ToolCallDelta(0)) for piece in pieces]
    found = said(
        Delta(RID, DeltaKind.TOOL_BEGIN, tool=ToolCallDelta(0, "call_1", "patch")),
        *deltas,
        Delta(RID, DeltaKind.TOOL_END, tool=ToolCallDelta(0)),
        finish=Finish.TOOL_CALLS,
    )

    told = [event["delta"] for event in found if event["type"] == "response.custom_tool_call_input.delta"]
    assert told == ["*** Be", "gin", '\n"x', "é"]
    [item] = found[-1]["response"]["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", '*** Begin\n"xé')


def test_a_call_into_a_namespace_names_both() -> None:
    begin = Delta(RID, DeltaKind.TOOL_BEGIN, tool=ToolCallDelta(0, "call_1", "ns__g"))
    [item] = said(begin, Delta(RID, DeltaKind.TOOL_END, tool=ToolCallDelta(0)))[-1]["response"]["output"]

    assert (item["name"], item["namespace"], item["call_id"]) == ("g", "ns", "call_1")


def test_an_answer_cut_short_is_incomplete_with_its_last_item() -> None:
    last = said(Delta(RID, text="a"), finish=Finish.LENGTH)[-1]

    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("name", ["f", "patch", "ns__g"])
@pytest.mark.parametrize(("arguments", "status"), [('{"input": "all"}', "completed"), ('{"input": "ha', "incomplete")])
def test_a_call_that_broke_off_is_not_told_as_a_whole_one(name: str, arguments: str, status: str) -> None:
    found = said(
        Delta(RID, DeltaKind.TOOL_BEGIN, tool=ToolCallDelta(0, "call_1", name)),
        Delta(RID, DeltaKind.TOOL_ARGS, arguments, tool=ToolCallDelta(0)),
        Delta(RID, DeltaKind.TOOL_END, tool=ToolCallDelta(0)),
        finish=Finish.LENGTH,
    )
    [done] = [event for event in found if event["type"] == "response.output_item.done"]

    assert done["item"]["status"] == status


def test_an_empty_answer_is_an_empty_message() -> None:
    [item] = said()[-1]["response"]["output"]

    assert item["content"][0]["text"] == ""


def test_log_probabilities_of_held_back_text_are_kept_and_those_of_markup_are_not() -> None:
    one, two = TokenLogprob(b"<t>", -1.0), TokenLogprob(b"a", -2.0)
    found = said(
        Delta(RID, logprobs=(one,)),
        Delta(RID, DeltaKind.REASONING, "x"),
        Delta(RID, logprobs=(two,)),
        Delta(RID, text="a"),
    )
    message = found[-1]["response"]["output"][1]

    assert [entry["token"] for entry in message["content"][0]["logprobs"]] == ["a"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Unavailable("gone"), "server_error"),
        (Overloaded("full", 1.0), "rate_limit_exceeded"),
        (from_failure(Failure(Code.CONTEXT_LENGTH_EXCEEDED, "long")), "context_length_exceeded"),
    ],
)
def test_a_stream_that_fails_ends_with_what_there_was(error: Any, code: str) -> None:
    kept: list[out.Response] = []
    stream = ResponseEncoder(run(kept := kept))
    stream.bind([RID])
    data = stream.begin(0) + stream.encode([Delta(RID, text="half")]) + stream.error(error)
    last = events(data)[-1]

    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == code
    assert last["response"]["output"][0]["content"][0]["text"] == "half"


def test_a_keepalive_is_a_data_event_that_counts() -> None:
    stream = ResponseEncoder(run())
    found = events(stream.begin(0) + stream.keepalive())

    assert [event["type"] for event in found[1:]] == ["response.in_progress"] * 2


# -- the input of custom tools ---------------------------------------------------------------------------------------


@given(st.text(), st.booleans(), st.data())
def test_an_input_is_read_alike_in_any_pieces(text: str, is_ascii: bool, data: st.DataObject) -> None:
    raw = json.dumps({"input": text}, ensure_ascii=is_ascii)
    reader, told, position = InputReader(), "", 0
    while position < len(raw):
        size = data.draw(st.integers(1, len(raw) - position))
        told += reader.feed(raw[position : position + size])
        position += size
    told += reader.finish()

    assert told == reader.value == text


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ('{"patch": "x"}', "x"),
        ('{"a": "x", "input": "y"}', "y"),
        ('"just text"', "just text"),
        ("not json", "not json"),
        ('{"input": 3}', '{"input": 3}'),
        ('{"input": "cut', "cut"),
        ('{"input": "cut\\', "cut"),
        ('{"input": "a\\d \\u12zz"}', "a\\d \\u12zz"),
        ('{"input": "\\ud83d!"}', "\ufffd!"),
        ('{"input": "a\nb"}', "a\nb"),
        ("", ""),
    ],
)
def test_an_input_of_another_shape_is_made_the_best_of(raw: str, value: str) -> None:
    for size in (1, 2, 1000):
        reader = InputReader()
        told = "".join(reader.feed(piece) for piece in re.findall(f"(?s).{{1,{size}}}", raw)) + reader.finish()
        assert told == reader.value == value


@pytest.mark.parametrize("is_large", [False, True])
def test_a_large_request_that_was_refused_is_not_in_what_tells_why(is_large: bool) -> None:
    kept: list[out.Response] = []
    failed = run(kept)
    failed.response = msgspec.structs.replace(failed.response, instructions="words")
    failed.request_bytes = LARGE_BYTES if is_large else 100
    QueuedStream(failed).error(Unavailable("no room"))

    assert (kept[0].status, kept[0].instructions) == ("failed", None if is_large else "words")
    assert bool(kept[0].tools) is not is_large


def test_a_large_request_of_which_there_is_a_part_is_told_with_it() -> None:
    failed = run()
    failed.response = msgspec.structs.replace(failed.response, instructions="words")
    failed.request_bytes = LARGE_BYTES
    stream = QueuedStream(failed)
    stream.encode([Delta(RID, DeltaKind.TEXT, "a")])
    stream.error(Unavailable("the worker ended"))

    assert failed.snapshot().instructions == "words"

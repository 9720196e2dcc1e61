import itertools
import json
import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from gateway.api.openai.chat_and_completions import ChatFold, ChatStream, TextFold, TextStream
from gateway.api.openai.choices import Heading
from gateway.api.openai.response import ChatChunk, ChatChunkChoice, ChatDelta, TextChoice, TextCompletion
from gateway.errors import Unavailable
from protocol.from_worker import Delta, DeltaKind, Finish, PromptLogprob, PromptPart, TokenLogprob, ToolCallDelta, Usage
from tests.support.merged import merge_chat, merge_text

HEADING = Heading("id-1", 1234, 'a "quoted" model', choices=2)
RIDS = (10, 11)


def events(data: bytes) -> list[Any]:
    blocks = [block for block in data.decode().split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block[6:]) for block in blocks if block != "data: [DONE]"]


# -- any sequence of events ------------------------------------------------------------------------------------------

_texts = st.text(max_size=6)
_logprobs = st.none() | st.lists(
    st.builds(
        TokenLogprob,
        st.binary(max_size=4),
        st.floats(-50, 0),
        st.lists(st.tuples(st.binary(max_size=3), st.floats(-50, 0)), max_size=3).map(tuple),
    ),
    max_size=2,
).map(tuple)


@st.composite
def _sequence(draw: st.DrawFn, rid: int) -> list[Delta]:
    deltas: list[Delta] = []
    tools = 0
    for kind in draw(st.lists(st.sampled_from(DeltaKind), max_size=8)):
        if kind in (DeltaKind.TEXT, DeltaKind.REASONING):
            deltas.append(Delta(rid, kind, draw(_texts), logprobs=draw(_logprobs)))
        elif kind is DeltaKind.TOOL_BEGIN:
            deltas.append(Delta(rid, kind, tool=ToolCallDelta(tools, f"call_{tools}", "f")))
            deltas += [
                Delta(rid, DeltaKind.TOOL_ARGS, t, tool=ToolCallDelta(tools))
                for t in draw(st.lists(_texts, max_size=3))
            ]
            deltas.append(Delta(rid, DeltaKind.TOOL_END, tool=ToolCallDelta(tools)))
            tools += 1
    finish = draw(st.sampled_from([Finish.STOP, Finish.LENGTH, Finish.TOOL_CALLS]))
    usage = Usage(draw(st.integers(1, 9)), draw(st.integers(0, 9)), draw(st.integers(0, 9)))
    return [*deltas, Delta(rid, text=draw(_texts), logprobs=draw(_logprobs), finish=finish, usage=usage)]


@st.composite
def _batches(draw: st.DrawFn) -> list[list[Delta]]:
    """Two interleaved sequences, in batches of any size."""
    queues = [draw(_sequence(rid)) for rid in RIDS]
    merged: list[Delta] = []
    while any(queues):
        merged.append(draw(st.sampled_from([queue for queue in queues if queue])).pop(0))
    batches: list[list[Delta]] = []
    while merged:
        size = draw(st.integers(1, len(merged)))
        batches.append(merged[:size])
        del merged[:size]
    return batches


@given(_batches(), st.booleans())
def test_a_chat_answer_is_the_fold_of_its_stream(batches: list[list[Delta]], include_usage: bool) -> None:
    stream, fold = ChatStream(HEADING, include_usage), ChatFold(HEADING)
    stream.bind(RIDS)
    fold.bind(RIDS)
    data = stream.begin(1)
    for batch in batches:
        data += stream.encode(batch)
        fold.add(batch)
    chunks = events(data + stream.end())
    whole = json.loads(fold.result())

    merged = merge_chat(chunks)
    for choice in whole["choices"]:
        told, message = merged[choice["index"]], choice["message"]
        assert told["content"] == (message["content"] or "")
        assert told["reasoning"] == told["reasoning_content"] == message.get("reasoning", "")
        calls = [
            {"id": c["id"], "name": c["function"]["name"], "arguments": c["function"]["arguments"]}
            for c in message.get("tool_calls", [])
        ]
        assert list(told["calls"].values()) == calls
        assert told["logprobs"] == (choice["logprobs"] and choice["logprobs"]["content"])
        assert told["finish"] == choice["finish_reason"]
    if include_usage:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
    else:
        assert all("usage" not in chunk for chunk in chunks)


@given(_batches())
def test_a_text_answer_is_the_fold_of_its_stream(batches: list[list[Delta]]) -> None:
    stream, fold = TextStream(HEADING, True), TextFold(HEADING)
    stream.bind(RIDS)
    fold.bind(RIDS)
    data = stream.begin(1)
    for batch in batches:
        data += stream.encode(batch)
        fold.add(batch)
    chunks = events(data + stream.end())
    whole = json.loads(fold.result())

    merged = merge_text(chunks)
    for choice in whole["choices"]:
        told = merged[choice["index"]]
        assert (told["text"], told["logprobs"]) == (choice["text"], choice["logprobs"])
        assert told["finish"] == choice["finish_reason"]
    assert chunks[-1]["usage"] == whole["usage"]


# -- ids of tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_chat", [True, False])
@given(_batches())
def test_ids_of_a_stream_are_those_of_the_whole_answer_and_its_prompts_come_first(
    is_chat: bool, batches: list[list[Delta]]
) -> None:
    heading = replace(HEADING, sends_ids=True)
    stream = ChatStream(heading, True) if is_chat else TextStream(heading, True)
    fold = ChatFold(heading) if is_chat else TextFold(heading)
    stream.bind(RIDS)
    fold.bind(RIDS)
    count = itertools.count(100)
    expected: dict[int, list[int]] = {0: [], 1: []}
    data = stream.begin(1)
    assert stream.keepalive().startswith(b":")
    opening = [Delta(rid, prompt=PromptPart((rid, 1))) for rid in RIDS]
    for batch in [opening, *batches]:
        told = [
            structs.replace(delta, token_ids=(next(count),), ending_ids=(next(count),) if delta.finish else ())
            if delta.prompt is None
            else delta
            for delta in batch
        ]
        for delta in told:
            expected[RIDS.index(delta.rid)] += (*delta.token_ids, *delta.ending_ids)
        data += stream.encode(told)
        fold.add(told)
    chunks = events(data + stream.end())
    whole = json.loads(fold.result())

    assert {choice["index"]: choice["token_ids"] for choice in whole["choices"]} == expected
    streamed: dict[int, list[int]] = {0: [], 1: []}
    prompts: dict[int, list[int]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            place = chunk if is_chat else choice
            assert ("prompt_token_ids" in place) == (choice["index"] not in prompts), "in the first chunk alone"
            prompts.setdefault(choice["index"], place.get("prompt_token_ids"))
            streamed[choice["index"]] += choice.get("token_ids", [])
    assert streamed == expected
    assert prompts == {0: [10, 1], 1: [11, 1]}
    if is_chat:
        assert whole["prompt_token_ids"] == [10, 1]
    else:
        assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [[10, 1], [11, 1]]


def test_log_probabilities_of_a_prompt_are_vllms_and_those_of_its_choices_are_one() -> None:
    heading = replace(HEADING, choices=4, choices_per_prompt=2)
    chat, text = ChatFold(replace(HEADING, choices_per_prompt=2)), TextFold(heading)
    first = PromptLogprob(5, b"a", float("nan"), 0)
    likely = PromptLogprob(6, b"b", -0.5, 1, ((6, b"b", -0.5), (9, b"\xe2", -0.5), (8, b"c", -2.0)))
    unlikely = PromptLogprob(7, b"d", -math.inf, 90, ((6, b"b", -0.5),))
    parts = [PromptPart(logprobs=(first,)), PromptPart(logprobs=(likely, unlikely))]
    form = [
        None,
        {
            "6": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "9": {"logprob": -0.5, "rank": 1, "decoded_token": "\ufffd"},
            "8": {"logprob": -2.0, "rank": 3, "decoded_token": "c"},
        },
        {
            "7": {"logprob": -9999.0, "rank": 90, "decoded_token": "d"},
            "6": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
        },
    ]
    for fold, rids in ((chat, (10, 11)), (text, (10, 11, 12, 13))):
        fold.bind(rids)
        fold.add([Delta(10, prompt=part) for part in parts])
        fold.add([Delta(rid, text="x", finish=Finish.STOP, usage=Usage(3, 0, 1)) for rid in rids])
    assert json.loads(chat.result())["prompt_logprobs"] == form
    choices = json.loads(text.result())["choices"]
    assert [choice.get("prompt_logprobs") for choice in choices] == [form, form, None, None]
    assert list(choices[0]["prompt_logprobs"][2]) == ["7", "6"], "the token itself comes first"


# -- the prebuilt chunk ----------------------------------------------------------------------------------------------

AWKWARD = [
    "plain",
    'quote " and \\ backslash',
    "new\nline\r\n\t",
    "\x00\x1f\x7f",
    "é ü 漢字 🙂",
    "\u2028\u2029</script>",
]


@pytest.mark.parametrize("text", AWKWARD)
@pytest.mark.parametrize("include_usage", [False, True])
def test_the_prebuilt_chat_chunk_equals_the_encoded_struct_byte_for_byte(text: str, include_usage: bool) -> None:
    stream = ChatStream(HEADING, include_usage)
    stream.bind(RIDS)

    chunk = ChatChunk(
        HEADING.id,
        HEADING.created,
        HEADING.model,
        [ChatChunkChoice(1, ChatDelta(content=text))],
        None if include_usage else msgspec.UNSET,
    )
    assert stream.encode([Delta(11, text=text)]) == b"data: " + msgspec.json.encode(chunk) + b"\n\n"


@pytest.mark.parametrize("text", AWKWARD)
def test_the_prebuilt_text_chunk_equals_the_encoded_struct_byte_for_byte(text: str) -> None:
    stream = TextStream(HEADING, False)
    stream.bind(RIDS)

    chunk = TextCompletion(HEADING.id, HEADING.created, HEADING.model, [TextChoice(1, text)])
    assert stream.encode([Delta(11, text=text)]) == b"data: " + msgspec.json.encode(chunk) + b"\n\n"


# -- shapes ----------------------------------------------------------------------------------------------------------


def test_the_role_comes_first_for_each_choice() -> None:
    first, second = events(ChatStream(HEADING, False).begin(1))

    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert [first["choices"][0]["index"], second["choices"][0]["index"]] == [0, 1]
    assert first["object"] == "chat.completion.chunk"


def test_a_tool_name_and_id_are_sent_once() -> None:
    stream = ChatStream(HEADING, False)
    stream.bind(RIDS)
    deltas = [
        Delta(10, DeltaKind.TOOL_BEGIN, tool=ToolCallDelta(0, "call_1", "get_weather")),
        Delta(10, DeltaKind.TOOL_ARGS, '{"a"', tool=ToolCallDelta(0)),
        Delta(10, DeltaKind.TOOL_ARGS, ":1}", tool=ToolCallDelta(0)),
        Delta(10, DeltaKind.TOOL_END, tool=ToolCallDelta(0)),
        Delta(10, finish=Finish.TOOL_CALLS, usage=Usage(1, 0, 1)),
    ]

    choices = [event["choices"][0] for event in events(stream.encode(deltas))]

    assert [choice["delta"].get("tool_calls") for choice in choices] == [
        [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"a"'}}],
        [{"index": 0, "function": {"arguments": ":1}"}}],
        None,
    ]
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_a_message_with_only_tool_calls_has_null_content_and_whole_arguments() -> None:
    fold = ChatFold(HEADING)
    fold.bind(RIDS)
    fold.add(
        [
            Delta(10, DeltaKind.TOOL_BEGIN, tool=ToolCallDelta(0, "call_1", "f")),
            Delta(10, DeltaKind.TOOL_ARGS, "{}", tool=ToolCallDelta(0)),
            Delta(10, finish=Finish.TOOL_CALLS, usage=Usage(1, 0, 1)),
            Delta(11, text="x", finish=Finish.STOP, usage=Usage(1, 0, 1)),
        ]
    )

    first, second = json.loads(fold.result())["choices"]

    assert first["message"] == {
        "content": None,
        "role": "assistant",
        "refusal": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    assert second["message"] == {"content": "x", "role": "assistant", "refusal": None}


def test_who_sends_functions_gets_a_function_call() -> None:
    heading = Heading("i", 0, "m", choices=1, is_legacy=True)
    stream, fold = ChatStream(heading, False), ChatFold(heading)
    deltas = [
        Delta(10, DeltaKind.TOOL_BEGIN, tool=ToolCallDelta(0, "call_1", "f")),
        Delta(10, DeltaKind.TOOL_ARGS, "{}", tool=ToolCallDelta(0)),
        Delta(10, finish=Finish.TOOL_CALLS, usage=Usage(1, 0, 1)),
    ]
    stream.bind((10,))
    fold.bind((10,))
    fold.add(deltas)

    chunks = [event["choices"][0] for event in events(stream.encode(deltas))]
    [choice] = json.loads(fold.result())["choices"]

    assert [chunk["delta"].get("function_call") for chunk in chunks] == [
        {"name": "f", "arguments": ""},
        {"arguments": "{}"},
        None,
    ]
    assert choice["message"]["function_call"] == {"name": "f", "arguments": "{}"}
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == "function_call"


def test_a_prompt_with_two_choices_is_counted_once() -> None:
    fold = TextFold(Heading("i", 0, "m", choices=4, choices_per_prompt=2))
    fold.bind((1, 2, 3, 4))
    fold.add([Delta(rid, finish=Finish.STOP, usage=Usage(10 * rid, 1, 5, reasoning=2)) for rid in (1, 2, 3, 4)])

    assert json.loads(fold.result())["usage"] == {
        "prompt_tokens": 40,
        "completion_tokens": 20,
        "total_tokens": 60,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 8},
    }


def test_log_probabilities_of_held_back_text_are_not_lost() -> None:
    stream = ChatStream(HEADING, False)
    stream.bind(RIDS)

    [event] = events(stream.encode([Delta(10, logprobs=(TokenLogprob(b"\xe2", float("-inf"), ((b"a", -1.0),)),))]))

    assert event["choices"][0]["delta"] == {"content": ""}
    assert event["choices"][0]["logprobs"]["content"] == [
        {
            "token": "\ufffd",
            "bytes": [0xE2],
            "logprob": -9999.0,
            "top_logprobs": [{"token": "a", "bytes": [97], "logprob": -1.0}],
        }
    ]


def test_legacy_log_probabilities_count_characters_over_tokens_cut_in_bytes() -> None:
    fold = TextFold(Heading("i", 0, "m", choices=1))
    fold.bind((1,))
    tokens = [b"a", "é".encode()[:1], "é".encode()[1:], b"b"]
    fold.add([Delta(1, logprobs=tuple(TokenLogprob(token, -1.0) for token in tokens))])
    fold.add([Delta(1, text="aéb", finish=Finish.STOP, usage=Usage(1, 0, 4))])

    logprobs = json.loads(fold.result())["choices"][0]["logprobs"]

    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert logprobs["top_logprobs"][0] == {"a": -1.0}


def test_keepalives_mean_nothing_and_errors_have_openais_shape() -> None:
    chat, text = ChatStream(HEADING, True), TextStream(HEADING, True)

    [event] = events(chat.keepalive())
    assert event["choices"][0]["delta"] == {"content": ""}
    assert event["choices"][0]["finish_reason"] is None
    assert text.keepalive().startswith(b":")
    [failed] = events(chat.error(Unavailable("gone", 1, "worker_died")))
    assert failed == {
        "error": {"message": "gone", "type": "service_unavailable_error", "param": None, "code": "worker_died"}
    }

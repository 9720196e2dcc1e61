"""Frames: every message survives the wire, and nothing that is no message gets through or raises anything else."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from protocol import codec
from protocol.failures import Code, Failure
from protocol.from_worker import (
    Accepted,
    Delta,
    DeltaKind,
    Drained,
    Finish,
    Goodbye,
    Hello,
    Loading,
    Pong,
    Progress,
    Ready,
    Rejected,
    Step,
    TokenLogprob,
    ToolCallDelta,
    Up,
    Usage,
)
from protocol.stats import Stats
from protocol.to_worker import (
    Abort,
    ChatPrompt,
    Down,
    Drain,
    Dump,
    Generate,
    Ping,
    Sampling,
    Shutdown,
    TextPrompt,
    TokensPrompt,
    Welcome,
)
from tests.protocol import golden_frames

FRAMES = [codec.encode(message) for message in (*golden_frames.down(), *golden_frames.up())]

whole = st.integers(-(2**63), 2**64 - 1)
count = st.integers(0, 2**40)
real = st.floats(allow_nan=False)
texts = st.text(max_size=20)
plain = st.recursive(
    st.none() | st.booleans() | whole | real | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
records = st.dictionaries(texts, plain, max_size=4)
failures = st.builds(Failure, st.sampled_from(Code), texts, texts, st.none() | texts)
prompts = (
    st.builds(ChatPrompt, st.lists(records, max_size=3), st.lists(records, max_size=2), records, st.booleans())
    | st.builds(TextPrompt, texts)
    | st.builds(TokensPrompt, st.lists(whole, max_size=5).map(tuple))
)
samplings = st.builds(
    Sampling,
    st.floats(0, 2),
    st.floats(0, 1),
    count,
    st.floats(0, 1),
    st.floats(0.01, 1e6),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.dictionaries(whole, st.floats(-100, 100), max_size=3),
    whole,
    st.booleans(),
)
down = (
    st.builds(Welcome, whole, whole, real)
    | st.builds(
        Generate, whole, prompts, samplings, st.none() | count, st.lists(texts, max_size=3).map(tuple),
        st.none() | count, st.booleans(), whole, whole, st.booleans(), texts,
    )
    | st.builds(Abort, st.lists(whole, max_size=4).map(tuple), texts)
    | st.builds(Ping, whole, whole)
    | st.builds(Drain, real)
    | st.builds(Shutdown, texts)
    | st.builds(Dump, whole)
)  # fmt: skip
logprobs = st.builds(
    TokenLogprob, st.binary(max_size=6), real, st.lists(st.tuples(st.binary(max_size=4), real), max_size=3).map(tuple)
)
deltas = st.builds(
    Delta, whole, st.sampled_from(DeltaKind), texts, st.lists(count, max_size=4).map(tuple),
    st.none() | st.builds(ToolCallDelta, count, texts, texts), st.none() | st.lists(logprobs, max_size=3).map(tuple),
    st.none() | st.sampled_from(Finish),
    st.none() | st.builds(Usage, count, count, count, count, real, real, real), st.none() | failures,
)  # fmt: skip
stats = st.builds(Stats, *[count] * 11)
up = (
    st.builds(Hello, texts, whole, whole, whole, whole, texts, texts, texts)
    | st.builds(Loading, whole, texts, count, count)
    | st.builds(Ready, whole, texts, count, count, count, count, real, texts, st.booleans())
    | st.builds(Accepted, whole, count)
    | st.builds(Rejected, whole, failures)
    | st.builds(Step, whole, count, st.lists(deltas, max_size=3), st.none() | stats)
    | st.builds(Progress, whole, count, count, count, count)
    | st.builds(Pong, whole, whole, stats)
    | st.builds(Drained, whole, count)
    | st.builds(Goodbye, whole, texts, st.none() | failures)
)


@given(down)
def test_every_message_to_a_worker_survives_the_wire(message: Down) -> None:
    assert codec.decode_down(codec.encode(message)) == message


@given(up)
def test_every_message_from_a_worker_survives_the_wire(message: Up) -> None:
    assert codec.decode_up(codec.encode(message)) == message


def decode_both(frame: bytes) -> None:
    """Each direction either decodes the frame or says that it is malformed."""
    for decode in (codec.decode_down, codec.decode_up):
        try:
            decode(frame)
        except codec.MalformedFrame:
            continue


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", -0.1), ("temperature", 2.5), ("temperature", math.nan), ("top_p", 1.5), ("top_k", -1),
        *(("repetition_penalty", value) for value in (0.0, -1.0, 1e-38, 0.009, 1e7, math.inf, math.nan)),
        ("min_p", -0.1), ("presence_penalty", 3.0), ("frequency_penalty", -2.5), ("logit_bias", {7: 101.0}),
        ("typical_p", 0.0), ("bias_texts", (("no", -200.0),)), ("min_tokens", -1), ("dry_base", 5.0),
        ("xtc_threshold", 2.0), ("max_tokens", -1), ("top_logprobs", -1), ("prompt_logprobs", -1), ("sparse_keep", 1.5),
        ("sparse_keep", -0.1), ("thinking_budget", -1), ("stop", (5,)),
    ],
)  # fmt: skip
def test_a_request_with_a_value_out_of_range_is_refused_by_the_name_of_its_field(param: str, value: Any) -> None:
    is_sampling = param in Sampling.__struct_fields__
    request = Generate(
        7,
        TokensPrompt((1,)),
        Sampling(**{param: value}) if is_sampling else Sampling(),
        **{} if is_sampling else {param: value},
    )
    with pytest.raises(codec.RefusedRequest, match=f"Invalid value for '{param}': expected ") as refused:
        codec.decode_down(codec.encode(request))
    assert (refused.value.rid, refused.value.param) == (7, param)


def test_each_number_of_the_sampling_but_the_seed_has_a_range() -> None:
    fields = inspect.type_info(Sampling).fields
    numbers = [each for each in fields if isinstance(each.type, inspect.IntType | inspect.FloatType)]
    without = [each.name for each in numbers if each.type.ge is None and each.type.gt is None]
    assert len(numbers) > 15
    assert without == ["seed"]


@given(st.binary(max_size=200))
def test_random_bytes_are_malformed_and_nothing_worse(frame: bytes) -> None:
    decode_both(frame)


@given(st.sampled_from(FRAMES), st.data())
def test_a_damaged_frame_is_malformed_or_another_message(frame: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(frame) - 1))
    damaged = bytearray(frame)
    damaged[at] = data.draw(st.integers(0, 255))
    decode_both(bytes(damaged))


@given(st.recursive(plain | st.binary(max_size=8), lambda inner: st.lists(inner, max_size=6), max_leaves=20))
def test_other_msgpack_is_malformed_or_a_message(value: Any) -> None:
    decode_both(msgspec.msgpack.encode(value))


@pytest.mark.parametrize("frame", FRAMES)
def test_a_truncated_frame_is_malformed(frame: bytes) -> None:
    decode = codec.decode_down if frame in FRAMES[: len(golden_frames.down())] else codec.decode_up
    for size in range(len(frame)):
        with pytest.raises(codec.MalformedFrame):
            decode(frame[:size])


@pytest.mark.parametrize("frame", FRAMES)
def test_bytes_after_a_frame_are_malformed(frame: bytes) -> None:
    decode = codec.decode_down if frame in FRAMES[: len(golden_frames.down())] else codec.decode_up
    with pytest.raises(codec.MalformedFrame):
        decode(frame + b"\x00")


@pytest.mark.parametrize("tag", [0, 4, 5, 31, 99, -1, 2**40, "2", None, 2.0, [2]])
def test_an_unknown_tag_is_malformed(tag: object) -> None:
    frame = msgspec.msgpack.encode([tag, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    for decode in (codec.decode_down, codec.decode_up):
        with pytest.raises(codec.MalformedFrame):
            decode(frame)


def test_a_message_of_the_other_direction_is_malformed() -> None:
    with pytest.raises(codec.MalformedFrame):
        codec.decode_down(codec.encode(Accepted(1, 2)))
    with pytest.raises(codec.MalformedFrame):
        codec.decode_up(codec.encode(Ping(1, 2)))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x91" * 100_000 + b"\xc0",  # nested deeper than any stack
        msgspec.msgpack.encode([2, 1])[:-1] + b"\x93\x01" + b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",  # an array of four thousand million items
        b"\xdf\xff\xff\xff\xff",
        b"\x93\x06\x01\xa1\xff",  # a string that is no UTF-8
        b"\x92\x0d\xa2\xed\xa0",  # half a surrogate
        b"\x93\x01\x91\x81\xa1a\xd6\xff\x00\x00\x00\x00\x01",  # an extension type
        b"\x92\x01\x91\x81\x81\xa1a\x01\x02",  # a map whose key is a map
        b"\xc1",  # never used in MessagePack
    ],
)
def test_hostile_frames_are_malformed_and_nothing_worse(frame: bytes) -> None:
    for decode in (codec.decode_down, codec.decode_up):
        with pytest.raises(codec.MalformedFrame):
            decode(frame)


@pytest.mark.parametrize(
    "key", [b"\x81\xa1a\x01", b"\x91\x01", b"\xc0", b"\xca\x7f\xc0\x00\x00", b"\xd6\xff\x00\x00\x00\x00", b"\xc4\x01a"]
)
def test_any_kind_of_map_key_inside_a_chat_message_is_decoded_or_malformed(key: bytes) -> None:
    """[2, rid, [1, [{"content": {key: 1}}]], []]"""
    frame = b"\x94\x02\x01\x92\x01\x91\x81\xa7content\x81" + key + b"\x01\x90"
    decode_both(frame)


@pytest.mark.parametrize(
    "value",
    [
        b"\xd6\xff\xff\xff\xff\xff",
        b"\xc7\x0c\xff" + b"\xff" * 12,  # a timestamp beyond every calendar
        b"\xd7\xff" + b"\xff" * 8,
        b"\xd4\x05\x00",
        b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",  # NaN
        b"\xcf" + b"\xff" * 8,
    ],
)
def test_any_kind_of_value_inside_a_chat_message_is_decoded_or_malformed(value: bytes) -> None:
    decode_both(b"\x94\x02\x01\x92\x01\x91\x81\xa7content" + value + b"\x90")


def test_a_message_larger_than_a_frame_may_be_is_refused_where_it_is_made() -> None:
    def generate(text: str) -> Generate:
        return Generate(1, TextPrompt(text), Sampling())

    room = codec.MAX_FRAME_BYTES - len(codec.encode(generate("x" * (1 << 16)))) + (1 << 16)
    assert len(codec.encode(generate("x" * room))) == codec.MAX_FRAME_BYTES
    with pytest.raises(codec.FrameTooLarge) as caught:
        codec.encode(generate("x" * (room + 1)))
    assert caught.value.size_bytes == codec.MAX_FRAME_BYTES + 1


@pytest.mark.parametrize("value", [2**64, "half \ud83d", [[1 << 70]]])
def test_a_message_that_msgpack_cannot_hold_is_refused_as_such(value: Any) -> None:
    with pytest.raises(codec.Unsendable):
        codec.encode(Generate(1, ChatPrompt([{"role": "user", "content": value}]), Sampling()))


def test_a_message_nested_too_deeply_is_refused_as_such() -> None:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(codec.Unsendable):
        codec.encode(Generate(1, ChatPrompt([{"role": "user", "content": value}]), Sampling()))


def test_requests_with_packed_prompts_make_the_same_frames_and_share_the_prompt() -> None:
    shared = ChatPrompt([{"role": "user", "content": "é"}], [{"type": "function"}], {"a": [1]})
    requests = [Generate(rid, prompt, Sampling()) for rid, prompt in enumerate([shared, shared, TextPrompt("x")])]
    packed = codec.pack(requests)

    assert [codec.encode(request) for request in packed] == [codec.encode(request) for request in requests]
    assert packed[0].prompt is packed[1].prompt

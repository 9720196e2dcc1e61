"""Versions of one protocol number read each other, and Hello and Welcome are read by those of any number."""

from typing import Any

import msgspec
import pytest

from protocol import PROTOCOL, codec, from_worker, to_worker
from protocol.from_worker import DeltaKind, Finish, Hello, Up
from protocol.to_worker import Down, Welcome
from tests.protocol import golden_frames

# Hello and Welcome of protocol 1.
EARLIER_HELLO = [32, "qwen", 3, 4242, 1, 1, "0.1.0", "0.32.4", "loading"]
EARLIER_WELCOME = [1, 1, 2**62, 1.0]


def test_only_the_current_number_has_golden_frames() -> None:
    assert list(golden_frames.FOLDER.iterdir()) == [golden_frames.path()]


def test_a_hello_of_another_number_is_read() -> None:
    hello = codec.decode_up(msgspec.msgpack.encode(EARLIER_HELLO))
    assert isinstance(hello, Hello)
    assert (hello.worker, hello.epoch, hello.pid, hello.protocol) == ("qwen", 3, 4242, 1)


@pytest.mark.parametrize(
    ("earlier", "today"),
    [
        (EARLIER_HELLO, Hello("qwen", 3, 4242, PROTOCOL, 0, "0.1.0", "0.32.4", "loading")),
        (EARLIER_WELCOME, Welcome(PROTOCOL, 2**62, 1.0)),
    ],
    ids=["Hello", "Welcome"],
)
def test_hello_and_welcome_keep_their_fields_in_their_places(earlier: list[Any], today: Hello | Welcome) -> None:
    frame = raw(codec.encode(today))
    assert [type(field) for field in frame[: len(earlier)]] == [type(field) for field in earlier]


def test_todays_decoders_read_every_field_of_every_golden_frame() -> None:
    golden = golden_frames.read(golden_frames.path())
    for frame in golden.down:
        assert_begins(raw(codec.encode(codec.decode_down(frame))), raw(frame))
    for frame in golden.up:
        assert_begins(raw(codec.encode(codec.decode_up(frame))), raw(frame))


def test_todays_decoders_read_the_frames_of_the_current_version_as_they_were_written() -> None:
    golden = golden_frames.read(golden_frames.path())
    assert [codec.decode_down(frame) for frame in golden.down] == golden_frames.down()
    assert [codec.decode_up(frame) for frame in golden.up] == golden_frames.up()


def test_todays_frames_begin_with_every_golden_frame() -> None:
    """An old decoder finds each field where it looks for it; new ones come after, and so do new messages."""
    golden = golden_frames.read(golden_frames.path())
    for released, todays in ((golden.down, golden_frames.down()), (golden.up, golden_frames.up())):
        assert len(todays) >= len(released)
        for old, message in zip(released, todays, strict=False):
            assert_begins(raw(codec.encode(message)), raw(old))


def raw(frame: bytes) -> Any:
    return msgspec.msgpack.decode(frame)


def assert_begins(new: Any, old: Any) -> None:
    if not isinstance(old, list):
        assert new == old
        return
    assert isinstance(new, list)
    assert len(new) >= len(old)
    for left, right in zip(new, old, strict=False):
        assert_begins(left, right)


@pytest.mark.parametrize("message", [*golden_frames.down(), *golden_frames.up()], ids=lambda each: type(each).__name__)
def test_a_later_version_can_append_a_field_that_todays_decoder_ignores(message: Any) -> None:
    decode = codec.decode_down if message in golden_frames.down() else codec.decode_up
    frame: list[Any] = msgspec.msgpack.decode(codec.encode(message))
    assert decode(msgspec.msgpack.encode([*frame, "a field of the future", {"and": "another"}])) == message


@pytest.mark.parametrize("message", [*golden_frames.down(), *golden_frames.up()], ids=lambda each: type(each).__name__)
def test_fields_with_a_default_may_be_missing_at_the_end(message: Any) -> None:
    """An older gateway or worker sends fewer fields."""
    decode = codec.decode_down if message in golden_frames.down() else codec.decode_up
    frame: list[Any] = msgspec.msgpack.decode(codec.encode(message))
    defaults = sum(field.default is not msgspec.NODEFAULT for field in msgspec.structs.fields(message))
    required = len(frame) - defaults
    decode(msgspec.msgpack.encode(frame[:required]))
    if required > 1:
        with pytest.raises(codec.MalformedFrame):
            decode(msgspec.msgpack.encode(frame[: required - 1]))


def test_tags_are_never_shared_nor_changed() -> None:
    tags = {
        cls.__name__: cls.__struct_config__.tag
        for module in (to_worker, to_worker, from_worker)
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, msgspec.Struct) and cls.__struct_config__.tag is not None
    }
    assert tags == {
        "ChatPrompt": 1, "TextPrompt": 2, "TokensPrompt": 3, "EmbedPrompt": 4, "ScorePrompt": 5,
        "TranscribePrompt": 6, "SpeechPrompt": 7, "NextTurnPrompt": 8,
        "Welcome": 1, "Generate": 2, "Abort": 3, "Ping": 6, "Drain": 7, "Shutdown": 13, "Dump": 14, "SetMemory": 12,
        "SetLogLevel": 16, "SetPace": 17, "Tokenize": 5, "Detokenize": 15, "Tokenized": 44,
        "Hello": 32, "Loading": 33, "Ready": 34, "Accepted": 35, "Rejected": 36, "Step": 37, "Progress": 38,
        "Pong": 40, "Drained": 41, "Goodbye": 42, "SetAdapters": 18, "AdaptersSet": 45,
        "Explain": 19, "Explained": 46,
    }  # fmt: skip


def test_every_message_of_both_directions_is_golden() -> None:
    for union, samples in ((Down, golden_frames.down()), (Up, golden_frames.up())):
        assert {type(sample) for sample in samples} == set(union.__args__)


def test_kinds_and_finishes_keep_their_numbers() -> None:
    assert [kind.name for kind in sorted(DeltaKind)] == [
        "TEXT",
        "REASONING",
        "TOOL_BEGIN",
        "TOOL_ARGS",
        "TOOL_END",
    ]
    assert [finish.name for finish in sorted(Finish)] == ["STOP", "LENGTH", "TOOL_CALLS", "ABORT", "ERROR"]
    assert sorted(DeltaKind) == list(range(5))
    assert sorted(Finish) == list(range(5))

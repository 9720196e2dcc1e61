"""Media in the requests of all dialects: what reaches the worker, in which order, and what is refused, by its path."""

import base64
import hashlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from gateway.access.caller import Caller
from gateway.api.common import serve
from gateway.config.settings import MediaConfig, ModelConfig, ServerConfig
from gateway.media import read_media
from gateway.media.media_reference import IMAGE, Reference
from gateway.request.record import RequestRecord
from protocol.to_worker import ChatPrompt
from tests.gateway.harness import Gateway, running, until
from tests.gateway.middleware.test_auth import bearer, make
from tests.support.pool import short_home

pytestmark = pytest.mark.anyio

CAT, DOG, BIRD = b"\x89PNG cat", b"\xff\xd8 dog", b"GIF89a bird"
LIMITS = MediaConfig(max_size_bytes=200_000)


@pytest.fixture(autouse=True)
def four_media(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_media, "COUNT_MAX", 4)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway() -> AsyncGenerator[Gateway, None]:
    with short_home() as home:
        async with running(home, worker="seeing", media=LIMITS) as made:
            yield made


@pytest.fixture(scope="module")
async def blind() -> AsyncGenerator[Gateway, None]:
    """A gateway of a model that takes text."""
    with short_home() as home:
        async with running(home, models=[ModelConfig(name="m", path="demo")]) as made:
            yield made


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{encoded(data)}"


def chat_image(data: bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(data), **fields}}


def block(data: bytes) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(data)}}


def input_image(data: bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": uri(data), **fields}


async def chat(gateway: Gateway, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The messages and media that the worker was given."""
    body = {"model": "m", "messages": list(messages), **fields}
    reply = await gateway.client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return json.loads(reply.json()["choices"][0]["message"]["content"])


async def message(gateway: Gateway, *messages: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 5, "messages": list(messages)}
    reply = await gateway.client.post("/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    return json.loads(reply.json()["content"][0]["text"])


async def response(gateway: Gateway, given: list[dict[str, Any]], **fields: Any) -> tuple[str, dict[str, Any]]:
    reply = await gateway.client.post("/v1/responses", json={"model": "m", "input": given, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()["id"], json.loads(reply.json()["output"][0]["content"][0]["text"])


def seen(given: dict[str, Any]) -> list[tuple[str, bytes]]:
    """The media of a prompt, whose digests are of their bytes."""
    for medium in given["media"]:
        assert medium["digest"] == hashlib.blake2b(bytes.fromhex(medium["data"]), digest_size=32).hexdigest()
    return [(medium["kind"], bytes.fromhex(medium["data"])) for medium in given["media"]]


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


async def test_the_order_of_texts_and_images_is_kept(gateway: Gateway) -> None:
    given = await chat(gateway, user(text("a"), text("b"), chat_image(CAT), text("c"), chat_image(DOG)))

    assert given["messages"][0]["content"] == [
        {"type": "text", "text": "ab"}, {"type": "image", "media": 0},
        {"type": "text", "text": "c"}, {"type": "image", "media": 1},
    ]  # fmt: skip
    assert seen(given) == [("image", CAT), ("image", DOG)]
    assert [medium["param"] for medium in given["media"]] == ["messages[0].content[2]", "messages[0].content[4]"]


async def test_a_turn_of_text_stays_a_string_beside_turns_with_images(gateway: Gateway) -> None:
    given = await chat(
        gateway, user(text("a"), text("b")), {"role": "assistant", "content": "c"}, user(chat_image(CAT))
    )

    assert [turn["content"] for turn in given["messages"]] == ["ab", "c", [{"type": "image", "media": 0}]]


@pytest.mark.parametrize(
    ("part", "kind", "data"),
    [
        ({"type": "image_url", "image_url": uri(CAT)}, "image", CAT),
        ({"type": "input_image", "image_url": uri(CAT)}, "image", CAT),
        ({"type": "image", "image": uri(CAT)}, "image", CAT),
        ({"type": "video_url", "video_url": {"url": uri(CAT, "video/mp4")}}, "video", CAT),
        ({"type": "input_video", "video_url": uri(CAT)}, "video", CAT),
        ({"type": "video", "video": uri(CAT)}, "video", CAT),
        ({"type": "input_audio", "input_audio": {"data": encoded(DOG), "format": "wav"}}, "audio", DOG),
        ({"type": "audio_url", "audio_url": {"url": uri(DOG)}}, "audio", DOG),
        ({"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{encoded(CAT)},{encoded(DOG)}"}}, "video",
         len(CAT).to_bytes(4, "big") + CAT + len(DOG).to_bytes(4, "big") + DOG),
    ],
)  # fmt: skip
async def test_every_part_of_a_chat_is_shown(gateway: Gateway, part: dict[str, Any], kind: str, data: bytes) -> None:
    given = await chat(gateway, user(part))

    assert given["messages"][0]["content"] == [{"type": kind, "media": 0}]
    assert seen(given) == [(kind, data)]
    frames = {"frames": 2} if "data:video/jpeg" in str(part) else {}
    assert given["media"][0]["options"] == frames


async def test_options_of_a_request_are_those_of_its_media(gateway: Gateway) -> None:
    given = await chat(
        gateway,
        user(
            chat_image(CAT, detail="low"), chat_image(CAT, detail="high"), {"type": "video_url", "video_url": uri(DOG)}
        ),
        mm_processor_kwargs={"min_pixels": 1024, "max_pixels": 1_000_000, "fps": 1},
        media_io_kwargs={"video": {"num_frames": 8, "fps": 2.5}},
    )

    assert [medium["options"] for medium in given["media"]] == [
        {"min_pixels": 1024, "max_pixels": 512 * 512},
        {"min_pixels": 1024, "max_pixels": 1_000_000},
        {"min_pixels": 1024, "max_pixels": 1_000_000, "num_frames": 8, "fps": 2.5},
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mm_processor_kwargs": {"size": 5}}, "mm_processor_kwargs"),
        ({"mm_processor_kwargs": {"min_pixels": 9, "max_pixels": 8}}, "mm_processor_kwargs.min_pixels"),
        ({"media_io_kwargs": {"video": {"backend": "cv2"}}}, "media_io_kwargs.video"),
        ({"media_io_kwargs": {"image": {}}}, "media_io_kwargs"),
        ({"media_io_kwargs": {"video": {"fps": 0}}}, "media_io_kwargs.video.fps"),
    ],
)
async def test_options_that_cannot_be_honoured_are_refused(
    gateway: Gateway, fields: dict[str, Any], param: str
) -> None:
    body = {"model": "m", "messages": [user(chat_image(CAT))], **fields}
    reply = await gateway.client.post("/v1/chat/completions", json=body)

    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


CALL = {"id": "c", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "c", "name": "shot", "input": {}}
SHOT = [{"type": "text", "text": "before"}, {"type": "image", "media": 0}]


async def test_an_image_in_a_tools_result_is_shown_there_in_every_dialect(gateway: Gateway) -> None:
    asked = {"role": "user", "content": "look"}
    in_chat = await chat(
        gateway,
        asked,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": [text("before"), chat_image(CAT)]},
    )
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text("before"), block(CAT)]}
    in_message = await message(gateway, asked, {"role": "assistant", "content": [USE]}, user(result, text("so?")))
    _, in_response = await response(
        gateway,
        [
            asked,
            {"type": "function_call", "call_id": "c", "name": "shot", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_text", "text": "before"}, input_image(CAT)],
            },
        ],
    )

    for given in (in_chat, in_message, in_response):
        assert given["messages"][2] == {"role": "tool", "tool_call_id": "c", "name": "shot", "content": SHOT}
        assert seen(given) == [("image", CAT)]
    assert in_message["messages"][3] == {"role": "user", "content": "so?"}
    assert [given["media"][0]["param"] for given in (in_chat, in_message, in_response)] == [
        "messages[2].content[1]", "messages.2.content.0.content.1", "input[2].output[1]",
    ]  # fmt: skip


async def test_an_error_of_a_tool_with_an_image_says_so_first(gateway: Gateway) -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "is_error": True, "content": [block(CAT)]}
    given = await message(gateway, {"role": "assistant", "content": [USE]}, user(result))

    assert given["messages"][1]["content"] == [{"type": "text", "text": "Error:"}, {"type": "image", "media": 0}]


async def test_blocks_around_an_image_are_joined_as_those_without(gateway: Gateway) -> None:
    given = await message(gateway, user(text("a"), text("b"), block(CAT), text("c")))

    assert given["messages"][0]["content"] == [
        {"type": "text", "text": "a\n\nb"}, {"type": "image", "media": 0}, {"type": "text", "text": "c"},
    ]  # fmt: skip


async def test_a_response_goes_on_with_the_images_before_it(gateway: Gateway) -> None:
    parts = [{"type": "input_text", "text": "see"}, input_image(BIRD, detail="low")]
    audio = {"type": "input_audio", "input_audio": {"data": encoded(DOG), "format": "wav"}}
    first, _ = await response(gateway, [{"role": "user", "content": [*parts, audio]}])
    again = [{"role": "user", "content": [{"type": "input_text", "text": "and now?"}, input_image(DOG)]}]
    second, given = await response(gateway, again, previous_response_id=first)

    assert seen(given) == [("image", BIRD), ("audio", DOG), ("image", DOG)]
    assert given["media"][0]["options"] == {"max_pixels": 512 * 512}
    assert given["media"][0]["param"] == "previous_response_id[0].content[1]"
    listed = (await gateway.client.get(f"/v1/responses/{second}/input_items")).text
    assert encoded(BIRD) not in listed
    digest = hashlib.blake2b(BIRD, digest_size=32).hexdigest()
    assert f"mlxd-media:{digest}" in listed

    # What is listed can be sent again, by those who may read it, until its response is gone.
    item = {"role": "user", "content": [{"type": "input_image", "image_url": f"mlxd-media:{digest}"}]}
    assert seen((await response(gateway, [item], store=False))[1]) == [("image", BIRD)]
    await gateway.client.delete(f"/v1/responses/{first}")
    reply = await gateway.client.post("/v1/responses", json={"model": "m", "input": [item]})
    assert reply.json()["error"]["code"] == "media_fetch_failed"


async def test_other_dialects_know_nothing_of_kept_media(gateway: Gateway) -> None:
    url = "mlxd-media:" + hashlib.blake2b(CAT, digest_size=32).hexdigest()
    body = {"model": "m", "messages": [user({"type": "image_url", "image_url": url})]}
    reply = await gateway.client.post("/v1/chat/completions", json=body)

    assert reply.json()["error"]["code"] == "media_fetch_failed"


async def test_counts_include_media_and_are_the_usage_of_the_same_request(gateway: Gateway) -> None:
    messages = [user(text("a"), block(CAT))]
    counted = await gateway.client.post("/v1/messages/count_tokens", json={"model": "m", "messages": messages})
    asked = {"model": "m", "max_tokens": 5, "messages": messages}
    usage = (await gateway.client.post("/v1/messages", json=asked)).json()["usage"]
    assert counted.json()["input_tokens"] == usage["input_tokens"] == 19

    given = [{"role": "user", "content": [input_image(CAT), input_image(DOG)]}]
    tokens = await gateway.client.post("/v1/responses/input_tokens", json={"model": "m", "input": given})
    answered = await gateway.client.post("/v1/responses", json={"model": "m", "input": given})
    assert tokens.json()["input_tokens"] == answered.json()["usage"]["input_tokens"] == 35

    shown = [user(chat_image(CAT))]
    tokens = await gateway.client.post("/tokenize", json={"model": "m", "messages": shown})
    answered = await gateway.client.post("/v1/chat/completions", json={"model": "m", "messages": shown})
    assert tokens.json()["count"] == answered.json()["usage"]["prompt_tokens"] == 19


# -- refusals --------------------------------------------------------------------------------------------------------


async def refusal(gateway: Gateway, *parts: dict[str, Any]) -> tuple[int, str, str, str]:
    body = {"model": "m", "messages": [user(text("see"), *parts)]}
    reply = await gateway.client.post("/v1/chat/completions", json=body)
    error = reply.json()["error"]
    return reply.status_code, error["code"], error["param"], error["message"]


@pytest.mark.parametrize(
    ("url", "code"),
    [
        (uri(b""), "invalid_image"),
        ("data:image/png;base64,???", "invalid_image"),
        ("", "invalid_image"),
        ("cat.png", "invalid_image"),
        ("/etc/passwd", "invalid_image"),
        ("gopher://x/", "invalid_image"),
        (uri(bytes(200_001)), "image_too_large"),
        ("https://pictures.example/cat.png", "media_fetch_failed"),
        ("file:///etc/passwd", "media_fetch_failed"),
    ],
)
async def test_an_image_that_cannot_be_read_is_refused_by_its_path(gateway: Gateway, url: str, code: str) -> None:
    found = await refusal(gateway, chat_image(CAT), {"type": "image_url", "image_url": {"url": url}})

    assert found[:3] == (400, code, "messages[0].content[2]")
    assert "/etc" not in found[3]
    assert "pictures" not in found[3]


async def test_more_media_than_a_request_may_have_are_refused(gateway: Gateway) -> None:
    found = await refusal(gateway, *[chat_image(CAT)] * 5)

    assert found[:3] == (400, "too_many_media", "messages[0].content[5]")


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
async def test_media_in_other_turns_than_the_users_are_refused(gateway: Gateway, role: str) -> None:
    body = {"model": "m", "messages": [{"role": role, "content": [chat_image(CAT)]}, user(text("x"))]}
    error = (await gateway.client.post("/v1/chat/completions", json=body)).json()["error"]

    assert error["param"] == "messages[0].content[0]"
    assert "media belong" in error["message"]


@pytest.mark.parametrize("is_loaded", [False, True])
async def test_a_text_model_refuses_media_by_their_path_also_before_it_is_loaded(
    blind: Gateway, is_loaded: bool
) -> None:
    if is_loaded:
        body = {"model": "m", "messages": [user(text("x"))], "max_tokens": 1}
        await blind.client.post("/v1/chat/completions", json=body)
    assert (blind.pool.worker("m").ready is not None) is is_loaded

    assert (await refusal(blind, chat_image(CAT)))[:3] == (400, "unsupported_modality", "messages[0].content[1]")
    body = {"model": "m", "max_tokens": 5, "messages": [user(block(CAT))]}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        error = (await blind.client.post(path, json=body)).json()["error"]
        assert error["message"] == "'messages.0.content.0': the model 'm' takes no images: it takes text."
    given = [{"role": "user", "content": [input_image(CAT)]}]
    for path in ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"):
        error = (await blind.client.post(path, json={"model": "m", "input": given})).json()["error"]
        assert error["code"] == "unsupported_modality", path


async def test_bytes_of_media_are_bounded_over_all_requests(tmp_path: Path) -> None:
    async with running(tmp_path, worker="seeing") as gateway:
        gateway.app.services.media.limit_bytes = 2048
        assert (await refusal(gateway, chat_image(bytes(1025)), chat_image(bytes(1025))))[:2] == (
            503,
            "media_memory_full",
        )
        await chat(gateway, user(chat_image(bytes(1024)), chat_image(bytes(1024))))
        assert gateway.app.services.media.numbers.used_bytes == 0


async def test_bytes_of_media_are_of_the_share_of_their_key(gateway: Gateway) -> None:
    services = gateway.app.services
    record = RequestRecord("r", "POST", "/", caller=Caller(key="alice"), media_lease=services.media.lease())
    prompt = ChatPrompt([], media=(Reference(IMAGE, b"", b"", {}, "input", encoded=encoded(CAT)),))
    await serve.with_media(services, record, services.config.models["m"], prompt)
    assert record.media_lease is not None
    assert (record.media_lease.owner, record.media_lease.size_bytes) == ("alice", len(CAT))
    record.media_lease.close()


async def test_files_are_read_below_the_folders_that_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "a cat.png").write_bytes(CAT)
    (tmp_path / "secret").write_bytes(DOG)
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "large").write_bytes(bytes(4097))
    media = MediaConfig(folders=(str(folder),), max_size_bytes=4096)
    async with running(tmp_path / "home", worker="seeing", media=media) as gateway:
        for url in (f"file://{folder}/a%20cat.png", f"file://localhost{folder}/../pictures/a cat.png"):
            assert seen(await chat(gateway, user({"type": "image_url", "image_url": url}))) == [("image", CAT)]
        # In the thread: how large a file is, its URL does not tell.
        assert gateway.app.services.bodies.numbers.offloaded == 2
        for path in (folder / "link", folder / ".." / "secret", folder, folder / "none", tmp_path / "secret"):
            found = await refusal(gateway, {"type": "image_url", "image_url": f"file://{path}"})
            assert found[:2] == (400, "media_fetch_failed"), path
            assert str(tmp_path) not in found[3]
        large = {"type": "image_url", "image_url": f"file://{folder}/large"}
        assert (await refusal(gateway, large))[:2] == (400, "image_too_large")


# -- around a request ------------------------------------------------------------------------------------------------


async def test_usage_tells_the_tokens_of_media_where_there_are_any(gateway: Gateway) -> None:
    audio = {"type": "input_audio", "input_audio": {"data": encoded(DOG), "format": "wav"}}
    asked = {"model": "m", "messages": [user(chat_image(CAT), audio)]}
    usage = (await gateway.client.post("/v1/chat/completions", json=asked)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": 16, "audio_tokens": 16}
    given = [{"role": "user", "content": [input_image(CAT)]}]
    usage = (await gateway.client.post("/v1/responses", json={"model": "m", "input": given})).json()["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0, "image_tokens": 16}
    asked = {"model": "m", "messages": [user(text("x"))]}
    usage = (await gateway.client.post("/v1/chat/completions", json=asked)).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_the_list_of_models_says_what_each_takes(gateway: Gateway, blind: Gateway) -> None:
    await chat(gateway, user(text("x")))

    listed = (await gateway.client.get("/v1/models")).json()["data"]
    assert listed[0]["input_modalities"] == ["text", "image", "video", "audio"]
    assert (await blind.client.get("/v1/models/m")).json()["input_modalities"] == ["text"]


async def test_a_rate_limit_reserves_tokens_of_an_image_not_of_its_base64(tmp_path: Path) -> None:
    # A quarter of a megabyte would be 64,000 tokens.
    image = chat_image(bytes(250_000))
    secret = make(tmp_path, "k", tpm=8000)
    async with running(tmp_path, worker="seeing") as gateway:
        body = {"model": "m", "messages": [user(image)], "max_tokens": 10}
        for path in ("/v1/chat/completions", "/tokenize"):
            reply = await gateway.client.post(path, json=body, headers=bearer(secret))
            assert reply.status_code == 200, reply.text


async def test_captures_and_the_log_have_digests_of_media_and_not_their_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = bytes(range(256)) * 8
    digest = hashlib.blake2b(data, digest_size=32).hexdigest()
    async with running(tmp_path, worker="seeing", server=ServerConfig(capture=5)) as gateway:
        with caplog.at_level("INFO", "gateway.middleware.access_log"):
            await chat(gateway, user(text("see"), chat_image(data)))
        kept = [json.loads(file.read_bytes()) for file in await captured(gateway, 1)]

    (line,) = [record for record in caplog.records if getattr(record, "fields", {}).get("media")]
    fields: dict[str, Any] = line.fields  # type: ignore[attr-defined]
    assert fields["media"] == [f"image:{digest[:16]}"]
    assert fields["media_bytes"] == 2048
    assert encoded(data)[:100] not in json.dumps(kept)
    assert f"data:image/png;base64,[2048 bytes of base64 not kept, blake2b-256 {digest}]" in kept[0]["request_body"]


async def captured(gateway: Gateway, count: int) -> list[Path]:
    folder = gateway.app.services.config.capture_dir
    await until(lambda: len(list(folder.glob("*.json"))) == count)
    await gateway.app.services.captures.lines()
    return sorted(folder.glob("*.json"))

"""Images and clips from unmodified SDKs to the model that ships, and what goes wrong on the way."""

import base64
import json
import os
import signal
import struct
import sys
import zlib
from collections.abc import AsyncGenerator
from typing import Any

import anthropic
import openai
import openresponses_types.types as published
import pytest
from PIL import Image

from gateway.config.settings import ModelConfig
from gateway.workers.supervisor.spawn import default_command
from protocol.spec import WorkerSpec
from tests.gateway.harness import Gateway, running
from tests.support.pdfs import PdfSheet, pdf
from tests.support.pictures import BLUE, RED, encoded, halves, shape
from tests.support.pool import short_home
from tests.worker.vision.test_sounds import tone, wav

pytestmark = pytest.mark.anyio
MODEL = "demo-vision"
# What kind of processor there is decides only how rows share a pass, and takes seconds to find out.
# One token a step: drafts would end a stream before a test can kill its worker.
CONFIG = ModelConfig(name=MODEL, path=MODEL, speculate="off")
SHAPE = "What shape is in the picture?"
COLOR = "What color is the shape?"
# Anthropic's client has no such argument.
GREEDY = {"temperature": 0}
CIRCLE, SQUARE = encoded(shape("circle", RED)), encoded(shape("square", BLUE))


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway() -> AsyncGenerator[Gateway, None]:
    with short_home() as home:
        async with running(home, models=[CONFIG], command=default_command) as made:
            yield made


@pytest.fixture
async def client(gateway: Gateway) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as made:
        yield made


@pytest.fixture
async def claude(gateway: Gateway) -> AsyncGenerator[anthropic.AsyncAnthropic, None]:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="x", max_retries=0) as made:
        yield made


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def user(words: str, *images: bytes) -> Any:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": uri(data)}} for data in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": words}]}


async def asked(gateway: Gateway, *messages: Any, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": MODEL, "messages": list(messages), "temperature": 0, "max_tokens": 16, **fields}
    reply = await gateway.client.post("/v1/chat/completions", json=body)
    return reply.status_code, reply.json()


async def answer(gateway: Gateway, *messages: Any, **fields: Any) -> str:
    status, body = await asked(gateway, *messages, **fields)
    assert status == 200, body
    return body["choices"][0]["message"]["content"]


async def test_openais_client_asks_about_an_image_in_a_chat_and_in_a_response(client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(model=MODEL, messages=[user(SHAPE, CIRCLE)], temperature=0)
    assert chat.choices[0].message.content == "It is a circle."
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.model_dump()["image_tokens"] == 64

    first = await client.responses.create(
        model=MODEL,
        temperature=0,
        input=[{"role": "user", "content": [
            {"type": "input_image", "image_url": uri(SQUARE), "detail": "auto"}, {"type": "input_text", "text": SHAPE},
        ]}],
    )  # fmt: skip
    second = await client.responses.create(model=MODEL, temperature=0, input=COLOR, previous_response_id=first.id)
    assert (first.output_text, second.output_text) == ("It is a square.", "The shape is blue.")


async def test_a_stream_about_an_image_says_what_the_whole_answer_does(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=[user(COLOR, SQUARE)], temperature=0, stream=True
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "The shape is blue."


async def test_anthropics_client_asks_about_an_image_that_a_tool_has_read(claude: anthropic.AsyncAnthropic) -> None:
    image: Any = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(SQUARE).decode()},
    }
    plain: Any = [{"role": "user", "content": [image, {"type": "text", "text": SHAPE}]}]
    said = await claude.messages.create(model=MODEL, max_tokens=16, messages=plain, extra_body=GREEDY)
    assert said.content[0].type == "text"
    assert said.content[0].text == "It is a square."
    counted = await claude.messages.count_tokens(model=MODEL, messages=plain)
    assert counted.input_tokens == said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0)

    read: Any = [
        {"role": "user", "content": SHAPE},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Read", "input": {"path": "a.png"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [image]},
                                     {"type": "text", "text": SHAPE}]},
    ]  # fmt: skip
    said = await claude.messages.create(model=MODEL, max_tokens=16, messages=read, extra_body=GREEDY)
    assert said.content[0].type == "text"
    assert "square" in said.content[0].text


@pytest.mark.parametrize("shape", ["circle", "square"])
async def test_a_page_of_a_pdf_is_seen_by_every_client(
    client: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, shape: str
) -> None:
    data = base64.b64encode(pdf(PdfSheet("", shape))).decode()
    url = f"data:application/pdf;base64,{data}"
    file: Any = {"type": "file", "file": {"filename": "a.pdf", "file_data": url}}
    asked: Any = {"role": "user", "content": [file, {"type": "text", "text": SHAPE}]}
    chat = await client.chat.completions.create(model=MODEL, messages=[asked], temperature=0)
    given: Any = [{"role": "user", "content": [
        {"type": "input_file", "filename": "a.pdf", "file_data": url}, {"type": "input_text", "text": SHAPE},
    ]}]  # fmt: skip
    response = await client.responses.create(model=MODEL, temperature=0, input=given)
    source = {"type": "base64", "media_type": "application/pdf", "data": data}
    document: Any = {"type": "document", "title": "a.pdf", "source": source}
    blocks: Any = [{"role": "user", "content": [document, {"type": "text", "text": SHAPE}]}]
    said = await claude.messages.create(model=MODEL, max_tokens=16, messages=blocks, extra_body=GREEDY)
    counted = await claude.messages.count_tokens(model=MODEL, messages=blocks)

    assert said.content[0].type == "text"
    answers = [chat.choices[0].message.content or "", response.output_text, said.content[0].text]
    assert all(shape in answer for answer in answers), answers
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == counted.input_tokens


async def test_a_clip_of_audio_is_refused_by_a_model_that_hears_none(gateway: Gateway) -> None:
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(tone(8000), 8000)).decode()}}
    status, body = await asked(gateway, {"role": "user", "content": [part]})

    assert status == 400
    assert (body["error"]["code"], body["error"]["param"]) == ("unsupported_modality", "messages[0].content[0]")
    assert "it takes text, image, video" in body["error"]["message"]


async def test_open_responses_image_input(gateway: Gateway) -> None:
    """The compliance suite's `image-input`: a message with text and an image is answered with a completed response."""
    parts = [{"type": "input_text", "text": SHAPE}, {"type": "input_image", "image_url": uri(CIRCLE)}]
    body = {"model": MODEL, "input": [{"type": "message", "role": "user", "content": parts}]}
    reply = await gateway.client.post("/v1/responses", json=body)

    assert reply.status_code == 200, reply.text
    published.ResponseResource.model_validate_json(reply.content)
    assert (reply.json()["status"], bool(reply.json()["output"])) == ("completed", True)


@pytest.mark.soak
async def test_a_clip_and_its_reverse_are_told_apart(gateway: Gateway) -> None:
    frames = [encoded(shape("circle", RED, x, side=96), "JPEG", quality=95) for x in (4, 24, 44, 64)]

    async def direction(order: list[bytes]) -> str:
        url = "data:video/jpeg;base64," + ",".join(base64.b64encode(frame).decode() for frame in order)
        parts = [{"type": "video_url", "video_url": {"url": url}},
                 {"type": "text", "text": "Which way does the shape move?"}]  # fmt: skip
        return await answer(gateway, {"role": "user", "content": parts})

    assert await direction(frames) == "It moves to the right."
    assert await direction(frames[::-1]) == "It moves to the left."


async def test_a_marker_that_is_typed_is_text_and_moves_no_image(gateway: Gateway) -> None:
    marker = "<|vision_start|><|image_pad|><|vision_end|>"
    messages = [
        {"role": "user", "content": f"{marker} is a marker."},
        {"role": "assistant", "content": f"Thank you for {marker}."},
        user(SHAPE, CIRCLE),
    ]
    assert "circle" in await answer(gateway, *messages)

    status, body = await asked(gateway, {"role": "user", "content": f"{marker} Hello!"})
    assert status == 200
    assert "image_tokens" not in body["usage"]["prompt_tokens_details"]


def bomb() -> bytes:
    """A PNG of 1 kB that says it is 8,001 pixels wide and as high."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", 8001, 8001, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (bomb(), "image_too_large"),
        (encoded(Image.new("RGB", (1, 1))), "invalid_image"),
        (encoded(Image.new("RGB", (4, 1000))), "invalid_image"),
        (encoded(halves(), "JPEG")[:200], "invalid_image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "invalid_image"),
        (b"<!doctype html><html></html>", "invalid_image"),
        (b"\0\0\0\x1cftypheic\0\0\0\0mif1heic", "invalid_image"),
    ],
    ids=["bomb", "1x1", "thin", "truncated", "svg", "html", "heic"],
)
async def test_a_file_that_cannot_be_seen_is_refused_by_its_path_beside_one_that_can(
    gateway: Gateway, data: bytes, code: str
) -> None:
    status, body = await asked(gateway, user(SHAPE, CIRCLE, data))

    assert (status, body["error"]["code"], body["error"]["param"]) == (400, code, "messages[0].content[1]")
    assert await answer(gateway, user(SHAPE, SQUARE)) == "It is a square."


async def test_one_image_again_is_neither_decoded_nor_encoded_nor_prefilled(gateway: Gateway) -> None:
    green = encoded(shape("square", (20, 160, 20)))
    first = (await asked(gateway, user(SHAPE, green)))[1]["usage"]
    again = (await asked(gateway, user(SHAPE, green)))[1]["usage"]

    assert first["prompt_tokens"] == again["prompt_tokens"]
    assert again["prompt_tokens_details"]["cached_tokens"] >= 64 > first["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.soak
async def test_a_stream_about_an_image_outlives_its_worker_to_the_same_words(gateway: Gateway) -> None:
    fields = {"ignore_eos": True, "max_tokens": 300}
    whole = await answer(gateway, user("Describe the picture.", CIRCLE), **fields)
    body = {"model": MODEL, "messages": [user("Describe the picture.", CIRCLE)], "temperature": 0, "stream": True}
    text: list[str] = []
    async with gateway.client.stream("POST", "/v1/chat/completions", json=body | fields) as reply:
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            text.append(json.loads(line[6:])["choices"][0]["delta"].get("content") or "")
            if len(text) == 3:
                process = gateway.pool.worker(MODEL).view().pid
                assert process is not None
                os.kill(process, signal.SIGKILL)

    assert gateway.metrics.model(MODEL).restarts
    assert "".join(text) == whole


async def test_without_mlx_vlm_a_vision_model_serves_text_and_names_the_command() -> None:
    hidden = "import runpy, sys; sys.modules['mlx_vlm'] = None; runpy.run_module('worker', run_name='__main__')"

    def command(spec: WorkerSpec) -> list[str]:
        plain = default_command(spec)
        return [sys.executable, "-P", "-c", hidden, *plain[plain.index("worker") + 1 :]]

    with short_home() as home:
        async with running(home, models=[CONFIG], command=command) as gateway:
            assert await answer(gateway, {"role": "user", "content": "Hello!"})
            status, body = await asked(gateway, user(SHAPE, CIRCLE))

    assert (status, body["error"]["code"]) == (400, "unsupported_modality")
    assert "mlxctl setup vision" in body["error"]["message"]

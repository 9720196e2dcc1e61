"""PDFs in the requests of all dialects: what reaches the worker, what is counted and kept, and what is refused."""

import base64
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import pytest

from gateway.config.settings import MediaConfig, ModelConfig
from gateway.media import read_media
from gateway.media.documents import DocumentReader, PdfReader, with_pages
from protocol.to_worker import ChatPrompt, Media
from tests.gateway.harness import Gateway, running
from tests.support.pdfs import PdfSheet, encrypted, pdf
from tests.support.pool import short_home

pytestmark = pytest.mark.anyio
TWO = pdf(PdfSheet("Hello\nWorld", "circle"), PdfSheet("Bye"))
SCAN = pdf(PdfSheet("", "square"))
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
            # What a model takes is known for certain once it is loaded.
            await made.client.post("/v1/chat/completions", json={"model": "m", "messages": [user("x")]})
            yield made


@pytest.fixture(scope="module")
async def blind() -> AsyncGenerator[Gateway, None]:
    """A gateway of a model that takes text."""
    with short_home() as home:
        async with running(home, models=[ModelConfig(name="m", path="demo")], media=LIMITS) as made:
            yield made


def user(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def uri(data: bytes) -> str:
    return f"data:application/pdf;base64,{encoded(data)}"


def chat_file(data: bytes, name: str = "a.pdf") -> dict[str, Any]:
    return {"type": "file", "file": {"filename": name, "file_data": uri(data)}}


def input_file(data: bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "input_file", "filename": "a.pdf", "file_data": uri(data), **fields}


def document(data: bytes, **fields: Any) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "application/pdf", "data": encoded(data)}
    return {"type": "document", "source": source, "title": "a.pdf", **fields}


# Each dialect: its path, the body of a request, the path of the first part, and the path that counts its tokens.
def bodies(data: bytes) -> list[tuple[str, dict[str, Any], str, str]]:
    chat = {"model": "m", "max_tokens": 5, "messages": [user(chat_file(data), "so?")]}
    message = {"model": "m", "max_tokens": 5, "messages": [user(document(data), "so?")]}
    items = [{"role": "user", "content": [input_file(data), {"type": "input_text", "text": "so?"}]}]
    response = {"model": "m", "max_output_tokens": 5, "input": items}
    return [
        ("/v1/chat/completions", chat, "messages[0].content[0]", "/tokenize"),
        ("/v1/messages", message, "messages.0.content.0", "/v1/messages/count_tokens"),
        ("/v1/responses", response, "input[0].content[0]", "/v1/responses/input_tokens"),
    ]


def prompt_of(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if not name.startswith("max_")}


def said(reply: httpx2.Response) -> dict[str, Any]:
    """The messages and media that the worker was given."""
    assert reply.status_code == 200, reply.text
    body = reply.json()
    if "choices" in body:
        return json.loads(body["choices"][0]["message"]["content"])
    return json.loads(body["content"][0]["text"] if "content" in body else body["output"][0]["content"][0]["text"])


def error(reply: httpx2.Response) -> tuple[int, str, str]:
    """Status, code and message."""
    found = reply.json()["error"]
    return reply.status_code, found.get("code", ""), found["message"]


PAGES = [
    {"type": "text", "text": "a.pdf\n\nPage 1 of 2:\nHello\nWorld"}, {"type": "image", "media": 0},
    {"type": "text", "text": "Page 2 of 2:\nBye"}, {"type": "image", "media": 1},
    {"type": "text", "text": "so?"},
]  # fmt: skip


async def test_a_model_with_vision_gets_each_pages_text_and_picture_in_every_dialect(gateway: Gateway) -> None:
    pictures: list[list[str]] = []
    for path, body, param, _ in bodies(TWO):
        given = said(await gateway.client.post(path, json=body))
        assert given["messages"][0]["content"] == PAGES, path
        assert [(each["kind"], each["param"]) for each in given["media"]] == [("image", param)] * 2
        pictures.append([each["data"] for each in given["media"]])
    assert pictures[0] == pictures[1] == pictures[2]
    assert all(bytes.fromhex(data)[:2] == b"\xff\xd8" for data in pictures[0])
    assert gateway.app.services.media.numbers.used_bytes == 0


async def test_counts_are_the_usage_of_the_same_request(gateway: Gateway) -> None:
    for path, body, _, counting in bodies(TWO):
        answered = (await gateway.client.post(path, json=body)).json()["usage"]
        asked = prompt_of(body)
        counted = (await gateway.client.post(counting, json=asked)).json()
        used = answered.get("prompt_tokens", answered.get("input_tokens"))
        assert counted.get("input_tokens", counted.get("count")) == used == 3 + 2 * 16, path


async def test_a_document_in_a_tools_result_is_shown_there(gateway: Gateway) -> None:
    use = {"type": "tool_use", "id": "c", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [document(TWO)]}
    messages = [user("x"), {"role": "assistant", "content": [use]}, user(result)]
    body = {"model": "m", "max_tokens": 5, "messages": messages}
    given = said(await gateway.client.post("/v1/messages", json=body))

    assert given["messages"][2]["role"] == "tool"
    assert given["messages"][2]["content"] == PAGES[:4]


async def test_pages_and_images_are_numbered_in_their_order(gateway: Gateway) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    body = {"model": "m", "messages": [user(image, chat_file(SCAN), "and", chat_file(SCAN, "b.pdf"), image)]}
    given = said(await gateway.client.post("/v1/chat/completions", json=body))

    assert given["messages"][0]["content"] == [
        {"type": "image", "media": 0},
        {"type": "text", "text": "a.pdf\n\nPage 1 of 1:"}, {"type": "image", "media": 1},
        {"type": "text", "text": "and\n\nb.pdf\n\nPage 1 of 1:"}, {"type": "image", "media": 2},
        {"type": "image", "media": 3},
    ]  # fmt: skip
    assert [each["data"] == "6869" for each in given["media"]] == [True, False, False, True]


async def test_the_detail_of_a_file_is_that_of_its_pictures(gateway: Gateway) -> None:
    body = {"model": "m", "input": [{"role": "user", "content": [input_file(SCAN, detail="low")]}]}
    given = said(await gateway.client.post("/v1/responses", json=body))

    assert given["media"][0]["options"] == {"max_pixels": 512 * 512}


async def test_a_response_goes_on_with_the_file_before_it(gateway: Gateway) -> None:
    _, body, _, _ = bodies(TWO)[2]
    first = (await gateway.client.post("/v1/responses", json=body)).json()["id"]
    again = {"model": "m", "input": "and now?", "previous_response_id": first}
    given = said(await gateway.client.post("/v1/responses", json=again))

    assert given["messages"][0]["content"] == PAGES
    listed = (await gateway.client.get(f"/v1/responses/{first}/input_items")).json()["data"]
    assert listed[0]["content"][0]["file_data"].startswith("mlxd-media:")
    assert listed[0]["content"][0]["filename"] == "a.pdf"


async def test_a_url_is_fetched_only_where_urls_are_allowed(gateway: Gateway) -> None:
    url = "https://papers.example/a.pdf"
    given = {"role": "user", "content": [{"type": "input_file", "file_url": url}]}
    response = await gateway.client.post("/v1/responses", json={"model": "m", "input": [given]})
    block = {"type": "document", "source": {"type": "url", "url": url}}
    message = await gateway.client.post("/v1/messages", json={"model": "m", "max_tokens": 5, "messages": [user(block)]})

    for reply in (response, message):
        assert reply.status_code == 400
        assert "URLs are not fetched here" in reply.json()["error"]["message"]


async def test_a_text_model_gets_the_texts_alone_also_before_it_is_loaded(blind: Gateway) -> None:
    for _ in range(2):
        for path, body, _, _ in bodies(TWO):
            reply = await blind.client.post(path, json=body)
            assert reply.status_code == 200, reply.text


async def test_a_turn_with_texts_of_pages_alone_is_a_string(blind: Gateway) -> None:
    services = blind.app.services
    lease = services.media.lease()
    reading = DocumentReader(LIMITS, lease, services.pdfs, "m", False, services.bodies.work)
    mixed = pdf(PdfSheet("Hello"), PdfSheet("", "circle"))
    content = [
        {"type": "text", "text": "Read"}, {"type": "document", "media": 0, "heading": "a.pdf"},
        {"type": "text", "text": "so?"},
    ]  # fmt: skip
    prompt = ChatPrompt([user(*content)], media=(Media("document", b"", mixed, param="p"),))

    read, not_shown = await with_pages(prompt, reading)

    assert not not_shown
    assert read.messages[0]["content"] == ("Read\n\na.pdf\n\nPage 1 of 2:\nHello\n\nPage 2 of 2:\n(no text)\n\nso?")
    assert read.media == ()
    lease.close()


# -- refusals --------------------------------------------------------------------------------------------------------


async def test_a_text_model_refuses_a_scan_and_says_why_in_every_dialect(blind: Gateway) -> None:
    for path, body, param, counting in bodies(SCAN):
        for each in (path, counting):
            asked = body if each == path else prompt_of(body)
            status, code, message = error(await blind.client.post(each, json=asked))
            assert (status, code or "unsupported_modality") == (400, "unsupported_modality")
            expected = f"'{param}': none of its 1 pages has text, as in a scan, and the model 'm' takes no images."
            assert message == expected


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (encrypted(), "it is encrypted; send it without a password"),
        (TWO[:200], "it is no PDF that can be read"),
        (b"\x89PNG", "it is no PDF; send other files as text or as images"),
        (b"%PDF-" + bytes(200_000), "is larger than 200000 bytes"),
    ],
)
async def test_a_file_that_cannot_be_read_is_refused_by_its_path(gateway: Gateway, data: bytes, word: str) -> None:
    for path, body, param, _ in bodies(data):
        status, code, message = error(await gateway.client.post(path, json=body))
        assert (status, code or "invalid_document") == (400, "invalid_document"), path
        assert param in message
        assert word in message


async def test_pages_count_as_images_of_the_request(gateway: Gateway) -> None:
    five = pdf(*[PdfSheet("x")] * 5)
    body = {"model": "m", "messages": [user(chat_file(five))]}
    status, code, message = error(await gateway.client.post("/v1/chat/completions", json=body))
    assert (status, code) == (400, "too_many_media")
    assert "it has 5 pages" in message
    assert "4 more pictures" in message

    three = {"model": "m", "messages": [user(chat_file(TWO), chat_file(TWO), chat_file(SCAN))]}
    status, code, message = error(await gateway.client.post("/v1/chat/completions", json=three))
    assert (status, code) == (400, "too_many_media")
    assert message.startswith("'messages[0].content[2]'")


async def test_more_pages_than_images_are_taken_by_a_text_model(blind: Gateway) -> None:
    many = {"model": "m", "max_tokens": 5, "messages": [user(chat_file(pdf(*[PdfSheet("x")] * 20)))]}
    assert (await blind.client.post("/v1/chat/completions", json=many)).is_success


@pytest.mark.parametrize("role", ["system", "assistant"])
async def test_a_document_in_another_turn_than_the_users_is_refused(gateway: Gateway, role: str) -> None:
    body = {"model": "m", "messages": [{"role": role, "content": [chat_file(TWO)]}, user("x")]}
    _, _, message = error(await gateway.client.post("/v1/chat/completions", json=body))
    assert "media belong" in message


async def test_a_reader_that_crashes_refuses_its_request_only(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    services, data = gateway.app.services, pdf(PdfSheet("never read before"))
    with monkeypatch.context() as patch:
        patch.setattr(services.pdfs, "_command", ("sh", "-c", "kill -9 $$"))
        for path, body, _, _ in bodies(data):
            assert "reading it crashed" in error(await gateway.client.post(path, json=body))[2]
    assert isinstance(services.pdfs, PdfReader)
    for path, body, _, _ in bodies(data):
        assert (await gateway.client.post(path, json=body)).is_success


async def test_pages_are_counted_in_the_memory_for_media() -> None:
    with short_home() as home:
        async with running(home, worker="seeing") as small:
            small.app.services.media.limit_bytes = 10_000
            await small.client.post("/v1/chat/completions", json={"model": "m", "messages": [user("x")]})
            body = {"model": "m", "messages": [user(chat_file(SCAN))]}
            status, code, _ = error(await small.client.post("/v1/chat/completions", json=body))
            assert (status, code) == (503, "media_memory_full")
            assert small.app.services.media.numbers.used_bytes == 0


# -- earlier turns ---------------------------------------------------------------------------------------------------


def later(data: bytes) -> list[tuple[str, dict[str, Any], str]]:
    """Conversations that go on behind a file, also behind one in a tool's result: path, body, path of the file."""
    use = {"type": "tool_use", "id": "c", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [document(data)]}
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    answered, again = {"role": "assistant", "content": "ok"}, user("and now?")
    made: list[tuple[str, dict[str, Any], str]] = []
    for path, body, param, _ in bodies(data):
        field = "input" if "input" in body else "messages"
        now = {"role": "user", "content": "and now?"}
        made.append((path, body | {field: [*body[field], answered, now]}, param))
    message = {"model": "m", "max_tokens": 5}
    called = {"role": "assistant", "content": [use]}
    made += [
        # Claude Code sends a reminder in the same message.
        (
            "/v1/messages",
            message | {"messages": [user("x"), called, user(result, "and now?")]},
            "messages.2.content.0.content.0",
        ),
        (
            "/v1/messages",
            message | {"messages": [user("x"), called, user(result), answered, again]},
            "messages.2.content.0.content.0",
        ),
    ]
    tool = {"role": "tool", "tool_call_id": "c", "content": [chat_file(data)]}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    made.append(
        (
            "/v1/chat/completions",
            {"model": "m", "max_tokens": 5, "messages": [user("x"), called, tool, again]},
            "messages[2].content[0]",
        )
    )
    item = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [input_file(data)]}
    now = {"role": "user", "content": "and now?"}
    made.append(
        (
            "/v1/responses",
            {"model": "m", "max_output_tokens": 5, "input": [now, item, output, now]},
            "input[2].output[0]",
        )
    )
    return made


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encrypted(), "it is encrypted; send it without a password"),
        (TWO[:200], "it is no PDF that can be read"),
        (b"\x89PNG", "it is no PDF; send other files as text or as images"),
        (b"%PDF-" + bytes(200_000), "it could not be read"),
        (pdf(*[PdfSheet("x")] * 5), "it has 5 pages"),
    ],
)
async def test_a_file_of_an_earlier_turn_that_cannot_be_read_is_a_note(
    gateway: Gateway, data: bytes, reason: str
) -> None:
    for path, body, param in later(data):
        reply = await gateway.client.post(path, json=body)
        contents = [message["content"] for message in said(reply)["messages"]]
        assert any(content.startswith(f"a.pdf\n\n[PDF, not shown: {reason}") for content in contents), contents
        assert contents[-1] == "and now?"
        assert reply.headers["x-mlxd-ignored"] == param


async def test_a_scan_of_an_earlier_turn_is_a_note_for_a_text_model(blind: Gateway) -> None:
    for path, body, param in later(SCAN):
        reply = await blind.client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-mlxd-ignored"] == param


async def test_a_file_of_an_earlier_turn_that_can_be_read_is_still_shown(gateway: Gateway) -> None:
    for path, body, _ in later(TWO):
        reply = await gateway.client.post(path, json=body)
        assert (
            sum(
                len(message["content"]) > 1 and message["content"][:4] == PAGES[:4]
                for message in said(reply)["messages"]
            )
            == 1
        )
        assert "x-mlxd-ignored" not in reply.headers


async def test_a_new_file_has_the_room_of_those_before_it_the_oldest_first(gateway: Gateway) -> None:
    answered = {"role": "assistant", "content": "ok"}
    turns = [user(chat_file(TWO, "old.pdf")), answered, user(chat_file(SCAN, "later.pdf")), answered]
    body = {"model": "m", "messages": [*turns, user(chat_file(TWO, "new.pdf"))]}
    reply = await gateway.client.post("/v1/chat/completions", json=body)

    contents = [message["content"] for message in said(reply)["messages"]]
    assert contents[0].startswith("old.pdf\n\n[PDF, not shown: it has 2 pages")
    assert contents[2][0]["text"].startswith("later.pdf\n\nPage 1 of 1")
    assert contents[4][0]["text"].startswith("new.pdf\n\nPage 1 of 2")
    assert reply.headers["x-mlxd-ignored"] == "messages[0].content[0]"


async def test_more_files_than_are_taken_are_no_end_of_a_conversation(blind: Gateway) -> None:
    small = pdf(PdfSheet("Hello"))
    turns = [each for _ in range(5) for each in (user(chat_file(small)), {"role": "assistant", "content": "ok"})]
    later = {"model": "m", "max_tokens": 5, "messages": [*turns, user("so?")]}
    now = {"model": "m", "max_tokens": 5, "messages": [user(*[chat_file(small)] * 5)]}

    reply = await blind.client.post("/v1/chat/completions", json=later)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-mlxd-ignored"] == "messages[0].content[0]"
    assert error(await blind.client.post("/v1/chat/completions", json=now))[:2] == (400, "too_many_media")


@pytest.mark.parametrize(
    "url", ["https://papers.example/a.pdf", "ftp://papers.example/a.pdf", "data:,x", "mlxd-media:00"]
)
async def test_a_url_of_an_earlier_turn_that_is_not_fetched_is_a_note(gateway: Gateway, url: str) -> None:
    file = {"type": "input_file", "file_url": url, "filename": "a.pdf"}
    turns = [{"role": "user", "content": [file]}, {"role": "assistant", "content": "ok"}]
    now = {"role": "user", "content": "so?"}
    reply = await gateway.client.post("/v1/responses", json={"model": "m", "input": [*turns, now]})

    assert said(reply)["messages"][0]["content"] == "a.pdf\n\n[PDF, not shown: it could not be read]"
    assert reply.headers["x-mlxd-ignored"] == "input[0].content[0]"
    assert (await gateway.client.post("/v1/responses", json={"model": "m", "input": [turns[0]]})).status_code == 400

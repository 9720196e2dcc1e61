"""PDFs from unmodified SDKs to the text model that ships. `test_vision` has those to the model with vision."""

import base64
from collections.abc import AsyncGenerator
from typing import Any

import anthropic
import openai
import pytest

from tests.support.daemon import DaemonProcess
from tests.support.pdfs import PdfSheet, encrypted, pdf

pytestmark = pytest.mark.anyio
MODEL = "demo"
CAPITALS = pdf(PdfSheet("The capital of France is Paris."), PdfSheet("The capital of Italy is Rome."))
TEXTS = "a.pdf\n\nPage 1 of 2:\nThe capital of France is Paris.\n\nPage 2 of 2:\nThe capital of Italy is Rome."


@pytest.fixture
async def client(demo_daemon: DaemonProcess) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(base_url=f"{demo_daemon.url}/v1", api_key="x", max_retries=0) as made:
        yield made


@pytest.fixture
async def claude(demo_daemon: DaemonProcess) -> AsyncGenerator[anthropic.AsyncAnthropic, None]:
    async with anthropic.AsyncAnthropic(base_url=demo_daemon.url, api_key="x", max_retries=0) as made:
        yield made


def file_part(data: bytes) -> Any:
    encoded = base64.b64encode(data).decode()
    return {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{encoded}"}}


def input_file(data: bytes) -> Any:
    return {"type": "input_file", "filename": "a.pdf", "file_data": file_part(data)["file"]["file_data"]}


def document(data: bytes) -> Any:
    source = {"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(data).decode()}
    return {"type": "document", "title": "a.pdf", "source": source}


async def test_a_pdf_is_the_texts_of_its_pages_for_every_client(
    client: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    plain: Any = [{"role": "user", "content": TEXTS}]
    chats: list[Any] = [plain, [{"role": "user", "content": [file_part(CAPITALS)]}]]
    answers = [await client.chat.completions.create(model=MODEL, max_tokens=1, messages=each) for each in chats]
    given: Any = [{"role": "user", "content": [input_file(CAPITALS)]}]
    response = await client.responses.create(model=MODEL, max_output_tokens=1, input=given)
    blocks: Any = [{"role": "user", "content": [document(CAPITALS)]}]
    message = await claude.messages.create(model=MODEL, max_tokens=1, messages=blocks)
    counted = await client.responses.input_tokens.count(model=MODEL, input=given)
    counted_too = await claude.messages.count_tokens(model=MODEL, messages=blocks)

    assert response.usage is not None
    sizes = [each.usage.prompt_tokens for each in answers if each.usage is not None]
    sizes += [response.usage.input_tokens, message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)]
    sizes += [counted.input_tokens, counted_too.input_tokens]
    assert len(sizes) == 6
    assert len(set(sizes)) == 1, sizes


async def test_a_conversation_goes_on_after_a_pdf(client: openai.AsyncOpenAI) -> None:
    given: Any = [{"role": "user", "content": [input_file(CAPITALS)]}]
    first = await client.responses.create(model=MODEL, max_output_tokens=4, input=given)
    second = await client.responses.create(model=MODEL, max_output_tokens=4, input="hi", previous_response_id=first.id)

    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


async def test_a_pdf_that_cannot_be_read_is_an_error_of_the_client(
    client: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    scan = pdf(PdfSheet("", "circle"))
    for data, word in ((scan, "takes no images"), (encrypted(), "encrypted"), (CAPITALS[:99], "no PDF")):
        message: Any = {"role": "user", "content": [file_part(data)]}
        with pytest.raises(openai.BadRequestError, match=word) as caught:
            await client.chat.completions.create(model=MODEL, messages=[message], max_tokens=1)
        assert caught.value.param == "messages[0].content[0]"
        blocks: Any = [{"role": "user", "content": [document(data)]}]
        with pytest.raises(anthropic.BadRequestError, match=word):
            await claude.messages.create(model=MODEL, max_tokens=1, messages=blocks)
    cited: Any = [{"role": "user", "content": [document(CAPITALS) | {"citations": {"enabled": True}}]}]
    with pytest.raises(anthropic.BadRequestError, match="citations are not supported"):
        await claude.messages.create(model=MODEL, max_tokens=1, messages=cited)

"""Transcriptions, translations and speech over HTTP from real workers, by OpenAI's SDK and by hand."""

import asyncio
import base64
import json
import os
import signal
import wave
from collections.abc import AsyncGenerator
from io import BytesIO
from typing import Any

import numpy as np
import openai
import pytest

from gateway.api.openai import audio
from gateway.config.settings import MediaConfig, ModelConfig
from gateway.workers.supervisor.spawn import default_command
from tests.gateway.harness import Gateway, running, until
from tests.support.audio_models import build_moonshine, build_qwen_tts, build_whisper, tone
from tests.support.models import build
from tests.support.pool import short_home

pytestmark = pytest.mark.anyio
CLIP = tone(1.0)
TEXT = "Hi."


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    folder = tmp_path_factory.mktemp("models")
    models = [
        ModelConfig(name="whisper", path=str(build_whisper(folder / "whisper"))),
        ModelConfig(name="moonshine", path=str(build_moonshine(folder / "moonshine"))),
        ModelConfig(name="speaker", path=str(build_qwen_tts(folder / "speaker"))),
        ModelConfig(name="text", path=str(build("qwen3", folder / "text"))),
    ]
    media = MediaConfig(max_size_bytes=200_000)
    with short_home() as home, pytest.MonkeyPatch.context() as patch:
        patch.setattr(audio, "DURATION_MAX_S", 5.0)
        async with running(home, models=models, command=default_command, media=media) as made:
            yield made


@pytest.fixture(scope="module")
async def client(gateway: Gateway) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as made:
        yield made


async def heard(gateway: Gateway, path: str = "transcriptions", clip: bytes = CLIP, **fields: Any) -> Any:
    reply = await gateway.client.post(
        f"/v1/audio/{path}", files={"file": ("a.wav", clip)}, data={"model": "whisper", "seed": "1", **fields}
    )
    assert reply.status_code == 200, reply.text
    return reply


async def refused(gateway: Gateway, path: str, clip: bytes = CLIP, **fields: Any) -> tuple[int, str | None, str]:
    files = {"file": ("a.wav", clip)} if clip else {"none": ("a", b"x")}
    reply = await gateway.client.post(f"/v1/audio/{path}", files=files, data={"model": "whisper", **fields})
    error = reply.json()["error"]
    return reply.status_code, error["param"], error["message"]


async def spoken(gateway: Gateway, **fields: Any) -> bytes:
    body = {"model": "speaker", "input": TEXT, "voice": "ryan", "seed": 1, **fields}
    reply = await gateway.client.post("/v1/audio/speech", json=body)
    assert reply.status_code == 200, reply.text
    return reply.content


async def test_openais_sdk_gets_transcripts_in_every_form(client: openai.AsyncOpenAI) -> None:
    create = client.audio.transcriptions.create
    asked: Any = {"model": "whisper", "file": ("a.wav", CLIP), "language": "en", "extra_body": {"seed": 1}}
    plain = await create(**asked)
    verbose = await create(
        **asked, response_format="verbose_json", timestamp_granularities=["word", "segment"], prompt="kato"
    )
    assert plain.text
    assert plain.usage is not None
    assert plain.usage.type == "tokens"
    assert plain.usage.input_tokens == plain.usage.input_token_details.audio_tokens == 10
    assert verbose.language == "english"
    assert verbose.duration == 1.0
    assert verbose.segments
    assert verbose.words
    assert verbose.text == "".join(each.text for each in verbose.segments).strip()
    assert all(0 <= each.start <= each.end for each in (*verbose.segments, *verbose.words))
    texts = [await create(**asked, response_format=each) for each in ("text", "srt", "vtt")]
    assert texts[0] == plain.text + "\n"
    assert " --> " in texts[1]
    assert texts[2].startswith("WEBVTT\n\n00:00:")


async def test_openais_sdk_streams_a_transcript(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "whisper", "file": ("a.wav", tone(5.0)), "extra_body": {"seed": 1}}
    whole = await client.audio.transcriptions.create(**asked)
    stream = await client.audio.transcriptions.create(**asked, stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == whole.text == "".join(each.delta for each in events[:-1]).strip()
    assert events[-1].usage.total_tokens == whole.usage.total_tokens


async def test_openais_sdk_translates(client: openai.AsyncOpenAI, gateway: Gateway) -> None:
    with pytest.deprecated_call():
        answer = await client.audio.translations.create(model="whisper", file=("a.wav", CLIP))
    assert isinstance(answer.text, str)
    verbose = (await heard(gateway, "translations", response_format="verbose_json")).json()
    assert (verbose["task"], verbose["language"]) == ("translate", "english")


async def test_openais_sdk_gets_speech(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "speaker", "input": TEXT, "voice": "ryan", "extra_body": {"seed": 1}}
    async with client.audio.speech.with_streaming_response.create(**asked, response_format="wav") as reply:
        data = b"".join([piece async for piece in reply.iter_bytes()])
        assert reply.headers["content-type"] == "audio/wav"
    with wave.open(BytesIO(data)) as file:
        assert (file.getframerate(), file.getsampwidth(), file.getnchannels()) == (400, 2, 1)
        samples = np.frombuffer(file.readframes(1 << 24), "<i2")
    assert len(samples) > 100
    assert samples.any()
    mp3 = await client.audio.speech.create(**asked)
    assert mp3.response.headers["content-type"] == "audio/mpeg"
    assert mp3.content[:1] == b"\xff"


async def test_speech_is_heard_again(gateway: Gateway) -> None:
    data = await spoken(gateway, response_format="opus")
    assert data.startswith(b"OggS")
    answer = await heard(gateway, clip=data, model="moonshine", response_format="verbose_json")
    assert 0.1 < answer.json()["duration"] < 5.0


async def test_speech_comes_as_events_too(gateway: Gateway) -> None:
    text = (await spoken(gateway, response_format="pcm", stream_format="sse")).decode()
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert {event["type"] for event in events[:-1]} == {"speech.audio.delta"}
    data = b"".join(base64.b64decode(event["audio"]) for event in events[:-1])
    assert data == await spoken(gateway, response_format="pcm")
    usage = events[-1]["usage"]
    assert events[-1]["type"] == "speech.audio.done"
    assert usage["output_tokens"] == pytest.approx(len(data) / 2 / 24_000 * 20, abs=1)


@pytest.mark.parametrize(
    ("path", "fields", "clip", "param", "words"),
    [
        ("transcriptions", {}, b"", "file", "Missing"),
        ("transcriptions", {}, b"not audio", "file", "cannot be read"),
        ("transcriptions", {}, tone(5.5), "file", "at most 5"),
        ("transcriptions", {}, tone(0.05), "file", "least"),
        ("transcriptions", {"response_format": "xml"}, CLIP, "response_format", "xml"),
        ("transcriptions", {"stream": "true", "response_format": "srt"}, CLIP, "response_format", "stream"),
        ("transcriptions", {"timestamp_granularities[]": "word"}, CLIP, "timestamp_granularities", "verbose_json"),
        ("transcriptions", {"language": "tlh"}, CLIP, "language", "tlh"),
        ("transcriptions", {"temperature": "3"}, CLIP, "temperature", "1.0"),
        ("transcriptions", {"include[]": "logprobs"}, CLIP, "include", "logprobs"),
        ("transcriptions", {"model": "moonshine", "prompt": "a"}, CLIP, "prompt", "no prompt"),
        ("transcriptions", {"model": "moonshine", "language": "en"}, CLIP, "language", "cannot be told"),
        ("translations", {"model": "moonshine"}, CLIP, "model", "translates nothing"),
        ("transcriptions", {"model": "speaker"}, CLIP, "model", "/v1/audio/speech"),
        ("transcriptions", {"model": "text"}, CLIP, "model", "/v1/chat/completions"),
    ],
)
async def test_a_clip_that_cannot_be_heard_is_refused(
    gateway: Gateway, path: str, fields: dict[str, str], clip: bytes, param: str, words: str
) -> None:
    status, named, message = await refused(gateway, path, clip, **fields)
    assert (status, named) == (400, param)
    assert words in message


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("audio/speech", {"input": " "}, "input", "empty"),
        ("audio/speech", {"input": "a" * 4097}, "input", "4096 are taken"),
        ("audio/speech", {"input": "a", "response_format": "mid"}, "response_format", "mid"),
        ("audio/speech", {"input": "a", "speed": 9}, "speed", "4"),
        ("audio/speech", {"input": "a", "stream_format": "zip"}, "stream_format", "zip"),
        ("audio/speech", {"input": "a", "voice": "alloy"}, "voice", "vivian, ryan"),
        ("audio/speech", {"input": "a", "model": "whisper"}, "model", "/v1/audio/transcriptions"),
        ("audio/speech", {"input": "a", "model": "text"}, "model", "/v1/chat/completions"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "model", "/v1/audio/speech"),
        ("embeddings", {"input": "a"}, "model", "/v1/audio/speech"),
    ],
)
async def test_a_text_that_cannot_be_spoken_is_refused(
    gateway: Gateway, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    reply = await gateway.client.post(f"/v1/{path}", json={"model": "speaker", **body})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error
    assert words in error["message"]


async def test_a_file_that_is_too_large_is_a_413(gateway: Gateway) -> None:
    status, _, message = await refused(gateway, "transcriptions", tone(5.0, rate=44_100))
    assert status == 413
    assert "200000" in message


async def test_lists_and_metrics_say_what_audio_models_are(gateway: Gateway) -> None:
    await spoken(gateway, response_format="pcm")
    await heard(gateway)
    cards = (await gateway.client.get("/v1/models")).json()["data"]
    assert {card["id"]: card["kind"] for card in cards} == {
        "whisper": "audio", "moonshine": "audio", "speaker": "audio", "text": "text",
    }  # fmt: skip
    ready = gateway.pool.worker("speaker").ready
    assert ready is not None
    assert ready.audio is not None
    assert (ready.audio.speaks, ready.audio.transcribes, ready.audio.rate) == (True, False, 400)
    text = (await gateway.client.get("/metrics")).text
    numbers = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if "#" not in line}
    assert numbers['mlxd_audio_heard_seconds_total{model="whisper"}'] >= 1.0
    assert numbers['mlxd_audio_spoken_seconds_total{model="speaker"}'] > 0.1


@pytest.mark.soak
async def test_a_killed_worker_is_a_pause_for_a_transcript_and_for_speech(gateway: Gateway) -> None:
    whole = (await heard(gateway)).json()["text"]
    speech = await spoken(gateway, response_format="pcm")

    async def kill(name: str) -> None:
        pid = gateway.pool.worker(name).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    await kill("whisper")
    await kill("speaker")
    assert (await heard(gateway)).json()["text"] == whole
    assert await spoken(gateway, response_format="pcm") == speech


async def test_deep_health_asks_audio_models_for_what_they_do(gateway: Gateway) -> None:
    await heard(gateway)
    await heard(gateway, model="moonshine")
    await spoken(gateway)
    probes = (await gateway.client.get("/healthz?deep=1")).json()["models"]
    states = {probe["model"]: (probe["ok"], probe["state"], probe["error"]) for probe in probes}
    assert {name: states[name] for name in ("whisper", "moonshine", "speaker")} == dict.fromkeys(
        ("whisper", "moonshine", "speaker"), (True, "ready", "")
    )


async def test_a_client_that_leaves_amid_its_upload_leaves_nothing(gateway: Gateway) -> None:
    services, statuses = gateway.app.services, gateway.metrics.requests_without_model
    before = statuses["499"]
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    part = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + tone(2.0)
    writer.write(
        b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 150000\r\n"
        b"content-type: multipart/form-data; boundary=x\r\n\r\n" + part
    )
    await until(lambda: services.bodies.numbers.used_bytes > 0)
    writer.close()
    await until(lambda: statuses["499"] == before + 1)
    assert services.bodies.numbers.used_bytes == 0
    assert services.media.numbers.used_bytes == 0
    assert gateway.link.in_flight == 0


async def test_a_client_that_leaves_before_its_clip_is_heard_leaves_nothing(gateway: Gateway) -> None:
    await heard(gateway)
    services, worker = gateway.app.services, gateway.pool.worker("whisper")
    finished = gateway.metrics.model("whisper").finished
    before = finished["abort"]
    # It is stopped, so that the client leaves before its answer.
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        request = asyncio.create_task(heard(gateway))
        await until(lambda: gateway.link.in_flight == 1)
        request.cancel()
        await until(lambda: gateway.link.in_flight == 0 and services.media.numbers.used_bytes == 0)
        assert finished["abort"] == before + 1
        assert gateway.link.unacked_aborts == 1
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    await until(lambda: gateway.link.unacked_aborts == 0)
    await heard(gateway)
    assert gateway.pool.worker("whisper") is worker


async def test_a_client_that_leaves_amid_speech_ends_it(gateway: Gateway) -> None:
    services, numbers = gateway.app.services, gateway.metrics.model("speaker")
    await spoken(gateway)
    aborts, spoken_s = numbers.finished["abort"], numbers.stats.spoken_s if numbers.stats is not None else 0.0
    # Some sixty groups of sentences, of ten seconds of sound each.
    body = {"model": "speaker", "input": "The rain falls on all of us, and on all of it too. " * 75, "voice": "ryan"}
    async with gateway.client.stream("POST", "/v1/audio/speech", json=body | {"response_format": "pcm"}) as reply:
        assert reply.status_code == 200
        await anext(reply.aiter_raw())
    await until(lambda: gateway.link.in_flight == 0 and services.admission.inside("speaker") == 0)
    assert numbers.finished["abort"] == aborts + 1
    await until(lambda: gateway.link.unacked_aborts == 0)
    await spoken(gateway)
    await until(lambda: numbers.stats is not None and numbers.stats.spoken_s > spoken_s)
    assert numbers.stats is not None
    assert numbers.stats.spoken_s - spoken_s < 300.0, "most of it was not computed"


async def test_files_of_all_requests_share_the_room_of_media(gateway: Gateway) -> None:
    numbers = gateway.app.services.media.numbers
    before = numbers.used_bytes
    await heard(gateway)
    assert numbers.used_bytes == before
    media = gateway.app.services.media
    limit, media.limit_bytes = media.limit_bytes, 1024
    try:
        reply = await gateway.client.post(
            "/v1/audio/transcriptions", files={"file": ("a.wav", CLIP)}, data={"model": "whisper"}
        )
    finally:
        media.limit_bytes = limit
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "media_memory_full")
    assert numbers.used_bytes == before

"""Ollama's API over HTTP: a real gateway, scripted workers."""

import json
from collections.abc import AsyncGenerator
from datetime import datetime
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gateway.access.key import Key, KeyFile
from gateway.api.ollama.response import ChatForm, LineStream
from gateway.config.settings import ModelConfig, ServerConfig
from gateway.http.sse import JSON_LINES, StreamTiming, respond_stream
from gateway.request.generation import Generation
from gateway.request.record import RequestRecord
from gateway.workers.supervisor.state import State
from protocol.to_worker import ChatPrompt, Generate, Sampling
from tests.gateway.harness import Gateway, running, until
from tests.support.published import check_answer, document

pytestmark = pytest.mark.anyio

CHAT, GENERATE = "/api/chat", "/api/generate"
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    async with running(tmp_path_factory.mktemp("g"), ["--step-ms", "1"], worker="talkative") as started:
        yield started


def chat(*script: list[str], **fields: Any) -> dict[str, Any]:
    said = json.dumps(script) if script else "hi"
    return {"model": "m", "messages": [{"role": "user", "content": said}], "options": {"num_predict": 5}} | fields


def lines(text: str, path: str = CHAT) -> list[Any]:
    """The lines of a stream, each of the published shape."""
    content = document()["paths"][path]["post"]["responses"]["200"]["content"]
    schema = content["application/x-ndjson"]["x-itemSchema"] | {"components": document()["components"]}
    assert text.endswith("\n")
    found = [json.loads(line) for line in text.splitlines()]
    for line in found:
        jsonschema.Draft202012Validator(schema).validate(line)
    return found


# -- answers ---------------------------------------------------------------------------------------------------------


async def test_a_chat_streams_lines_of_json_unless_it_says_otherwise(gateway: Gateway) -> None:
    answer = await gateway.client.post(CHAT, json=chat())

    assert answer.headers["content-type"] == "application/x-ndjson"
    *pieces, last = lines(answer.text)
    assert "".join(line["message"]["content"] for line in pieces) == "t0 t1 t2 t3 t4 "
    assert {line["done"] for line in pieces} == {False}
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "length", "")
    assert (last["prompt_eval_count"], last["eval_count"]) == (3, 5)
    assert datetime.fromisoformat(last["created_at"]).tzinfo is not None


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_the_whole_answer_has_what_the_stream_says(gateway: Gateway, path: str) -> None:
    script = (["reasoning", "hm"], ["text", "He"], ["logprobs", "llo"], ["finish", "stop"])
    body = chat(*script, logprobs=True, top_logprobs=2) | {"prompt": json.dumps(script)}
    whole = (await gateway.client.post(path, json=body | {"stream": False})).json()
    *pieces, last = lines((await gateway.client.post(path, json=body)).text, path)

    check_answer("POST", path, 200, whole)
    said = [line.get("message", line) for line in pieces]
    key = "content" if path == CHAT else "response"
    assert "".join(piece[key] for piece in said) == whole.get("message", whole)[key] == "Hello"
    assert "".join(piece.get("thinking", "") for piece in said) == whole.get("message", whole)["thinking"] == "hm"
    assert [logprob for line in pieces for logprob in line.get("logprobs", [])] == whole["logprobs"]
    assert [top["token"] for top in whole["logprobs"][0]["top_logprobs"]] == ["llo", "other"]
    for name in ("done_reason", "prompt_eval_count", "eval_count", "prompt_eval_duration", "eval_duration"):
        assert whole[name] == last[name], name
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (2_000_000, 3_000_000)
    assert last["total_duration"] > 0


async def test_a_tool_call_comes_whole_with_its_arguments_as_an_object(gateway: Gateway) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    script = (["tool", "f", '{"a": {"b": [1]}}'], ["tool", "f", "{}"], ["finish", "tool_calls"])
    *pieces, last = lines((await gateway.client.post(CHAT, json=chat(*script, tools=[tool]))).text)

    calls = [call for line in pieces for call in line["message"].get("tool_calls", [])]
    assert calls == [
        {"id": "call_0", "function": {"index": 0, "name": "f", "arguments": {"a": {"b": [1]}}}},
        {"id": "call_1", "function": {"index": 1, "name": "f", "arguments": {}}},
    ]
    assert last["done_reason"] == "stop"


async def test_a_call_that_is_cut_off_is_not_one_to_make(gateway: Gateway) -> None:
    script = (["tool", "f", '{"path": "/et'], ["finish", "length"])
    whole = (await gateway.client.post(CHAT, json=chat(*script, stream=False))).json()

    assert "tool_calls" not in whole["message"]
    assert whole["done_reason"] == "length"


async def test_a_context_brings_the_conversation_back(gateway: Gateway, tmp_path: Path) -> None:
    script = [["reasoning", "hm"], ["text", "Paris, é."], ["finish", "stop"]]
    body = {"model": "m", "system": "Be brief.", "prompt": json.dumps(script), "stream": False}
    first = (await gateway.client.post(GENERATE, json=body)).json()
    assert all(0 <= number < 1 << 31 for number in first["context"])

    again = {"model": "m", "prompt": json.dumps([["text", "Ja"], ["finish", "stop"]]), "context": first["context"]}
    *_, last = lines((await gateway.client.post(GENERATE, json=again)).text, GENERATE)
    assert len(last["context"]) > len(first["context"])
    foreign = await gateway.client.post(GENERATE, json=again | {"context": [1, 2, 3]})
    assert foreign.status_code == 400
    assert "context" in foreign.json()["error"]


async def test_a_raw_prompt_has_no_template_and_no_context(gateway: Gateway) -> None:
    body = {"model": "m", "prompt": "as it is", "raw": True, "options": {"num_predict": 2}}
    *pieces, last = lines((await gateway.client.post(GENERATE, json=body)).text, GENERATE)

    assert "".join(line["response"] for line in pieces) == "t0 t1 "
    assert "context" not in last
    assert (await gateway.client.post(GENERATE, json=body | {"system": "x"})).status_code == 400


# -- fields ----------------------------------------------------------------------------------------------------------


async def test_settings_of_ollamas_runner_do_nothing_and_what_would_change_the_answer_is_named(
    gateway: Gateway,
) -> None:
    options = {"num_predict": 2.0, "num_gpu": 1, "num_thread": 8, "mirostat": 0, "num_ctx": 4096, "repeat_last_n": 64}
    fields = {"keep_alive": "5m", "truncate": True, "format": "", "think": None, "images": []}
    answer = await gateway.client.post(CHAT, json=chat(options=options, **fields))

    assert lines(answer.text)[-1]["eval_count"] == 2
    ignored = answer.headers["x-mlxd-ignored"].split(", ")
    assert ignored == ["images", "options.num_ctx", "keep_alive"]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"options": {"mirostat": 2}}, "mirostat"),
        ({"options": {"typical_p": 0}}, "typical_p"),
        ({"options": {"temperature": "warm"}}, "options.temperature"),
        ({"format": "yaml"}, "format"),
        ({"think": "deeply"}, "think"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"messages": 1}, "messages"),
        ({"model": "nope"}, "nope"),
    ],
)
async def test_errors_are_one_text(gateway: Gateway, fields: dict[str, Any], word: str) -> None:
    answer = await gateway.client.post(CHAT, json=chat() | fields)

    assert answer.status_code == (404 if "model" in fields else 400)
    assert list(answer.json()) == ["error"]
    assert word in answer.json()["error"]
    check_answer("POST", CHAT, answer.status_code, answer.json())


async def test_an_error_amid_a_stream_is_its_last_line(gateway: Gateway) -> None:
    body = chat(["text", "a"], ["wait"], ["finish", "error"])
    first, last = lines((await gateway.client.post(CHAT, json=body)).text)

    assert first["message"]["content"] == "a"
    assert last == {"error": "it failed"}


async def test_a_name_may_end_in_latest(gateway: Gateway) -> None:
    answer = await gateway.client.post(CHAT, json=chat(model="m:latest"))

    assert lines(answer.text)[-1]["model"] == "m:latest"
    assert (await gateway.client.post("/v1/models/m:8b")).status_code in (404, 405)


async def test_a_long_wait_is_bridged_by_lines_that_say_nothing(gateway: Gateway) -> None:
    record = RequestRecord("r", "POST", CHAT)
    model = ModelConfig(name="m", path="m")
    script = json.dumps([["progress"], ["wait"], ["wait"], ["text", "Hi"], ["finish", "stop"]])
    prompt = ChatPrompt([{"role": "user", "content": script}])
    encoder = LineStream(ChatForm("m", record))
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await until(lambda: bool(sent) and not sent[-1].get("more_body", True))
        return {"type": "http.disconnect"}

    services = gateway.app.services
    generates = [Generate(services.link.next_rid(), prompt, Sampling(), want_progress=True)]
    with Generation(services, model, generates, record, encoder.bind) as generation:
        await respond_stream(generation, encoder, receive, send, StreamTiming(0.0, 0.005), JSON_LINES)

    body = b"".join(message.get("body", b"") for message in sent)
    said = lines(body.decode())
    assert len(said) > 3
    assert "".join(line["message"]["content"] for line in said) == "Hi"


# -- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "fields"), [(CHAT, {"messages": []}), (GENERATE, {"prompt": ""}), (GENERATE, {})])
async def test_nothing_to_answer_loads_the_model(gateway: Gateway, path: str, fields: dict[str, Any]) -> None:
    await gateway.pool.unload("m")
    assert (await gateway.client.get("/api/ps")).json() == {"models": []}
    (loaded,) = lines((await gateway.client.post(path, json={"model": "m", "keep_alive": -1} | fields)).text, path)

    assert (loaded["done"], loaded["done_reason"]) == (True, "load")
    assert gateway.pool.worker("m").state is State.READY
    whole = await gateway.client.post(path, json={"model": "m", "stream": False} | fields)
    assert whole.json()["done_reason"] == "load"
    refused = await gateway.client.post(path, json={"model": "m", "keep_alive": 0} | fields)
    assert refused.status_code == 403, "without a key no program administers"


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("field", ["format", "think"])
async def test_a_load_with_an_invalid_field_is_refused(gateway: Gateway, path: str, field: str) -> None:
    answer = await gateway.client.post(path, json={"model": "m", field: "AAA"})

    assert answer.status_code == 400
    assert f"'{field}'" in answer.json()["error"]


async def test_no_time_to_keep_a_model_unloads_it_which_as_downloads_needs_an_admin_key(tmp_path: Path) -> None:
    async with running(tmp_path, ["--step-ms", "1"]) as gateway:
        keys = KeyFile(tmp_path / "keys" / "keys.json")
        plain = keys.create(Key(name="plain", prefix="", salt="", hash=""))[1]
        admin = keys.create(Key(name="boss", prefix="", salt="", hash="", is_admin=True))[1]
        unload = {"model": "m", "keep_alive": 0}
        for path, body in ((GENERATE, unload), ("/api/pull", {"model": "hf.co/org/tiny"})):
            for secret, status in ((None, 401), (plain, 403)):
                headers = {"authorization": f"Bearer {secret}"} if secret else {}
                refused = await gateway.client.post(path, json=body, headers=headers)
                assert (refused.status_code, list(refused.json())) == (status, ["error"])
        headers = {"authorization": f"Bearer {admin}"}
        for zero in (0, "0s"):
            assert (await gateway.client.post(CHAT, json={"model": "m"}, headers=headers)).status_code == 200
            assert gateway.pool.worker("m").state is State.READY
            done = await gateway.client.post(GENERATE, json=unload | {"keep_alive": zero}, headers=headers)
            assert done.json()["done_reason"] == "unload"
            assert gateway.pool.worker("m").state is State.STOPPED
        gateway.app.services.audit.close()
        written = (tmp_path / "logs" / "audit.log").read_text()
        assert '"action":"model.unload","target":"m"' in written
        assert '"key":"boss"' in written


async def test_requests_of_a_key_are_counted_and_questions_about_models_are_not(tmp_path: Path) -> None:
    async with running(tmp_path, ["--step-ms", "1"]) as gateway:
        keys = KeyFile(tmp_path / "keys" / "keys.json")
        secret = keys.create(Key(name="k", prefix="", salt="", hash="", rpm=2))[1]
        headers = {"authorization": f"Bearer {secret}"}
        for _ in range(5):
            assert (await gateway.client.post("/api/show", json={"name": "m"}, headers=headers)).status_code == 200
        statuses = [
            (
                await gateway.client.post(
                    GENERATE, json={"model": "m", "prompt": "x", "options": {"num_predict": 1}}, headers=headers
                )
            ).status_code
            for _ in range(3)
        ]
        assert statuses == [200, 200, 429]
        assert gateway.metrics.model("m").requests["200"] == 2


# -- what is not served ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/api/delete"),
        ("POST", "/api/copy"),
        ("POST", "/api/create"),
        ("POST", "/api/push"),
        ("POST", "/api/blobs/sha256:1"),
        ("POST", "/api/me"),
    ],
)
async def test_a_path_that_is_not_served_is_a_404_in_ollamas_shape(gateway: Gateway, method: str, path: str) -> None:
    answer = await gateway.client.request(method, path, json={"model": "m"})

    assert (answer.status_code, answer.json()) == (404, {"error": f"Unknown path: {method} {path}."})


async def test_the_port_of_ollama_says_that_it_is_running(tmp_path: Path) -> None:
    async with running(tmp_path) as plain:
        assert (await plain.client.get("/")).json()["name"] == "mlxd"
        config = plain.app.services.config
        server = ServerConfig(ollama_port=plain.port)
        plain.app.services.live.apply(type(config)(config.home, server, config.models, config.config_path))
        for accept in ("*/*", "text/html"):
            answer = await plain.client.get("/", headers={"accept": accept})
            assert (answer.status_code, answer.text) == (200, "Ollama is running")
        assert (await plain.client.head("/")).status_code == 200

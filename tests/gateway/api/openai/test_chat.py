import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from gateway.config.settings import ModelConfig, ServerConfig
from gateway.http import connection_limits
from gateway.http.listen_and_tls import raise_file_limit
from gateway.link.parked_sequences import ResumeLimits
from gateway.request.record import ignored_header
from gateway.telemetry.prometheus import Exposition
from gateway.workers.supervisor.state import State, WorkerLimits
from tests.gateway.harness import Gateway, chat, events, running, until
from tests.support.pool import tokens
from tests.support.scale import patient

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    server = ServerConfig(max_body_bytes=100_000)
    async with running(tmp_path_factory.mktemp("g"), ["--step-ms", "1"], server=server) as running_gateway:
        yield running_gateway


@pytest.fixture(scope="module")
async def talking(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    async with running(tmp_path_factory.mktemp("t"), worker="talkative") as running_gateway:
        yield running_gateway


# -- answers ---------------------------------------------------------------------------------------------------------


async def test_a_chat_is_answered_in_one_piece(gateway: Gateway) -> None:
    answer = await gateway.client.post(PATH, json=chat())

    assert answer.status_code == 200
    body = answer.json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "t0 t1 t2 t3 t4 ", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert body["usage"]["total_tokens"] == 8


async def test_a_chat_is_streamed_role_first_usage_last(gateway: Gateway) -> None:
    request = chat(stream=True, stream_options={"include_usage": True})
    answer = await gateway.client.post(PATH, json=request)

    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = events(answer.text)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-2])
    assert text == "t0 t1 t2 t3 t4 "
    assert chunks[-3]["choices"][0]["finish_reason"] == "length"
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"]["completion_tokens"] == 5
    assert chunks[-1] == "[DONE]"


async def test_several_choices_are_streamed_side_by_side(gateway: Gateway) -> None:
    answer = await gateway.client.post(PATH, json=chat(stream=True, n=3))

    texts = ["", "", ""]
    for chunk in events(answer.text)[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["t0 t1 t2 t3 t4 "] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_fields_are_named_in_a_header_and_counted(gateway: Gateway, stream: bool) -> None:
    before = gateway.metrics.model("m").ignored_fields
    answer = await gateway.client.post(PATH, json=chat(stream=stream, zap=1, user="u", **{"x\r\ny: z": 2}))

    assert answer.status_code == 200
    assert answer.headers["x-mlxd-ignored"] == "zap, x__y__z"
    assert gateway.metrics.model("m").ignored_fields == before + 2


def test_the_ignored_header_is_bounded() -> None:
    [(_, value)] = ignored_header([f"{'é' * 1000}{i}" for i in range(1000)])

    assert len(value) < 1000
    assert value.endswith(b"+980")


async def test_the_seed_is_told_and_given_back(gateway: Gateway) -> None:
    drawn = await gateway.client.post(PATH, json=chat())
    given = await gateway.client.post(PATH, json=chat(seed=5))

    assert int(drawn.headers["x-mlxd-seed"]) >= 0
    assert given.headers["x-mlxd-seed"] == "5"


async def test_a_sane_request_id_is_kept_and_another_is_replaced(gateway: Gateway) -> None:
    kept = await gateway.client.post(PATH, json=chat(), headers={"x-request-id": "abc-1.2:3"})
    replaced = await gateway.client.post(PATH, json=chat(), headers={"x-request-id": "a b" * 100})

    assert kept.headers["x-request-id"] == "abc-1.2:3"
    assert replaced.headers["x-request-id"].startswith("req_")


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_workers_rejection_is_a_real_status(gateway: Gateway, stream: bool) -> None:
    request = {"model": "m", "prompt": "refused", "stream": stream}
    answer = await gateway.client.post("/v1/completions", json=request)

    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "refused"


async def test_an_unknown_model_is_a_404_that_lists_the_models(gateway: Gateway) -> None:
    answer = await gateway.client.post(PATH, json=chat(model="gpt-9", stream=True))

    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"", 400), (b"{", 400), (b"\xff\xfe", 400), (b"[" * 50_000, 400), (b"x" * 100_001, 413)],
    ids=["empty", "cut", "not utf-8", "deep", "large"],
)
async def test_a_bad_body_is_refused_and_the_next_request_is_served(gateway: Gateway, body: bytes, status: int) -> None:
    answer = await gateway.client.post(PATH, content=body, headers={"content-type": "text/plain"})
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    assert (await gateway.client.post(PATH, json=chat())).status_code == 200


async def test_a_body_without_a_length_is_cut_off_at_the_limit(gateway: Gateway) -> None:
    async def endless() -> AsyncGenerator[bytes, None]:
        for _ in range(20):
            yield b"x" * 10_000

    assert (await gateway.client.post(PATH, content=endless())).status_code == 413


async def test_a_huge_body_is_refused_before_it_is_sent(gateway: Gateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000000\r\n\r\n".encode())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n"), patient(5))
    writer.close()

    assert head == b"HTTP/1.1 413 Request Entity Too Large\r\n" or head.startswith(b"HTTP/1.1 413")


async def test_wrong_methods_and_paths_have_openais_shape(gateway: Gateway) -> None:
    wrong = await gateway.client.get(PATH)
    nowhere = await gateway.client.get("/v1/nowhere")

    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert (nowhere.status_code, nowhere.json()["error"]["code"]) == (404, "unknown_url")


async def test_clients_whose_base_url_lacks_the_version_are_answered_alike(gateway: Gateway) -> None:
    paths = {
        "/chat/completions": chat(),
        "/completions": {"model": "m", "prompt": "hi", "max_tokens": 2},
        "/responses": {"model": "m", "input": "hi", "max_output_tokens": 2},
        "/messages": {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]},
        "/messages/count_tokens": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    }
    for path, body in paths.items():
        short, whole = [await gateway.client.post(each, json=body) for each in (path, f"/v1{path}")]
        assert (short.status_code, short.json().keys()) == (200, whole.json().keys()), path
        refused = await gateway.client.post(path, json={"model": "m"})
        assert refused.json().keys() == (await gateway.client.post(f"/v1{path}", json={"model": "m"})).json().keys()
    for path, param in (
        ("/embeddings", "input"),
        ("/rerank", "query"),
        ("/score", "text_1"),
        ("/audio/speech", "input"),
    ):
        assert (await gateway.client.post(path, json={"model": "m"})).json()["error"]["param"] == param
    for path in ("/models", "/models/m"):
        assert (await gateway.client.get(path)).json() == (await gateway.client.get(f"/v1{path}")).json()


async def test_random_bodies_never_cause_a_500(gateway: Gateway) -> None:
    chance = random.Random(1)

    def value(depth: int = 0) -> Any:
        kind = chance.randrange(9 if depth < 3 else 6)
        leaves: list[Any] = [None, True, chance.randrange(-3, 30), chance.random() * 5, "x", "user"]
        if kind < 6:
            return leaves[kind]
        if kind == 6:
            return [value(depth + 1) for _ in range(chance.randrange(3))]
        return {chance.choice(["role", "content", "type", "text", "a"]): value(depth + 1) for _ in range(3)}

    fields = ["messages", "temperature", "top_p", "n", "stop", "seed", "logit_bias", "max_tokens", "logprobs", "tools"]
    for _ in range(300):
        body = chat(**{chance.choice(fields): value() for _ in range(chance.randrange(1, 4))})
        path = chance.choice([PATH, "/v1/completions"])
        body |= {"max_tokens": 1, "prompt": value()}
        assert (await gateway.client.post(path, json=body)).status_code in (200, 400)
    assert gateway.metrics.unhandled_errors == 0


# -- who leaves, and who does not read -------------------------------------------------------------------------------


async def _open(gateway: Gateway, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has sent a request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    data = json.dumps(body).encode()
    writer.write(f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_sequence(gateway: Gateway, stream: bool) -> None:
    _, writer = await _open(gateway, chat(stream=stream, max_tokens=1_000_000))
    await until(lambda: gateway.link.in_flight == 1)
    writer.close()

    await until(lambda: gateway.link.in_flight == 0 and gateway.app.services.admission.inside("m") == 0)
    assert gateway.metrics.model("m").finished["abort"] >= 1
    await until(lambda: (stats := gateway.metrics.model("m").stats) is not None and stats.running == 0)


async def test_a_client_that_leaves_while_the_model_loads_frees_its_place(tmp_path: Path) -> None:
    async with running(tmp_path, ["--hang-on-load"]) as gateway:
        _, writer = await _open(gateway, chat(stream=True))
        await until(lambda: gateway.app.services.admission.inside("m") == 1)
        writer.close()
        await until(lambda: gateway.app.services.admission.inside("m") == 0)
        assert gateway.metrics.model("m").opening == 0


async def test_a_client_that_never_reads_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "WRITE_TIMEOUT_S", 0.2)
    async with running(tmp_path, ["--step-ms", "4", "--tokens-per-step", "2000"]) as gateway:
        _, writer = await _open(gateway, chat(stream=True, max_tokens=1 << 30))
        await until(lambda: gateway.link.in_flight == 1)
        # asyncio's reader stops reading at its limit, so the kernel's buffers fill up.
        await until(lambda: gateway.link.in_flight == 0)
        await until(lambda: gateway.app.services.admission.inside("m") == 0)
        writer.close()


# -- workers ---------------------------------------------------------------------------------------------------------


async def test_a_cold_stream_hears_of_us_before_the_model_is_loaded(tmp_path: Path) -> None:
    async with (
        running(tmp_path, ["--load-s", str(1 + patient(1.5))]) as gateway,
        gateway.client.stream("POST", PATH, json=chat(stream=True)) as answer,
    ):
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        assert '"role":"assistant"' in await anext(lines)
        assert gateway.pool.worker("m").state in (State.STARTING, State.LOADING)
        rest = [line async for line in lines]
        assert rest[-2] == "data: [DONE]"


async def test_a_model_that_cannot_be_loaded_is_a_503_with_the_reason(tmp_path: Path) -> None:
    async with running(tmp_path, ["--exit-on-load", "66", "--goodbye-code", "20"]) as gateway:
        # A stream's status waits a second for its first event, a busy machine longer for a worker: this one has failed.
        for stream in (False, True):
            answer = await gateway.client.post(PATH, json=chat(stream=stream))

            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "model_missing"
            assert answer.json()["error"]["message"] == "cannot be loaded"


async def kill_amid(gateway: Gateway, max_tokens: int) -> list[str]:
    """The lines of a stream whose worker is killed once it is under way."""
    async with gateway.client.stream("POST", PATH, json=chat(stream=True, max_tokens=max_tokens)) as answer:
        seen: list[str] = []
        async for line in answer.aiter_lines():
            seen.append(line)
            if "t5 " in line:
                os.kill(gateway.pool.worker("m").pid, signal.SIGKILL)
        return [line for line in seen if line]


async def test_a_worker_killed_amid_a_stream_is_a_pause(tmp_path: Path) -> None:
    async with running(tmp_path, ["--step-ms", "2"]) as gateway:
        lines = await kill_amid(gateway, max_tokens=60)

        said = [json.loads(line[6:])["choices"][0] for line in lines[:-1]]
        assert "".join(choice["delta"].get("content") or "" for choice in said) == tokens(60)
        assert [choice["finish_reason"] for choice in said if choice["finish_reason"]] == ["length"]
        assert lines[-1] == "data: [DONE]"
        numbers = gateway.metrics.model("m")
        assert (numbers.resumes, numbers.restarts["-9"], numbers.finished["length"]) == (1, 1, 1)
        assert numbers.generation_tokens == 60
        assert b'mlxd_request_resumes_total{model="m"} 1.0' in Exposition(gateway.metrics).text()


async def test_a_stream_that_may_not_be_resumed_ends_with_an_error_event_and_no_end_mark(tmp_path: Path) -> None:
    async with running(tmp_path, ["--step-ms", "1"], limits=WorkerLimits(resume=ResumeLimits(total=0))) as gateway:
        lines = await kill_amid(gateway, max_tokens=1_000_000)

        assert json.loads(lines[-1][6:])["error"]["code"] == "worker_died"
        assert (await gateway.client.post(PATH, json=chat())).status_code == 200


async def test_a_request_that_its_worker_never_accepted_is_sent_again(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        first = await gateway.client.post(PATH, json=chat())
        pid = gateway.pool.worker("m").pid
        os.kill(pid, signal.SIGSTOP)
        task = asyncio.create_task(gateway.client.post(PATH, json=chat()))
        await until(lambda: gateway.link.in_flight == 1)
        os.kill(pid, signal.SIGKILL)

        assert (await task).json()["choices"] == first.json()["choices"]


async def test_a_request_that_nobody_could_serve_is_a_503_that_says_when_to_come_again(tmp_path: Path) -> None:
    async with running(tmp_path, limits=WorkerLimits(resume=ResumeLimits(fruitless=0))) as gateway:
        request = gateway.client.post("/v1/completions", json={"model": "m", "prompt": "kill"})
        answer = await request

        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_died")
        assert "retry-after" in answer.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_kills_workers_is_a_400_now_and_later(tmp_path: Path, stream: bool) -> None:
    body = {"model": "m", "prompt": "kill", "stream": stream}
    async with running(tmp_path) as gateway:
        for _ in range(2):
            answer = await gateway.client.post("/v1/completions", json=body)
            # A stream's status line is held back for a second; on a busy machine two workers take longer to die.
            is_late = stream and answer.status_code == 200
            error = events(answer.text)[-1]["error"] if is_late else answer.json()["error"]
            assert (is_late or answer.status_code == 400, error["code"]) == (True, "quarantined")
        assert gateway.metrics.model("m").restarts["-9"] == 2
        assert gateway.metrics.model("m").quarantined == 1
        assert (await gateway.client.post(PATH, json=chat())).status_code == 200


async def test_a_full_queue_is_a_429_and_a_draining_server_a_503(tmp_path: Path) -> None:
    model = ModelConfig(name="m", path="m", max_running=1)
    async with running(tmp_path, models=[model]) as gateway:
        gateway.app.services.admission.waiting_max = 0
        _, writer = await _open(gateway, chat(stream=True, max_tokens=1_000_000))
        await until(lambda: gateway.link.in_flight == 1)
        full = await gateway.client.post(PATH, json=chat())
        gateway.app.drain()
        draining = await gateway.client.post(PATH, json=chat())
        writer.close()

        assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(full.headers["retry-after"]) >= 1
        assert (draining.status_code, draining.json()["error"]["code"]) == (503, "draining")
        assert "retry-after" in draining.headers
        assert (await gateway.client.get("/readyz")).status_code == 503
        assert (await gateway.client.get("/livez")).status_code == 200


async def test_a_thousand_clients_at_once_are_all_answered(tmp_path: Path) -> None:
    if raise_file_limit() < 2500:
        pytest.skip("this machine allows too few open files for both ends of 1000 connections")
    model = ModelConfig(name="m", path="m", max_running=8)
    async with running(tmp_path, ["--step-ms", "1"], models=[model]) as gateway:
        gateway.app.services.admission.waiting_max = 92

        async def ask() -> int:
            reader, writer = await _open(gateway, chat(max_tokens=50))
            try:
                return int((await reader.readuntil(b"\r\n")).split()[1])
            finally:
                writer.close()

        answers = await asyncio.gather(*(ask() for _ in range(1000)))

        assert set(answers) == {200, 429}
        assert answers.count(200) >= 100
        assert gateway.app.services.admission.inside("m") == 0


async def test_a_body_that_is_too_large_for_a_frame_is_one_requests_error(tmp_path: Path) -> None:
    async with running(tmp_path, ["--step-ms", "1"]) as gateway:
        assert (await gateway.client.post(PATH, json=chat())).status_code == 200
        answer = await gateway.client.post(PATH, json=chat("x" * (5 * 1024 * 1024), n=16))
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "request_too_large"
        assert gateway.metrics.model("m").rejections["unsendable"] == 1
        # The worker was not cut off: it answers without having been started again.
        assert (await gateway.client.post(PATH, json=chat())).status_code == 200
        assert gateway.pool.worker("m").epoch == 1


# -- progress of the prompt ------------------------------------------------------------------------------------------

PROGRESS = [["progress", 30, 100, 10, 20], ["progress", 100, 100, 10, 90], ["text", "a"], ["finish", "stop"]]


@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
async def test_a_stream_tells_the_progress_of_its_prompt_before_the_first_token(talking: Gateway, path: str) -> None:
    said = json.dumps(PROGRESS)
    body = chat(said) if path == PATH else {"model": "m", "prompt": said}
    chunks = events((await talking.client.post(path, json=body | {"stream": True, "return_progress": True})).text)

    shown = [chunk.get("prompt_progress") for chunk in chunks[:-1]]
    at = [each for each in shown if each is not None]
    # Progress that comes while an event is written is merged with the next.
    assert at[-1] == {"total": 100, "cache": 10, "processed": 100, "time_ms": 90}
    assert at[:-1] in ([], [{"total": 100, "cache": 10, "processed": 30, "time_ms": 20}])
    texts = [said_in(chunk["choices"][0]) for chunk in chunks[:-1]]
    assert shown.index(at[-1]) < texts.index("a")
    silent = events((await talking.client.post(path, json=body | {"stream": True})).text)
    assert not any("prompt_progress" in chunk for chunk in silent[:-1])


def said_in(choice: dict[str, Any]) -> str | None:
    return choice["text"] if "text" in choice else choice["delta"].get("content")


async def test_progress_of_a_whole_answer_is_refused(gateway: Gateway) -> None:
    refused = await gateway.client.post(PATH, json=chat(return_progress=True))

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "return_progress"
    assert (await gateway.client.post(PATH, json=chat(return_progress=False))).status_code == 200

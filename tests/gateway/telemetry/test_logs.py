import asyncio
import io
import json
import logging
import os
import threading
from pathlib import Path

import httpx2
import pytest

from gateway.config.settings import ServerConfig
from gateway.ctl.logs import plain
from gateway.telemetry.logs import ConsoleFormatter, JsonFormatter, LogSinks, LogWriter, dropped_records
from tests.gateway.harness import chat, running, until
from tests.support.scale import patient


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("gateway.x", logging.WARNING, __file__, 1, message, (), None)
    made.fields = fields
    return made


def test_a_json_line_holds_the_message_and_its_fields() -> None:
    line = json.loads(JsonFormatter().format(record("hello", request="r1", ms=1.5, path=Path("/x"))))

    assert line["level"] == "warning"
    assert line["message"] == "hello"
    assert (line["request"], line["ms"], line["path"]) == ("r1", 1.5, "/x")
    assert line["time"].endswith("+00:00")


def test_a_console_line_cannot_be_forged_by_what_it_quotes() -> None:
    line = ConsoleFormatter(False).format(record("bad\nname", value="a b\nc"))

    assert all(part.startswith("    ") for part in line.split("\n")[1:])
    assert "value='a b\\nc'" in line


@pytest.mark.parametrize("control", ["\x1b]0;owned\x07", "\x9b31m", "\x85", "\u2028", "\u202e", "\x7f", "\b"])
def test_a_console_line_does_not_command_the_terminal(control: str) -> None:
    quoting = record(f"GET /{control}", value=f"a{control}")
    try:
        raise ValueError(control)
    except ValueError as error:
        quoting.exc_info = (ValueError, error, None)
    for line in (
        ConsoleFormatter(False).format(quoting),
        plain(json.dumps({"message": control, "exception": control})),
    ):
        assert all(c.isprintable() or c == "\n" for c in line), repr(line)
        assert "\\x" in line or "\\u" in line
    colored = ConsoleFormatter(True).format(quoting)
    assert colored.replace("\x1b[33m", "").replace("\x1b[0m", "") == ConsoleFormatter(False).format(quoting)


def test_only_our_loggers_are_touched() -> None:
    root, library = logging.getLogger(), logging.getLogger("uvicorn.error")
    before = (root.level, list(root.handlers), library.level, list(library.handlers))
    with LogSinks("WARNING", json=True, stream=io.StringIO()):
        assert logging.getLogger("gateway").level == logging.WARNING
        assert (root.level, list(root.handlers), library.level, list(library.handlers)) == before
    assert logging.getLogger("gateway").level == logging.NOTSET
    assert not logging.getLogger("gateway").handlers


@pytest.mark.parametrize("level", ["debug", "DEBUG", "Debug"])
def test_the_level_may_be_in_any_case(level: str) -> None:
    with LogSinks(level, stream=io.StringIO()):
        assert logging.getLogger("gateway").level == logging.DEBUG


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown log level 'loud'"):
        LogSinks("loud")


def test_a_stopped_log_has_written_everything() -> None:
    stream = io.StringIO()
    with LogSinks("info", json=True, stream=stream):
        for number in range(100):
            logging.getLogger("gateway.test").info("line %d", number)

    lines = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert lines == [f"line {number}" for number in range(100)]


def test_a_pipe_that_nobody_reads_blocks_nobody_and_what_is_lost_is_counted() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as reader, os.fdopen(write_end, "w") as pipe:
        writer = LogWriter(pipe, JsonFormatter(), queue_max=10)
        for _ in range(200):
            writer.emit(record("x" * 10_000))
        assert writer.dropped > 0
        writer.stop(timeout_s=0.05)
        # Let the thread finish: its pipe is read now.
        drain = threading.Thread(target=reader.read)
        drain.start()
        writer.stop(timeout_s=5)
        pipe.close()
        drain.join(5)


def test_lost_lines_are_told_by_whoever_asks() -> None:
    with LogSinks("info", stream=io.StringIO()) as logs:
        logs.writer.dropped = 3
        assert dropped_records() == 3
    assert dropped_records() == 0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_a_request_is_one_line_without_its_prompt(tmp_path: Path) -> None:
    stream = io.StringIO()
    with LogSinks("info", json=True, stream=stream):
        async with running(tmp_path, ["--step-ms", "1"]) as gateway:
            headers = {"x-request-id": "my-id"}
            request = chat("a secret prompt", stream=True)
            await gateway.client.post("/v1/chat/completions", json=request, headers=headers)
            await gateway.client.get("/health")

    assert "secret" not in stream.getvalue()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    [line] = [line for line in lines if line["logger"].endswith("access_log")]
    assert line["message"] == "POST /v1/chat/completions"
    assert (line["request"], line["status"], line["model"], line["outcome"]) == ("my-id", 200, "m", "ok")
    assert (line["prompt_tokens"], line["completion_tokens"], line["stream"]) == (3, 5, True)
    assert line["ms"] >= line["ttft_ms"] > 0
    assert (line["cached_tokens"], line["finish"], line["rid"]) == (0, "length", line["rid"])
    assert line["rid"].isdecimal()
    assert "key" not in line


@pytest.mark.anyio
async def test_a_background_response_is_counted_where_it_ends_and_not_as_zeros_of_its_request(tmp_path: Path) -> None:
    stream = io.StringIO()
    with LogSinks("info", json=True, stream=stream):
        async with running(tmp_path, ["--step-ms", "1"]) as gateway:
            body = {"model": "m", "input": "hi", "background": True, "stream": True, "max_output_tokens": 5}
            await gateway.client.post("/v1/responses", json=body)

    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    [asked] = [line for line in lines if line["logger"].endswith("access_log")]
    [ended] = [line for line in lines if line["message"] == "background response ended"]
    assert (asked["request"], asked["response"]) == (ended["request"], ended["response"])
    assert ended["completion_tokens"] == 5
    assert not {"ttft_ms", "prompt_tokens", "completion_tokens"} & asked.keys()


@pytest.mark.anyio
async def test_a_slow_request_is_warned_of_with_where_its_time_went_and_without_its_prompt(tmp_path: Path) -> None:
    stream = io.StringIO()
    with LogSinks("warning", json=True, stream=stream):
        async with running(tmp_path, server=ServerConfig(slow_request_s=0.1), worker="talkative") as gateway:
            slow = json.dumps([["text", "secret"], *[["wait"]] * 5, ["finish", "stop"]])
            await gateway.client.post("/v1/chat/completions", json=chat(slow))

    assert "secret" not in stream.getvalue()
    [line] = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert line["level"] == "warning"
    assert line["message"].startswith("slow request: POST /v1/chat/completions took ")
    assert (line["queue_ms"], line["prefill_ms"], line["decode_ms"], line["cached_tokens"]) == (1.0, 2.0, 3.0, 1)
    assert line["load_ms"] > 0


@pytest.mark.anyio
async def test_a_request_within_the_limit_is_not_warned_of(tmp_path: Path) -> None:
    stream = io.StringIO()
    with LogSinks("warning", json=True, stream=stream):
        async with running(tmp_path, server=ServerConfig(slow_request_s=patient(60))) as gateway:
            await gateway.client.post("/v1/chat/completions", json=chat())

    assert stream.getvalue() == ""


@pytest.mark.anyio
async def test_a_request_that_was_cut_off_tells_what_was_seen_of_it(tmp_path: Path) -> None:
    stream = io.StringIO()
    with LogSinks("info", json=True, stream=stream):
        async with running(tmp_path, ["--step-ms", "5"]) as gateway:
            request = chat(stream=True, max_tokens=100_000)
            async with gateway.client.stream("POST", "/v1/chat/completions", json=request) as answer:
                lines = answer.aiter_lines()
                for _ in range(6):
                    await anext(lines)
            await until(lambda: "disconnect" in stream.getvalue())

    [line] = [line for line in map(json.loads, stream.getvalue().splitlines()) if line["logger"].endswith("access_log")]
    assert (line["outcome"], line["finish"], line["prompt_tokens"]) == ("disconnect", "abort", 3)
    assert line["completion_tokens"] > 0
    assert line["decode_ms"] > 0


@pytest.mark.anyio
async def test_a_request_that_was_cancelled_tells_what_was_seen_of_it(tmp_path: Path) -> None:
    stream = io.StringIO()
    with LogSinks("info", json=True, stream=stream):
        async with running(tmp_path, ["--step-ms", "5"]) as gateway:
            requests = gateway.app.services.requests
            body = chat(max_tokens=100_000)
            asking = asyncio.create_task(
                gateway.client.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine"})
            )
            await until(lambda: any(view.generated_tokens > 3 for view in requests.views()))
            assert requests.cancel("mine")
            await asking

    [line] = [line for line in map(json.loads, stream.getvalue().splitlines()) if line["logger"].endswith("access_log")]
    assert (line["outcome"], line["finish"], line["prompt_tokens"], line["status"]) == ("cancelled", "abort", 3, 499)
    assert line["completion_tokens"] > 3
    assert line["decode_ms"] > 0


@pytest.mark.anyio
async def test_a_question_whose_client_leaves_is_over(tmp_path: Path) -> None:
    stream = io.StringIO()
    with LogSinks("info", json=True, stream=stream):
        async with running(tmp_path) as gateway:
            with pytest.raises(httpx2.ReadTimeout):
                await gateway.client.post("/tokenize", json={"model": "m", "prompt": "never"}, timeout=0.2)
            await until(lambda: "disconnect" in stream.getvalue())
            assert (await gateway.client.post("/tokenize", json={"model": "m", "prompt": "hi"})).json()["count"] == 3

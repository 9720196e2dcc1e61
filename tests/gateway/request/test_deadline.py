"""`timeout` counts from a request's arrival: while its model loads, while it waits, while it runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.config.settings import ServerConfig
from tests.gateway.harness import Gateway, chat, events, running, until
from tests.support.scale import patient

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
ENDLESS = 1_000_000
DIALECTS = [
    (CHAT, chat(max_tokens=ENDLESS)),
    ("/v1/completions", {"model": "m", "prompt": "x", "max_tokens": ENDLESS}),
    ("/v1/responses", {"model": "m", "input": "x", "max_output_tokens": ENDLESS, "store": False}),
    ("/v1/messages", {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": ENDLESS}),
]


async def is_free(gateway: Gateway) -> None:
    """Nothing of the request is left: not here, and not in the worker."""
    await until(lambda: gateway.link.in_flight == 0 and gateway.app.services.admission.inside("m") == 0)
    await until(lambda: (stats := gateway.metrics.model("m").stats) is not None and stats.running == 0)


@pytest.mark.parametrize(("path", "body"), DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_ends_the_wait_for_a_model_that_loads(
    path: str, body: dict[str, Any], stream: bool, tmp_path: Path
) -> None:
    server = ServerConfig(request_timeout_s=0.2)
    async with running(tmp_path, ["--hang-on-load"], server=server) as gateway:
        answer = await gateway.client.post(path, json=body | {"stream": stream})

        assert answer.status_code == 504
        assert "deadline has passed" in answer.json()["error"]["message"]
        if path == "/v1/messages":
            assert answer.json()["type"] == "error"
            assert answer.json()["error"]["type"] == "timeout_error"
        else:
            assert answer.json()["error"]["code"] == "deadline_exceeded"
        assert gateway.metrics.model("m").opening == 0


async def test_a_stream_whose_deadline_passes_while_it_is_kept_alive_ends_with_an_error_event(tmp_path: Path) -> None:
    async with running(tmp_path, ["--hang-on-load"]) as gateway:
        # A stream is begun after a second without an event.
        answer = await gateway.client.post(CHAT, json=chat(stream=True, timeout=1 + patient(0.5)))

        assert answer.status_code == 200
        assert events(answer.text)[-1]["error"]["code"] == "deadline_exceeded"


async def test_a_worker_is_told_what_the_wait_has_left_of_the_time(tmp_path: Path) -> None:
    said = json.dumps([["deadline"], ["finish", "stop"]])
    async with running(tmp_path, ["--load-s", "0.3"], worker="talkative") as gateway:
        answer = await gateway.client.post(CHAT, json=chat(said, timeout=60))
        left_ms = int(answer.json()["choices"][0]["message"]["content"])
        assert 30_000 < left_ms <= 59_700

        answer = await gateway.client.post(CHAT, json=chat(said))
        assert answer.json()["choices"][0]["message"]["content"] == "0"


async def test_a_worker_that_does_not_keep_a_deadline_is_not_waited_for(tmp_path: Path) -> None:
    async with running(tmp_path, ["--step-ms", "2"]) as gateway:
        answer = await gateway.client.post(CHAT, json=chat(max_tokens=ENDLESS, timeout=0.1))
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        await is_free(gateway)

        endless = chat(max_tokens=ENDLESS, timeout=patient(0.5), stream=True, n=2)
        answer = await gateway.client.post(CHAT, json=endless)
        *said, end = events(answer.text)
        assert "t0 t1 " in "".join(one["choices"][0]["delta"].get("content") or "" for one in said)
        assert end["error"]["code"] == "deadline_exceeded"
        await is_free(gateway)

"""Room for scores of prompts: one bound of an answer, and one of all requests."""

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest
from msgspec.structs import replace

from gateway.config.settings import ServerConfig
from gateway.errors import BadRequest, Unavailable
from gateway.request import body_memory, generation
from gateway.request.body_memory import Bodies
from gateway.request.generation import ScoreRoom, scores_bytes
from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.gateway.harness import Gateway, running, until

PROMPT = Generate(10, TokensPrompt((1,) * 10), Sampling(), prompt_logprobs=5)
ECHO = Generate(10, TokensPrompt((1,) * 10), Sampling(), top_logprobs=5, echo=True)
SIZE = scores_bytes(10, 5)


@pytest.mark.parametrize("asked", [PROMPT, ECHO])
def test_scores_of_an_answer_are_bounded(asked: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "SCORES_BYTES_MAX", SIZE * 3 // 2)
    room = ScoreRoom(None, 1)
    room.hold(asked, 10)
    room.hold(asked, 10)  # by another worker, after the first was lost
    with pytest.raises(BadRequest, match="fewer choices"):
        room.hold(replace(asked, rid=11), 10)


def test_scores_count_as_often_as_the_answer_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "SCORES_BYTES_MAX", SIZE * 3 // 2)
    ScoreRoom(None, 2).hold(ECHO, 10)
    with pytest.raises(BadRequest, match="fewer choices"):
        ScoreRoom(None, 2).hold(PROMPT, 10)


def test_log_probabilities_of_the_output_alone_take_no_room() -> None:
    bodies = Bodies(lambda: 1)
    ScoreRoom(bodies.lease(), 1).hold(replace(ECHO, echo=False), 10_000)
    assert bodies.numbers.used_bytes == 0
    bodies.close()


@pytest.mark.parametrize("asked", [PROMPT, ECHO])
def test_scores_of_all_requests_share_the_room_for_bodies(asked: Generate) -> None:
    bodies = Bodies(lambda: 5 * SIZE)
    one, other, third = bodies.lease(), bodies.lease(), bodies.lease()
    ScoreRoom(one, 1).hold(asked, 10)
    ScoreRoom(other, 1).hold(asked, 10)
    with pytest.raises(Unavailable, match="no room") as caught:
        ScoreRoom(third, 1).hold(asked, 10)
    assert (caught.value.status, caught.value.code) == (503, "body_memory_full")
    one.close()
    ScoreRoom(third, 1).hold(asked, 10)
    with pytest.raises(BadRequest, match="room for"):
        ScoreRoom(bodies.lease(), 1).hold(asked, 30)  # it would not fit with nothing beside it
    other.close()
    third.close()
    assert bodies.numbers.used_bytes == 0
    bodies.close()


# The scripted worker's prompts have 3 tokens.
ONE = 2 * scores_bytes(3, 5)
ROOM = 3 * ONE


@pytest.mark.anyio
@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 5}, {"prompt_logprobs": 5}], ids=["echo", "prompt"])
async def test_requests_with_scores_fill_no_more_than_the_room_and_give_it_back(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_memory, "part_of_machine_bytes", lambda: ROOM)
    server = ServerConfig(max_body_bytes=1000)
    async with running(tmp_path, ["--step-ms", "50"], server=server) as gateway:
        numbers = gateway.metrics.body_numbers
        long = [asyncio.create_task(ask(gateway, fields, 10_000)) for _ in range(2)]
        await until(lambda: numbers.used_bytes > 2 * ONE)
        refused = await ask(gateway, fields, 1)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (503, "body_memory_full")
        assert "log-probabilities" in error["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert numbers.used_bytes <= ROOM
        plain = await ask(gateway, {"logprobs": 5}, 1)
        assert plain.status_code == 200, "those of the output take no room"

        # A client that leaves gives its room back, and so does an answer.
        long.pop().cancel()
        await until(lambda: numbers.used_bytes < 2 * ONE)
        for stream in (False, "echo" in fields):
            assert (await ask(gateway, {**fields, "stream": stream}, 1)).status_code == 200
        long.pop().cancel()
        await until(lambda: numbers.used_bytes == 0)


async def ask(gateway: Gateway, fields: dict[str, Any], max_tokens: int) -> httpx2.Response:
    body = {"model": "m", "prompt": "hi", "max_tokens": max_tokens, **fields}
    return await gateway.client.post("/v1/completions", json=body)

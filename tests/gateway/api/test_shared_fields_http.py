"""Fields that dialects share mean the same in each: a real gateway, and a worker that says what it is given."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import pytest

from gateway.config.settings import ModelConfig, SamplingDefaults
from tests.gateway.harness import Gateway, running
from tests.support.daemon import DEADLINE_S, DaemonProcess
from tests.support.pool import short_home

pytestmark = pytest.mark.anyio

Body = dict[str, Any]
HI = [{"role": "user", "content": "hi"}]
CHAT: Body = {"model": "m", "messages": HI}
# Bodies of all generating routes, by path.
BODIES: dict[str, Body] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "m", "prompt": "hi"},
    "/v1/messages": CHAT | {"max_tokens": 5},
    "/v1/responses": {"model": "m", "input": "hi"},
    "/api/chat": CHAT | {"stream": False},
    "/api/generate": {"model": "m", "prompt": "hi", "stream": False},
    "/infill": {"model": "m", "input_prefix": "a"},
    "/completion": {"model": "m", "prompt": "hi"},
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway() -> AsyncGenerator[Gateway, None]:
    with short_home() as home:
        async with running(home, worker="seeing") as made:
            yield made


def asked(path: str, **fields: Any) -> Body:
    """A body with these fields where the dialect has them."""
    return BODIES[path] | ({"options": fields} if path.startswith("/api/") else fields)


def text_of(body: Any) -> str:
    match body:
        case {"choices": [{"message": {"content": text}}]} | {"choices": [{"text": text}]} | {"response": text}:
            return text
        case {"message": {"content": text}} | {"content": [{"text": text}]} | {"content": str(text)}:
            return text
        case {"output": [{"content": [{"text": text}]}]}:
            return text
        case _:
            raise AssertionError(body)


def given(reply: httpx2.Response) -> dict[str, Any]:
    """What the worker was given."""
    assert reply.status_code == 200, reply.text
    return json.loads(text_of(reply.json()))


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/v1/messages"])
async def test_a_negative_seed_is_a_random_one(gateway: Gateway, path: str) -> None:
    drawn = [await gateway.client.post(path, json=asked(path, seed=seed)) for seed in (-1, -1, -(1 << 62))]
    kept = await gateway.client.post(path, json=asked(path, seed=7))

    seeds = [given(reply)["options"]["seed"] for reply in (*drawn, kept)]
    assert len(set(seeds)) == 4
    assert min(seeds) >= 0
    assert seeds[-1] == 7
    assert [int(reply.headers["x-mlxd-seed"]) for reply in (*drawn, kept)] == seeds


@pytest.mark.parametrize(("mode", "must_call", "shown"), [("auto", 0, 1), ("none", 0, 0), ("required", 1, 1)])
async def test_a_tool_choice_may_be_an_object_with_a_mode(
    gateway: Gateway, mode: str, must_call: int, shown: int
) -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    choice = {"tool_choice": {"type": mode}}
    chat = CHAT | choice | {"tools": [{"type": "function", "function": function}]}
    response = BODIES["/v1/responses"] | choice | {"tools": [{"type": "function"} | function]}
    replies = [
        await gateway.client.post("/v1/chat/completions", json=chat),
        await gateway.client.post("/v1/responses", json=response),
    ]

    for reply in replies:
        seen = given(reply)
        assert (seen["options"]["must_call"], len(seen["tools"])) == (must_call, shown)
    # Clients of OpenAI's SDK know no such object in an answer.
    assert replies[1].json()["tool_choice"] == mode


@pytest.mark.parametrize("path", BODIES)
async def test_a_top_p_of_zero_reaches_the_worker(gateway: Gateway, path: str) -> None:
    reply = await gateway.client.post(path, json=asked(path, top_p=0))

    assert given(reply)["options"]["top_p"] == 0


NO_STOPS = [path for path in BODIES if path != "/v1/responses"]


@pytest.mark.parametrize("path", NO_STOPS)
async def test_an_empty_stop_string_is_none(gateway: Gateway, path: str) -> None:
    name = "stop_sequences" if path == "/v1/messages" else "stop"
    stops: list[Any] = [None, [], [""], ["", "a"], *([""] if name == "stop" else [])]
    replies = [await gateway.client.post(path, json=asked(path, **{name: stop})) for stop in stops]

    assert [given(reply)["options"]["stop"] for reply in replies] == [["a"] if "a" in (s or "") else [] for s in stops]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/completions", "max_tokens"),
        ("/v1/completions", "n_predict"),
        ("/completion", "n_predict"),
        ("/infill", "n_predict"),
        ("/api/chat", "num_predict"),
    ],
)
async def test_minus_one_is_no_limit_of_tokens(path: str, name: str) -> None:
    limited = ModelConfig(name="m", path="m", sampling=SamplingDefaults(max_tokens=9))
    with short_home() as home:
        async with running(home, models=[limited], worker="seeing") as gateway:
            silent = await gateway.client.post(path, json=asked(path))
            endless = await gateway.client.post(path, json=asked(path, **{name: -1}))
            wrong = await gateway.client.post(path, json=asked(path, **{name: -3}))

    assert (given(silent)["options"]["max_tokens"], given(endless)["options"]["max_tokens"]) == (9, None)
    assert wrong.status_code == 400


async def test_null_is_no_summary_on_responses(gateway: Gateway) -> None:
    items = [
        {"type": "reasoning", "summary": None, "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    body = {"model": "m", "input": items, "reasoning": {"summary": None, "effort": None}}
    reply = await gateway.client.post("/v1/responses", json=body)

    assert given(reply)["messages"][0]["reasoning_content"] == "hm"
    listed = (await gateway.client.get(f"/v1/responses/{reply.json()['id']}/input_items")).json()["data"]
    assert "summary" not in listed[-1]


async def test_an_empty_effort_is_refused_by_ollamas_api_as_there(gateway: Gateway) -> None:
    reply = await gateway.client.post("/api/chat", json=BODIES["/api/chat"] | {"think": ""})

    assert reply.status_code == 400
    assert reply.json()["error"].startswith("Invalid value for 'think'")


@pytest.fixture
async def real(demo_daemon: DaemonProcess) -> AsyncGenerator[httpx2.AsyncClient, None]:
    """Served by the embedded model."""
    async with httpx2.AsyncClient(base_url=demo_daemon.url, timeout=DEADLINE_S) as client:
        yield client


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stop", ["<|im_start|>", "<|im_start|><|im_start|>"])
async def test_a_stop_string_that_is_a_special_token_ends_the_answer(
    real: httpx2.AsyncClient, path: str, stop: str
) -> None:
    # The token with the id 1 is <|im_start|>, which has no text.
    body = BODIES[path] | {"model": "demo", "max_tokens": 8, "stop": stop, "logit_bias": {"1": 100}}
    answer = (await real.post(path, json=body)).json()

    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert (choice.get("text") or choice.get("message", {}).get("content") or "") == ""
    assert answer["usage"]["completion_tokens"] == len(stop) // len("<|im_start|>")
    shown = (await real.post(path, json=body | {"include_stop_str_in_output": True})).json()["choices"][0]
    assert (shown.get("text") or shown["message"]["content"]) == stop


async def test_the_likeliest_token_is_that_of_a_top_p_of_zero(real: httpx2.AsyncClient) -> None:
    body = BODIES["/v1/completions"] | {"model": "demo", "max_tokens": 12}
    cold, narrow, *drawn = [
        (await real.post("/v1/completions", json=body | fields)).json()["choices"][0]["text"]
        for fields in (
            {"temperature": 0},
            {"temperature": 2, "top_p": 0, "seed": 3},
            *[{"temperature": 2, "seed": -1}] * 3,
        )
    ]

    assert narrow == cold
    assert len(set(drawn)) == 3


async def test_a_prompt_of_the_whole_context_is_scored(real: httpx2.AsyncClient) -> None:
    body = {"model": "small", "prompt": [5] * 256, "logprobs": 1, "echo": True}
    scored = await real.post("/v1/completions", json=body | {"max_tokens": 0})
    generated = await real.post("/v1/completions", json=body | {"max_tokens": 1})

    assert scored.status_code == 200, scored.text
    assert len(scored.json()["choices"][0]["logprobs"]["token_logprobs"]) == 256
    assert (generated.status_code, generated.json()["error"]["code"]) == (400, "context_length_exceeded")

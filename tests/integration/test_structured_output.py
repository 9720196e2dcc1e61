"""Structured output from end to end: real HTTP, real gateway, real worker, a tiny random model."""

import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gateway.config.settings import ModelConfig
from tests.gateway.harness import Gateway, events, serving

pytestmark = pytest.mark.anyio

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway(model_folder: Callable[[str], Path]) -> AsyncGenerator[Gateway, None]:
    async with serving(ModelConfig(name="m", path=str(model_folder("qwen3")))) as made:
        # A refusal is a status only if it comes within a second: a cold model would take longer.
        reply = await made.client.post("/v1/chat/completions", json=asking(response_format=FORMAT))
        assert reply.status_code == 200, reply.text
        yield made


def asking(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "seed": 1, **fields}


async def test_every_choice_of_a_schema_validates(gateway: Gateway) -> None:
    reply = await gateway.client.post("/v1/chat/completions", json=asking(response_format=FORMAT, n=4, logprobs=True))

    assert reply.status_code == 200, reply.text
    for choice in reply.json()["choices"]:
        assert choice["finish_reason"] == "stop", choice["message"]
        assert choice["logprobs"]["content"]
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


async def test_a_stream_says_what_the_whole_answer_says(gateway: Gateway) -> None:
    whole = await gateway.client.post("/v1/chat/completions", json=asking(response_format=FORMAT))
    stream = await gateway.client.post("/v1/chat/completions", json=asking(response_format=FORMAT, stream=True))

    chunks = events(stream.text)[:-1]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text == whole.json()["choices"][0]["message"]["content"]
    jsonschema.validate(json.loads(text), SCHEMA)


async def test_completions_are_constrained_too(gateway: Gateway) -> None:
    body = {"model": "m", "prompt": ["a", "b"], "max_tokens": 50, "structured_outputs": {"choice": ["yes", "no"]}}
    reply = await gateway.client.post("/v1/completions", json=body)

    assert reply.status_code == 200, reply.text
    assert {choice["text"] for choice in reply.json()["choices"]} <= {"yes", "no"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/chat/completions"])
async def test_constraints_in_the_words_of_llama_cpp_and_sglang_are_held(gateway: Gateway, path: str) -> None:
    asked: dict[str, Any] = asking() | {"prompt": "a"} if path == "/v1/completions" else asking()

    async def said(**fields: Any) -> str:
        reply = await gateway.client.post(path, json=asked | fields)
        assert reply.status_code == 200, reply.text
        assert "grammar" not in reply.headers.get("x-mlxd-ignored", "")
        choice = reply.json()["choices"][0]
        return choice["text"] if path == "/v1/completions" else choice["message"]["content"]

    assert await said(grammar='root ::= "a"{5,5}') == "aaaaa"
    assert await said(ebnf='root ::= "b" "c"') == "bc"
    assert await said(regex="[xy]{3}z") in {f"{a}{b}{c}z" for a in "xy" for b in "xy" for c in "xy"}
    jsonschema.validate(json.loads(await said(json_schema=SCHEMA)), SCHEMA)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"grammar": 'root ::= "a'}, "grammar"),
        ("/v1/chat/completions", {"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema"),
        ("/v1/chat/completions", {"samplers": ["top_k"]}, "samplers"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 5, "grammar": 'root ::= "a"'}, "grammar"),
        ("/v1/messages", {"grammar": 'root ::= "a"'}, None),
        ("/api/chat", {"grammar": 'root ::= "a"'}, None),
    ],
)
async def test_a_constraint_that_is_not_held_is_a_400_in_the_dialect_of_the_route(
    gateway: Gateway, path: str, fields: dict[str, Any], param: str | None
) -> None:
    body = asking(**fields)
    if path in ("/v1/responses", "/api/chat"):
        del body["max_tokens"]
    reply = await gateway.client.post(path, json=body)

    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    match path:
        case "/v1/messages":
            assert (reply.json()["type"], error["type"]) == ("error", "invalid_request_error")
            assert "'grammar' is not supported: set 'output_config.format'" in error["message"]
        case "/api/chat":
            assert error.startswith("'grammar' is not supported: set 'format'")
        case _:
            assert error["param"] == param


@pytest.mark.parametrize("stream", [False, True])
async def test_without_strict_a_schema_is_held_as_far_as_it_can_be_and_a_header_says_what_is_not(
    gateway: Gateway, stream: bool
) -> None:
    properties = {
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2, "uniqueItems": True},
        "file": {"type": "string", "format": "path", "maxLength": 4},
    }
    schema = {"type": "object", "properties": properties, "required": ["tags", "file"], "additionalProperties": False}
    body = asking(response_format={"type": "json_schema", "json_schema": {"name": "found", "schema": schema}})
    reply = await gateway.client.post("/v1/chat/completions", json=body | {"stream": stream})

    assert reply.status_code == 200, reply.text
    assert set(reply.headers["x-mlxd-relaxed"].split(", ")) == {"uniqueItems", "format_path"}
    if not stream:
        found = json.loads(reply.json()["choices"][0]["message"]["content"])
        jsonschema.validate(found, schema | {"properties": properties | {"tags": {"type": "array"}}})
    body["response_format"]["json_schema"]["strict"] = True
    assert (await gateway.client.post("/v1/chat/completions", json=body)).status_code == 400
    held = await gateway.client.post("/v1/chat/completions", json=asking(response_format=FORMAT))
    assert "x-mlxd-relaxed" not in held.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
    ],
)
async def test_what_cannot_be_enforced_is_a_400_with_the_reason(
    gateway: Gateway, fields: dict[str, Any], param: str, reason: str, stream: bool
) -> None:
    reply = await gateway.client.post("/v1/chat/completions", json=asking(**fields, stream=stream))

    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert reason in error["message"]

"""The published document: that it is one, that it is whole, and that what is answered has the shapes in it."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import openapi_spec_validator
import pytest

import protocol
from gateway.api.openai.request import NO_ACTION
from gateway.api.routes import OPERATIONS
from gateway.middleware.auth import HEALTH
from tests.gateway.harness import Gateway, running
from tests.support.pool import short_home
from tests.support.published import check_answer, check_events, document

pytestmark = pytest.mark.anyio

TALK = json.dumps(
    [["reasoning", "hm"], ["text", "Hi"], ["logprobs", "é"], ["tool", "f", '{"a": 1}'], ["finish", "tool_calls"]]
)
MESSAGES = [{"role": "user", "content": TALK}]
TOOL = {"name": "f", "parameters": {"type": "object"}}
CHAT = {"model": "m", "messages": MESSAGES, "tools": [{"type": "function", "function": TOOL}]}
FUNCTIONS = {"model": "m", "messages": MESSAGES, "functions": [TOOL]}
MESSAGE = {"model": "m", "max_tokens": 9, "messages": MESSAGES, "tools": [{"name": "f", "input_schema": {}}]}
RESPONSE = {"model": "m", "input": TALK, "tools": [TOOL | {"type": "function"}, {"type": "custom", "name": "g"}]}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {"logprobs": True, "n": 2, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", FUNCTIONS),
    ("/v1/completions", {"model": "m", "prompt": [TALK, "hi"], "max_tokens": 3, "logprobs": 1}),
    ("/v1/messages", MESSAGE | {"thinking": {"type": "adaptive"}}),
    ("/v1/responses", RESPONSE | {"include": ["reasoning.encrypted_content"], "text": {"format": {"type": "text"}}}),
    ("/v1/responses", RESPONSE | {"input": json.dumps([["tool", "g", '{"input": "x"}'], ["finish", "length"]])}),
]
REFUSED: list[tuple[str, dict[str, Any], int]] = [
    (path, body | extra, status)
    for path, body in ASKED
    for extra, status in (({"model": "nope"}, 404), ({"model": 1}, 400), ({"temperature": 9}, 400))
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway() -> AsyncGenerator[Gateway, None]:
    with short_home() as home:
        async with running(home, ["--step-ms", "1", "--tokens-per-step", "256"], worker="talkative") as made:
            yield made


# -- the document ----------------------------------------------------------------------------------------------------


def test_it_is_an_openapi_document() -> None:
    openapi_spec_validator.validate(document())

    assert document()["info"]["version"] == protocol.__version__


async def test_every_route_is_in_it_and_nothing_else(gateway: Gateway) -> None:
    # HEAD is GET without its body.
    served = {
        (method, route.path.replace(":path}", "}"))
        for route in gateway.app.routes
        for method in (route.methods or set()) - {"HEAD"}
    }

    assert {(method.upper(), path) for path, methods in document()["paths"].items() for method in methods} == served
    assert len({one.id for one in OPERATIONS}) == len(OPERATIONS)


async def test_it_is_served_as_it_is_made(gateway: Gateway) -> None:
    answer = await gateway.client.get("/openapi.json")

    assert answer.json() == document()
    assert (await gateway.client.get("/")).json()["openapi"] == "/openapi.json"


def test_a_body_has_the_fields_of_the_struct_that_it_is_decoded_to_and_those_that_do_nothing() -> None:
    for one in OPERATIONS:
        if one.body is None:
            continue
        schema = document()["paths"][one.path]["post"]["requestBody"]["content"][one.body_type]["schema"]
        body = document()["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        assert set(body["properties"]) == {*one.body.__struct_encode_fields__, *one.extra}
        assert body["required"] == [field.name for field in msgspec.structs.fields(one.body) if field.required]
    chat = document()["components"]["schemas"]["openai.ChatCompletionRequest"]["properties"]
    assert chat["user"] == {"description": "Accepted, without effect."}
    assert set(chat) > NO_ACTION


def test_every_whole_number_of_a_body_fits_into_a_message() -> None:
    waiting: list[Any] = [item.get("post", {}).get("requestBody") for item in document()["paths"].values()]
    seen: set[str] = set()
    checked = 0
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
            continue
        if not isinstance(one, dict):
            continue
        name = one.get("$ref", "")
        if isinstance(name, str) and name and name not in seen:
            seen.add(name)
            waiting.append(document()["components"]["schemas"][name.rpartition("/")[2]])
        # What is told beyond the type says less than the type.
        waiting += [value for key, value in one.items() if key not in ("allOf", "default")]
        if one.get("type") == "integer":
            assert -(1 << 63) <= one["minimum"] <= one["maximum"] < 1 << 63, one
            checked += 1

    assert checked > 20


def test_what_is_always_sent_is_required_and_what_may_be_left_out_is_not() -> None:
    schemas = document()["components"]["schemas"]

    assert "finish_reason" in schemas["openai_out.ChatChunkChoice"]["required"]
    assert "usage" not in schemas["openai_out.ChatChunk"]["required"]
    assert "role" in schemas["openai_out.ChatMessage"]["required"]
    assert "user" not in schemas["responses_out.Response"]["required"]


def test_only_health_needs_no_key() -> None:
    free = {path for path, item in document()["paths"].items() for one in item.values() if one.get("security") == []}

    assert free == HEALTH
    assert document()["security"] == [{"bearer": []}, {"x-api-key": []}]


# -- what is answered ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_answers_have_the_published_shape_in_one_piece_and_streamed(
    gateway: Gateway, path: str, body: dict[str, Any]
) -> None:
    whole = await gateway.client.post(path, json=body)
    stream = await gateway.client.post(path, json=body | {"stream": True})

    check_answer("POST", path, whole.status_code, whole.json())
    assert len(check_events(path, stream.text)) > 3


@pytest.mark.parametrize(("path", "body", "status"), REFUSED)
async def test_refusals_have_the_published_shape(
    gateway: Gateway, path: str, body: dict[str, Any], status: int
) -> None:
    answer = await gateway.client.post(path, json=body)

    assert answer.status_code == status
    check_answer("POST", path, status, answer.json())


@pytest.mark.parametrize("field", ["metadata", "tools", "text", "unknown"])
async def test_a_deep_body_is_taken_or_refused(gateway: Gateway, field: str) -> None:
    shapes = {"tools": '[{"type":"function","name":"f","x":%s}]', "text": '{"format":{"type":"text","schema":%s}}'}
    statuses: set[int] = set()
    for depth in range(700, 1000, 3):
        value = shapes.get(field, "%s") % ('{"a":' * depth + "1" + "}" * depth)
        body = f'{{"model":"m","input":"hi","max_output_tokens":2,"{field}":{value}}}'
        statuses.add((await gateway.client.post("/v1/responses", content=body)).status_code)

    assert statuses == {200, 400}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages/count_tokens", {"output_config": {"format": {"type": "AAA"}}}),
        ("/v1/messages/count_tokens", {"output_format": {"type": "json_schema"}}),
        ("/v1/responses/input_tokens", {"text": {"format": {"type": "AAA"}}}),
        ("/v1/responses/compact", {"text": {"format": {"type": "json_schema"}}}),
    ],
)
async def test_what_could_not_be_answered_is_not_counted_either(
    gateway: Gateway, path: str, fields: dict[str, Any]
) -> None:
    answer = await gateway.client.post(path, json={"model": "m", "messages": MESSAGES, "input": "hi"} | fields)

    assert answer.status_code == 400
    check_answer("POST", path, 400, answer.json())


@pytest.mark.parametrize("path", sorted({path for path, _ in ASKED}))
async def test_an_error_amid_a_stream_has_the_published_shape(gateway: Gateway, path: str) -> None:
    said = json.dumps([["text", "a"], ["wait"], ["finish", "abort"]])
    words: dict[str, Any] = {"/v1/completions": {"prompt": said, "max_tokens": 9}, "/v1/responses": {"input": said}}
    asked = words.get(path, {"messages": [{"role": "user", "content": said}], "max_tokens": 9})
    body = {"model": "m", "stream": True} | asked

    last = check_events(path, (await gateway.client.post(path, json=body)).text)[-1]

    assert "error" in last or last["response"]["error"]


async def test_what_is_kept_has_the_published_shape(gateway: Gateway) -> None:
    get, delete = gateway.client.get, gateway.client.delete
    made = (await gateway.client.post("/v1/responses", json=RESPONSE)).json()
    path = f"/v1/responses/{made['id']}"

    check_answer("GET", "/v1/responses/{id}", 200, (await get(path)).json())
    check_answer("GET", "/v1/responses/{id}/input_items", 200, (await get(f"{path}/input_items")).json())
    check_answer("POST", "/v1/responses/{id}/cancel", 200, (await gateway.client.post(f"{path}/cancel")).json())
    check_answer("DELETE", "/v1/responses/{id}", 200, (await delete(path)).json())
    check_answer("GET", "/v1/responses/{id}", 404, (await get(path)).json())
    compact = await gateway.client.post("/v1/responses/compact", json={"model": "m", "input": "hi"})
    check_answer("POST", "/v1/responses/compact", 200, compact.json())


@pytest.mark.parametrize("path", ["/", "/livez", "/readyz", "/health", "/healthz", "/v1/models"])
async def test_what_is_told_of_the_daemon_has_the_published_shape(gateway: Gateway, path: str) -> None:
    check_answer("GET", path, 200, (await gateway.client.get(path)).json())


async def test_one_model_has_the_published_shape(gateway: Gateway) -> None:
    for model, status in (("m", 200), ("nope", 404)):
        answer = await gateway.client.get(f"/v1/models/{model}")
        check_answer("GET", "/v1/models/{id}", status, answer.json())

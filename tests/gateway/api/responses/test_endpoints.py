import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response

from gateway.access.key import Key, KeyFile
from gateway.config.settings import ServerConfig
from tests.gateway.harness import Gateway, running, until

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
TEXT = [["text", "Hel"], ["text", "lo"], ["finish", "stop"]]
CALL = [["reasoning", "hm"], ["tool", "f", '{"a": 1}'], ["finish", "tool_calls"]]
FUNCTION: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    server = ServerConfig(max_body_bytes=100_000)
    home = tmp_path_factory.mktemp("g")
    async with running(home, ["--step-ms", "1"], server=server, worker="talkative") as running_gateway:
        yield running_gateway


@pytest.fixture
async def client(gateway: Gateway) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def asking(script: list[list[str]], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": json.dumps(script)} | fields


async def post(gateway: Gateway, body: dict[str, Any], path: str = PATH) -> Any:
    answer = await gateway.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(text: str) -> list[Any]:
    return [json.loads(block.partition("\ndata: ")[2]) for block in text.split("\n\n") if block]


# -- the official client ---------------------------------------------------------------------------------------------


async def test_a_response_of_the_official_client(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(
        model="m",
        input=json.dumps(TEXT),
        instructions="Be brief.",
        temperature=0,
        max_output_tokens=50,
        metadata={"a": "b"},
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
        truncation="disabled",
        prompt_cache_key="k",
        safety_identifier="s",
        service_tier="auto",
        include=["reasoning.encrypted_content"],
    )

    assert answer.output_text == "Hello"
    assert answer.status == "completed"
    assert (answer.instructions, answer.metadata, answer.parallel_tool_calls) == ("Be brief.", {"a": "b"}, False)
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == 1


async def test_a_stream_of_the_official_client(client: openai.AsyncOpenAI) -> None:
    script = [*CALL[:2], ["text", "Hi"], ["finish", "tool_calls"]]
    async with client.responses.stream(model="m", input=json.dumps(script), tools=[FUNCTION]) as stream:  # type: ignore[list-item]
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()

    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert [item.type for item in final.output] == ["reasoning", "function_call", "message"]
    assert final.output_text == "Hi"


async def test_structured_output_of_the_official_client(client: openai.AsyncOpenAI) -> None:
    class Person(pydantic.BaseModel):
        name: str

    script = [["text", '{"name": "Ada"}'], ["finish", "stop"]]
    answer = await client.responses.parse(model="m", input=json.dumps(script), text_format=Person)

    assert answer.output_parsed == Person(name="Ada")


async def test_keeping_of_the_official_client(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(model="m", input=json.dumps(TEXT))
    found = await client.responses.retrieve(made.id)
    items = await client.responses.input_items.list(made.id)
    await client.responses.delete(made.id)

    assert found.to_dict() == made.to_dict()
    assert [item.type for item in items.data] == ["message"]
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)


async def test_tokens_are_counted_for_the_official_client(tmp_path: Path) -> None:
    async with (
        running(tmp_path, worker="agentic") as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client,
    ):
        counted = await client.responses.input_tokens.count(model="m", input="hi", instructions="Be brief.")

    assert (counted.object, counted.input_tokens) == ("response.input_tokens", 3)


# -- answers ---------------------------------------------------------------------------------------------------------


async def test_stream_and_whole_say_the_same(gateway: Gateway) -> None:
    body = asking(CALL, tools=[FUNCTION], include=["reasoning.encrypted_content"])
    whole = await post(gateway, body)
    streamed = events((await gateway.client.post(PATH, json=body | {"stream": True})).text)

    def without_ids(response: Any) -> Any:
        items = [{**item, "id": ""} for item in response["output"]]
        return response | {"id": "", "created_at": 0, "completed_at": 0, "output": items}

    assert without_ids(streamed[-1]["response"]) == without_ids(whole)
    assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))
    Response.model_validate(whole)


async def test_what_is_ignored_is_named(gateway: Gateway) -> None:
    body = asking(TEXT, tools=[{"type": "web_search"}], truncation="auto", zap=1, client_metadata={"a": "b"})
    answer = await gateway.client.post(PATH, json=body)

    assert answer.headers["x-mlxd-ignored"] == "zap, tools.web_search"


async def test_a_turn_of_codex_round_trips(gateway: Gateway) -> None:
    tools = [
        FUNCTION,
        {"type": "custom", "name": "apply_patch", "format": {"type": "text"}},
        {"type": "namespace", "name": "ns", "description": "d", "tools": [FUNCTION]},
    ]
    script = [
        ["reasoning", "hm"],
        ["tool", "apply_patch", json.dumps({"input": "*** Begin Patch"})],
        ["tool", "ns__f", "{}"],
        ["finish", "tool_calls"],
    ]
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": json.dumps(script)}]}
    codex = {
        "model": "m",
        "stream": True,
        "store": False,
        "tools": tools,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "session",
        "client_metadata": {"x": "y"},
    }
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]}
    first = events((await gateway.client.post(PATH, json=codex | {"input": [developer, user]})).text)
    output = [event["item"] for event in first if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in output] == ["reasoning", "custom_tool_call", "function_call"]
    assert (output[1]["input"], output[2]["namespace"]) == ("*** Begin Patch", "ns")

    results = [
        {"type": "custom_tool_call_output", "call_id": output[1]["call_id"], "output": "Done"},
        {"type": "function_call_output", "call_id": output[2]["call_id"], "output": json.dumps(TEXT)},
    ]
    body = codex | {"input": [developer, user, *output, *results]}
    second = events((await gateway.client.post(PATH, json=body)).text)

    assert second[-1]["response"]["output"][0]["content"][0]["text"] == "Hello"
    assert second[-1]["response"]["store"] is False


# -- what is kept ----------------------------------------------------------------------------------------------------


async def test_a_conversation_goes_on_from_a_response(gateway: Gateway) -> None:
    first = await post(gateway, asking(CALL, tools=[FUNCTION], instructions="Only now."))
    result = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": json.dumps(TEXT)}
    body = {"model": "m", "previous_response_id": first["id"], "input": [result]}
    second = await post(gateway, body)
    page = (await gateway.client.get(f"{PATH}/{second['id']}/input_items", params={"order": "asc"})).json()

    assert second["previous_response_id"] == first["id"]
    assert second["instructions"] is None
    assert [item["type"] for item in page["data"]] == ["message", "reasoning", "function_call", "function_call_output"]
    assert page["first_id"] == page["data"][0]["id"]
    assert not page["has_more"]


async def test_input_items_come_in_pages_the_newest_first(gateway: Gateway) -> None:
    items: list[Any] = [{"role": "user", "content": str(n), "id": f"msg_{n}"} for n in range(4)]
    made = await post(gateway, {"model": "m", "input": [*items, {"role": "user", "content": json.dumps(TEXT)}]})
    path = f"{PATH}/{made['id']}/input_items"
    first = (await gateway.client.get(path, params={"limit": 2})).json()
    rest = (await gateway.client.get(path, params={"limit": 2, "after": first["last_id"]})).json()

    assert first["has_more"]
    assert first["last_id"] == "msg_3"
    assert [item["id"] for item in rest["data"]] == ["msg_2", "msg_1"]
    wrong_limits = [{"limit": wrong} for wrong in ("0", "x", "101", "000000001999", "9" * 5000, "-1")]
    for wrong in (*wrong_limits, {"after": "nobody"}, {"order": "up"}):
        assert (await gateway.client.get(path, params=wrong)).status_code == 400


async def test_an_item_can_be_referred_to(gateway: Gateway) -> None:
    first = await post(gateway, asking(CALL, tools=[FUNCTION]))
    call = first["output"][1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": json.dumps(TEXT)}
    second = await post(gateway, {"model": "m", "input": [{"type": "item_reference", "id": call["id"]}, result]})
    page = (await gateway.client.get(f"{PATH}/{second['id']}/input_items", params={"order": "asc"})).json()

    assert page["data"][0]["name"] == "f"


async def test_a_conversation_is_continued_while_it_is_no_larger_than_a_body(gateway: Gateway) -> None:
    text = json.dumps([*TEXT, ["wait"]]) + " " * 40_000
    first = await post(gateway, {"model": "m", "input": text})
    second = await post(gateway, {"model": "m", "input": text, "previous_response_id": first["id"]})
    # What is kept beside the conversation is no part of it.
    asking_again = {"model": "m", "previous_response_id": second["id"], "instructions": "x" * 10_000}
    third = await post(gateway, asking(TEXT) | asking_again)
    bodies = [
        ("", asking(TEXT) | {"previous_response_id": third["id"], "input": text}),
        ("/input_tokens", {"model": "m", "previous_response_id": third["id"], "input": text}),
        ("/compact", {"model": "m", "previous_response_id": third["id"], "input": text}),
    ]
    for path, body in bodies:
        answer = await gateway.client.post(PATH + path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "conversation_too_large"), path
    assert (await gateway.client.get(f"{PATH}/{third['id']}/input_items")).status_code == 200


async def test_an_item_that_is_referred_to_counts_each_time(gateway: Gateway) -> None:
    item = {"role": "user", "content": "x" * 30_000, "id": "msg_large"}
    await post(gateway, {"model": "m", "input": [item, {"role": "user", "content": json.dumps(TEXT)}]})
    reference, last = {"type": "item_reference", "id": "msg_large"}, {"role": "user", "content": json.dumps(TEXT)}

    await post(gateway, {"model": "m", "input": [reference, reference, last]})
    answer = await gateway.client.post(PATH, json={"model": "m", "input": [reference] * 4 + [last]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "conversation_too_large")


async def test_a_response_that_failed_is_kept_and_not_continued(gateway: Gateway) -> None:
    script = [["text", "a"], *[["wait"]] * 10, ["finish", "error"]]
    answer = await gateway.client.post(PATH, json=asking(script, stream=True))
    made = events(answer.text)[-1]["response"]
    assert made["status"] == "failed"

    assert (await gateway.client.get(f"{PATH}/{made['id']}")).json()["status"] == "failed"
    answer = await gateway.client.post(PATH, json=asking(TEXT, previous_response_id=made["id"]))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "previous_response_failed")


async def test_what_no_model_is_shown_is_listed_without_its_content(gateway: Gateway) -> None:
    foreign = {"type": "web_search_call", "id": "ws_1", "status": "completed", "output": "x" * 1000, "arguments": "y"}
    made = await post(gateway, {"model": "m", "input": [foreign, {"role": "user", "content": json.dumps(TEXT)}]})
    page = (await gateway.client.get(f"{PATH}/{made['id']}/input_items", params={"order": "asc"})).json()

    assert page["data"][0] == {"type": "web_search_call", "id": "ws_1", "status": "completed"}


async def test_what_is_not_to_be_kept_is_not(gateway: Gateway) -> None:
    made = await post(gateway, asking(TEXT, store=False))

    assert made["store"] is False
    assert (await gateway.client.get(f"{PATH}/{made['id']}")).status_code == 404
    answer = await gateway.client.post(PATH, json=asking(TEXT, previous_response_id=made["id"]))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "previous_response_not_found")


async def test_a_stored_response_outlives_its_gateway(tmp_path: Path) -> None:
    async with running(tmp_path, worker="talkative") as gateway:
        made = await post(gateway, asking(TEXT))
    async with running(tmp_path, worker="talkative") as gateway:
        found = await gateway.client.get(f"{PATH}/{made['id']}")
        assert found.json() == made


async def test_nothing_is_kept_where_there_is_no_room_for_it(tmp_path: Path) -> None:
    server = ServerConfig(response_store_bytes=0)
    async with running(tmp_path, server=server, worker="talkative") as gateway:
        made = await post(gateway, asking(TEXT))
        assert made["store"] is False
        assert not (tmp_path / "state").exists()


async def test_a_response_is_there_for_its_own_key_only(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys" / "keys.json")
    secrets = [file.create(Key(name=name, prefix="", salt="", hash=""))[1] for name in ("ada", "bob")]
    ada, bob = [{"authorization": f"Bearer {secret}"} for secret in secrets]
    async with running(tmp_path, worker="talkative") as gateway:
        made = (await gateway.client.post(PATH, json=asking(TEXT), headers=ada)).json()
        path = f"{PATH}/{made['id']}"

        assert (await gateway.client.get(path, headers=ada)).status_code == 200
        for sent in (
            gateway.client.get(path, headers=bob),
            gateway.client.get(f"{path}/input_items", headers=bob),
            gateway.client.post(f"{path}/cancel", headers=bob),
            gateway.client.delete(path, headers=bob),
        ):
            assert (await sent).status_code == 404
        following = asking(TEXT, previous_response_id=made["id"])
        assert (await gateway.client.post(PATH, json=following, headers=bob)).status_code == 400
        assert (await gateway.client.post(PATH, json=following, headers=ada)).status_code == 200


async def test_a_conversation_is_compacted_to_what_the_user_said_and_a_summary(tmp_path: Path) -> None:
    async with running(tmp_path, worker="agentic") as gateway:
        conversation = [
            {"role": "user", "content": "My name is Alice."},
            {"role": "assistant", "content": "Hello Alice!"},
            {"role": "user", "content": [{"type": "input_text", "text": "What is my name?"}]},
        ]
        compacted = await post(gateway, {"model": "m", "input": conversation}, f"{PATH}/compact")
        first, second, summary = compacted["output"]
        going_on = [*compacted["output"], {"role": "user", "content": "<<<On we go.>>>"}]
        answer = await post(gateway, {"model": "m", "input": going_on})

    assert compacted["object"] == "response.compaction"
    assert first["content"] == [{"type": "input_text", "text": "My name is Alice."}]
    assert (second["status"], summary["type"]) == ("completed", "compaction")
    assert summary["encrypted_content"]
    assert compacted["usage"]["total_tokens"] > 0
    assert answer["output"][0]["content"][0]["text"] == "On we go."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": "hi", "reasoning_effort": "AAA"}, "reasoning_effort"),
        ({"input": "hi", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "hi", "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
async def test_what_could_not_be_answered_is_not_compacted(
    gateway: Gateway, fields: dict[str, Any], param: str
) -> None:
    answer = await gateway.client.post(f"{PATH}/compact", json={"model": "m"} | fields)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


# -- cancelling ------------------------------------------------------------------------------------------------------


async def test_a_running_stream_is_cancelled(gateway: Gateway) -> None:
    body = {"model": "m", "input": "go on", "stream": True}
    async with gateway.client.stream("POST", PATH, json=body) as answer:
        found: list[Any] = []
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
                if len(found) == 6:
                    running_now = (await gateway.client.get(f"{PATH}/{found[0]['response']['id']}")).json()
                    assert running_now["status"] == "in_progress"
                    cancelled = await post(gateway, {}, f"{PATH}/{found[0]['response']['id']}/cancel")
                    assert cancelled["status"] == "cancelled"

    assert found[-1]["type"] == "response.incomplete"
    assert found[-1]["response"]["status"] == "cancelled"
    await until(lambda: gateway.link.in_flight == 0)
    kept = (await gateway.client.get(f"{PATH}/{found[0]['response']['id']}")).json()
    assert kept == found[-1]["response"]
    again = await post(gateway, {}, f"{PATH}/{kept['id']}/cancel")
    assert again == kept


async def test_what_nobody_knows_cannot_be_cancelled(gateway: Gateway) -> None:
    assert (await gateway.client.post(f"{PATH}/resp_none/cancel")).status_code == 404


# -- refusals and failures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "hologram"}]}, "input[0].type"),
        ({"background": True, "store": False}, "background"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"tools": [{"type": "teleport"}]}, "tools[0].type"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_a_status_in_openais_shape(
    gateway: Gateway, fields: dict[str, Any], param: str, stream: bool
) -> None:
    answer = await gateway.client.post(PATH, json=asking(TEXT, stream=stream) | fields)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_a_stream_over_its_token_limit_is_incomplete(gateway: Gateway) -> None:
    body = {"model": "m", "input": "hi", "max_output_tokens": 3, "stream": True}
    last = events((await gateway.client.post(PATH, json=body)).text)[-1]

    assert last["type"] == "response.incomplete"
    assert last["response"]["output"][0]["content"][0]["text"] == "t0 t1 t2 "


async def test_a_cold_stream_is_kept_alive_by_data(tmp_path: Path) -> None:
    async with running(tmp_path, ["--load-s", "2"], worker="talkative") as gateway:
        found = events((await gateway.client.post(PATH, json=asking(TEXT, stream=True))).text)

    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert found[-1]["type"] == "response.completed"


async def test_random_bodies_never_cause_a_500(gateway: Gateway) -> None:
    values: list[Any] = [None, 1, "x", [], {}, [1], {"type": "x"}, [{"type": "message"}], [{"type": None}], True, [[]]]
    fields = ["input", "tools", "tool_choice", "text", "reasoning", "include", "metadata", "instructions", "store"]
    bodies = [asking(TEXT, max_output_tokens=2) | {field: value} for field in fields for value in values]
    answers = await asyncio.gather(*(gateway.client.post(PATH, json=body) for body in bodies))

    assert {answer.status_code for answer in answers} <= {200, 400}
    assert gateway.metrics.unhandled_errors == 0

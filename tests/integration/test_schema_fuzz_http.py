"""Random schemas over HTTP, in every way that a client can ask with one: answered with what fits, or refused with why.

MLXD_FUZZ_SCHEMAS sets how many, MLXD_FUZZ_SEED which ones; a failure names the seed of its schema.
"""

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gateway.config.settings import ModelConfig
from tests.gateway.harness import Gateway, events, serving
from tests.support.merged import merge_blocks, merge_chat
from tests.support.scale import patient
from tests.support.schemas import Schemas, errors_of

pytestmark = pytest.mark.anyio

COUNT = int(os.environ.get("MLXD_FUZZ_SCHEMAS", "400"))
SEED = int(os.environ.get("MLXD_FUZZ_SEED", "0"))
AT_ONCE = 8
DEADLINE_S = 60
MAX_TOKENS = 96
PLAIN: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0}
VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"n": 2},
    {"logprobs": True, "top_logprobs": 2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    {"chat_template_kwargs": {"enable_thinking": True}, "thinking_budget": 8},
]


@dataclass(slots=True)
class Told:
    """One answer: its texts, each with whether it was cut."""

    status: int
    body: str
    error: dict[str, Any] = field(default_factory=dict[str, Any])
    texts: list[tuple[str, bool]] = field(default_factory=list[tuple[str, bool]])


@dataclass(slots=True)
class Way:
    """A request for a schema in one API. With `is_sure` every whole answer fits, else where it can be enforced."""

    path: str
    fields: Callable[[Any], dict[str, Any]]
    is_sure: bool = True
    is_tool: bool = False

    def body(self, schema: Any, seed: int) -> dict[str, Any]:
        if self.path == "/v1/responses":
            asked: dict[str, Any] = {"input": "hi", "max_output_tokens": MAX_TOKENS, "temperature": 0, "store": False}
        elif self.path == "/v1/messages":
            asked = {"messages": PLAIN["messages"], "max_tokens": MAX_TOKENS, "temperature": 0}
        else:
            asked = {"messages": PLAIN["messages"], "max_tokens": MAX_TOKENS, "seed": seed, **VARIANTS[seed % 6]}
        return {"model": "m", **asked, **self.fields(schema)}


def _format(schema: Any, strict: bool | None) -> dict[str, Any]:
    told = {"name": "it", "schema": schema} | ({} if strict is None else {"strict": strict})
    return {"response_format": {"type": "json_schema", "json_schema": told}}


def _text_format(schema: Any, strict: bool | None) -> dict[str, Any]:
    told = {"type": "json_schema", "name": "it", "schema": schema} | ({} if strict is None else {"strict": strict})
    return {"text": {"format": told}}


def _tool(schema: Any, strict: bool) -> dict[str, Any]:
    function = {"name": "f", "strict": strict, "parameters": schema}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


CHAT = "/v1/chat/completions"
WAYS = [
    Way(CHAT, lambda schema: _format(schema, True)),
    Way(CHAT, lambda schema: _format(schema, None), is_sure=False),
    Way(CHAT, lambda schema: _format(schema, False), is_sure=False),
    Way(CHAT, lambda schema: {"response_format": {"type": "json_object", "schema": schema}}),
    Way(CHAT, lambda schema: {"structured_outputs": {"json": schema}}),
    Way(CHAT, lambda schema: {"guided_json": json.dumps(schema)}),
    Way("/v1/responses", lambda schema: _text_format(schema, True)),
    Way("/v1/responses", lambda schema: _text_format(schema, None), is_sure=False),
    Way("/v1/messages", lambda schema: {"output_format": {"type": "json_schema", "schema": schema}}),
    Way(CHAT, lambda schema: _tool(schema, True), is_tool=True),
    Way(CHAT, lambda schema: _tool(schema, False), is_sure=False, is_tool=True),
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway(model_folder: Callable[[str], Path]) -> AsyncGenerator[Gateway, None]:
    async with serving(ModelConfig(name="m", path=str(model_folder("qwen3")))) as made:
        made.client.timeout = patient(DEADLINE_S)
        yield made


@pytest.mark.fuzz
async def test_random_schemas_are_kept_to_or_refused_however_they_are_sent(gateway: Gateway) -> None:
    before = await ask(gateway, CHAT, {"model": "m", **PLAIN})
    pid = gateway.pool.worker("m").pid
    counts: Counter[str] = Counter()
    turns = asyncio.Semaphore(AT_ONCE)

    seconds: list[tuple[float, int]] = []

    async def one(at: int) -> None:
        async with turns:
            started = time.monotonic()
            await check(gateway, SEED + at, counts)
            seconds.append((round(time.monotonic() - started, 2), SEED + at))

    async with asyncio.TaskGroup() as group:
        for at in range(COUNT):
            group.create_task(one(at))
    after = await ask(gateway, CHAT, {"model": "m", **PLAIN})
    print(f"seeds {SEED} to {SEED + COUNT - 1}: {json.dumps(dict(counts.most_common()), indent=1)}")
    print(f"slowest, with their seeds: {sorted(seconds)[-5:]}")
    assert after.texts == before.texts
    assert gateway.pool.worker("m").pid == pid
    assert counts["fits"] > COUNT / 8
    assert counts["400"] > COUNT / 10


async def check(gateway: Gateway, seed: int, counts: Counter[str]) -> None:
    """One schema, one way, whole and streamed."""
    schema, way = Schemas(seed).make_any(), WAYS[seed % len(WAYS)]
    if way.is_tool and not (isinstance(schema, dict) and schema.get("type") == "object"):
        schema = {"type": "object", "properties": {"value": schema}, "required": ["value"]}
    body = way.body(schema, seed)
    where = f"MLXD_FUZZ_SEED={seed} {way.path} {json.dumps(body)[:3000]}"
    whole = await ask(gateway, way.path, body)
    streamed = await ask(gateway, way.path, body | {"stream": True})

    assert whole.status in (200, 400), f"{where}\n{whole.body}"
    assert (streamed.status, streamed.error) == (whole.status, whole.error), f"{where}\n{whole.body}\n{streamed.body}"
    counts[str(whole.status)] += 1
    if whole.status == 400:
        assert len(whole.error["message"]) > 20, where
        assert whole.error["type"] == "invalid_request_error", where
        counts["400 " + whole.error["message"].partition("cannot be enforced: ")[2][:28]] += 1
        return
    assert streamed.texts == whole.texts, where
    # Null is none: `json_object` without a schema.
    schema = {"type": "object"} if schema is None else schema
    is_sure = way.is_sure or await is_enforceable(gateway, schema)
    for text, is_cut in whole.texts:
        if is_cut:
            counts["cut"] += 1
            continue
        value = json.loads(text)
        problem = errors_of(value, schema) if is_sure else None
        assert problem is None, f"{where}\n{text!r}: {problem}"
        assert is_sure or not way.is_tool or isinstance(value, dict), where
        counts["fits" if is_sure else "left to the model"] += 1


async def is_enforceable(gateway: Gateway, schema: Any) -> bool:
    """Whether who insists on it is answered; who does not is answered in any case."""
    told = await ask(gateway, CHAT, {"model": "m", **PLAIN, "max_tokens": 1, **_format(schema, True)})
    return told.status == 200


async def ask(gateway: Gateway, path: str, body: dict[str, Any]) -> Told:
    content = json.dumps(body).encode()
    reply = await gateway.client.post(path, content=content, headers={"content-type": "application/json"})
    if reply.status_code != 200:
        return Told(reply.status_code, reply.text, reply.json().get("error", {}))
    found = events(_data(reply.text)) if body.get("stream") else reply.json()
    return Told(200, reply.text, texts=_READERS[path](found))


def _data(stream: str) -> str:
    """Without the names of events."""
    return "\n".join(line for line in stream.split("\n") if not line.startswith("event: "))


def _chat(found: Any) -> list[tuple[str, bool]]:
    if isinstance(found, list):
        choices = list(merge_chat(found[:-1]).values())
        told = [(one["content"], list(one["calls"].values()), one["finish"]) for one in choices]
    else:
        told = [
            (one["message"]["content"], [call["function"] for call in one["message"].get("tool_calls", ())],
             one["finish_reason"])
            for one in found["choices"]
        ]  # fmt: skip
    return [
        (text, finish == "length") for content, calls, finish in told
        for text in ([call["arguments"] for call in calls] or [content or ""])
    ]  # fmt: skip


def _response(found: Any) -> list[tuple[str, bool]]:
    told = found[-1]["response"] if isinstance(found, list) else found
    texts = [part["text"] for item in told["output"] if item["type"] == "message" for part in item["content"]]
    return [("".join(texts), told["status"] == "incomplete")]


def _message(found: Any) -> list[tuple[str, bool]]:
    blocks = merge_blocks(found) if isinstance(found, list) else found["content"]
    reason = found[-2]["delta"]["stop_reason"] if isinstance(found, list) else found["stop_reason"]
    return [("".join(block["text"] for block in blocks if block["type"] == "text"), reason == "max_tokens")]


_READERS: dict[str, Callable[[Any], list[tuple[str, bool]]]] = {
    CHAT: _chat,
    "/v1/responses": _response,
    "/v1/messages": _message,
}

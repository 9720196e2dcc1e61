"""Every API, over HTTP: whatever a model says, a stream and an answer in one piece tell the same, and both are what the
official clients' models require."""

import json
from collections.abc import AsyncGenerator
from typing import Any, Final, Protocol

import httpx2
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from gateway.api.responses import response as responses_out
from tests.gateway.harness import Gateway, running
from tests.support import official
from tests.support.merged import merge_blocks, merge_chat, merge_items, merge_text
from tests.support.pool import short_home
from tests.support.published import check_answer, check_events
from tests.support.scale import scaled

pytestmark = pytest.mark.anyio

Script = list[list[str]]
TOOLS: Final = ("f", "g", "patch")
# In the Responses API's own document, but not in its client's models.
RESPONSE_EXTRAS: Final = frozenset({"store", "presence_penalty", "frequency_penalty", "status", "name", "bytes"})


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway() -> AsyncGenerator[Gateway, None]:
    with short_home() as home:
        async with running(home, worker="talkative") as made:
            yield made


_texts = st.text(max_size=5)
_arguments = st.dictionaries(st.text(max_size=3), st.integers(-9, 9) | st.text(max_size=3), max_size=2).map(json.dumps)
_event = st.one_of(
    st.tuples(st.just("text"), _texts),
    st.tuples(st.just("reasoning"), _texts),
    st.tuples(st.just("logprobs"), st.text(min_size=1, max_size=3)),
    st.tuples(st.just("tool"), st.sampled_from(TOOLS), _arguments | st.just('{"cut')),
).map(list)
_finish = st.sampled_from(
    [["finish", name] for name in ("stop", "length", "tool_calls", "abort", "error")] + [["finish", "stop", "END"]]
)
_scripts = st.tuples(st.lists(_event, max_size=6), _finish).map(lambda parts: [*parts[0], parts[1]])


class Dialect(Protocol):
    """One API: its request, and how a client merges a stream and reads a whole answer."""

    path: str

    def body(self, said: str, choices: int) -> dict[str, Any]: ...
    def whole(self, answer: Any) -> Any: ...
    def streamed(self, events: list[Any]) -> Any: ...


class Chat:
    path = "/v1/chat/completions"

    def body(self, said: str, choices: int) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}} for name in TOOLS]
        asked = {"messages": [{"role": "user", "content": said}], "tools": tools, "n": choices}
        return asked | {"logprobs": True, "stream_options": {"include_usage": True}}

    def whole(self, answer: Any) -> Any:
        official.check(ChatCompletion, answer, ours=official.REASONING)
        choices = {choice["index"]: self._choice(choice) for choice in answer["choices"]}
        return choices, answer["usage"], answer["model"]

    def _choice(self, choice: Any) -> dict[str, Any]:
        message, logprobs = choice["message"], choice["logprobs"]
        calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", [])]
        return {
            "content": message["content"] or "",
            "reasoning": message.get("reasoning", ""),
            "reasoning_content": message.get("reasoning_content", ""),
            "calls": dict(enumerate(calls)),
            "logprobs": logprobs and logprobs["content"],
            "finish": choice["finish_reason"],
        }

    def streamed(self, events: list[Any]) -> Any:
        for event in events:
            official.check(ChatCompletionChunk, event, ours=official.REASONING)
        return merge_chat(events), events[-1]["usage"], events[-1]["model"]


class Text:
    path = "/v1/completions"

    def body(self, said: str, choices: int) -> dict[str, Any]:
        return {"prompt": said, "n": choices, "logprobs": 1, "stream_options": {"include_usage": True}}

    def whole(self, answer: Any) -> Any:
        official.check(Completion, answer)
        choices = {
            choice["index"]: {"text": choice["text"], "logprobs": choice["logprobs"], "finish": choice["finish_reason"]}
            for choice in answer["choices"]
        }
        return choices, answer["usage"], answer["model"]

    def streamed(self, events: list[Any]) -> Any:
        for event in events:
            # A chunk says null until the last one, as OpenAI's do, which their own model of it does not know.
            choices = [one | {"finish_reason": one["finish_reason"] or "stop"} for one in event["choices"]]
            official.check(Completion, event | {"choices": choices})
        return merge_text(events), events[-1]["usage"], events[-1]["model"]


class Messages:
    path = "/v1/messages"

    def body(self, said: str, choices: int) -> dict[str, Any]:
        tools = [{"name": name, "input_schema": {"type": "object"}} for name in TOOLS]
        return {"messages": [{"role": "user", "content": said}], "max_tokens": 99, "tools": tools}

    def whole(self, answer: Any) -> Any:
        official.check(Message, answer)
        return answer["content"], answer["stop_reason"], answer["stop_sequence"], answer["usage"]

    def streamed(self, events: list[Any]) -> Any:
        for event in events:
            official.check(RawMessageStreamEvent, event)
        last = events[-2]
        return merge_blocks(events), last["delta"]["stop_reason"], last["delta"]["stop_sequence"], last["usage"]


class Responses:
    path = "/v1/responses"

    def body(self, said: str, choices: int) -> dict[str, Any]:
        tools = [{"type": "custom" if name == "patch" else "function", "name": name} for name in TOOLS]
        return {"input": said, "tools": tools, "include": ["message.output_text.logprobs"], "store": False}

    def whole(self, answer: Any) -> Any:
        official.check(Response, answer, ours=RESPONSE_EXTRAS)
        return self._told(answer)

    def _told(self, response: Any) -> Any:
        """All of it but what every response has of its own: its items too are named after it."""
        stem = response["id"].removeprefix("resp_")
        told = json.loads(json.dumps(response).replace(stem, "stem"))
        return {key: value for key, value in told.items() if key not in ("created_at", "completed_at")}

    def streamed(self, events: list[Any]) -> Any:
        for event in events:
            official.check(ResponseStreamEvent, event, ours=RESPONSE_EXTRAS)
        last = events[-1]["response"]
        assert merge_items(events) == last["output"]
        return self._told(last)


DIALECTS: Final[list[Dialect]] = [Chat(), Text(), Messages(), Responses()]


def failure(events: list[Any]) -> str | None:
    """Message of an error amid a stream."""
    last = events[-1]
    error = last.get("error") or (last.get("response") or {}).get("error")
    return error["message"] if error else None


async def ask(gateway: Gateway, dialect: Dialect, script: Script, choices: int, **more: Any) -> httpx2.Response:
    body = {"model": "m"} | dialect.body(json.dumps(script), choices) | more
    return await gateway.client.post(dialect.path, json=body)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
@settings(max_examples=scaled(100, 40), suppress_health_check=[HealthCheck.too_slow])
@given(script=_scripts, choices=st.integers(1, 3))
async def test_a_stream_tells_what_the_whole_answer_tells(
    gateway: Gateway, dialect: Dialect, script: Script, choices: int
) -> None:
    whole = await ask(gateway, dialect, script, choices)
    stream = await ask(gateway, dialect, script, choices, stream=True)

    check_answer("POST", dialect.path, whole.status_code, whole.json())
    if stream.status_code != 200:
        # It failed before there was anything to say.
        assert (stream.status_code, stream.json()["error"]) == (whole.status_code, whole.json()["error"])
        return
    events = check_events(dialect.path, stream.text)
    if whole.status_code == 200:
        assert dialect.streamed(events) == dialect.whole(whole.json())
    else:
        assert failure(events) == whole.json()["error"]["message"]


async def test_each_event_of_the_responses_api_occurs_and_is_as_its_client_wants_it(gateway: Gateway) -> None:
    said: list[Script] = [
        [
            ["reasoning", "hm"],
            ["logprobs", "Hi"],
            ["tool", "f", '{"a": 1}'],
            ["tool", "patch", '{"input": "x"}'],
            ["finish", "stop"],
        ],
        [["text", "cut"], ["finish", "length"]],
        [["text", "broken"], ["wait"], ["finish", "error"]],
    ]
    occurred: set[str] = set()
    for script in said:
        events = check_events("/v1/responses", (await ask(gateway, Responses(), script, 1, stream=True)).text)
        for event in events:
            official.check(ResponseStreamEvent, event, ours=RESPONSE_EXTRAS)
        occurred |= {event["type"] for event in events}

    # A response that runs in the background is queued as well.
    all_events = {str(event.__struct_config__.tag) for event in responses_out.Event.__args__}
    assert occurred == all_events - {"response.queued"}

import json
import math
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from gateway.api.openai.response import LOGPROB_MIN, TextLogprobsBuilder
from protocol.from_worker import TokenLogprob
from tests.gateway.harness import Gateway, events, running

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    async with running(tmp_path_factory.mktemp("g"), ["--step-ms", "1"], worker="talkative") as running_gateway:
        yield running_gateway


def completion(prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": prompt, "max_tokens": 3} | fields


async def test_a_completion_is_answered_in_one_piece(gateway: Gateway) -> None:
    answer = await gateway.client.post(PATH, json=completion())

    body = answer.json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "t0 t1 t2 ", "logprobs": None, "finish_reason": "length"}]


@pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2], [[1, 2]]])
async def test_each_shape_of_prompt_is_served(gateway: Gateway, prompt: Any) -> None:
    answer = await gateway.client.post(PATH, json=completion(prompt))

    assert answer.json()["choices"][0]["text"] == "t0 t1 t2 "


async def test_prompts_and_choices_are_numbered_in_order_and_prompts_counted_once(gateway: Gateway) -> None:
    answer = await gateway.client.post(PATH, json=completion(["a", "b"], n=2))

    body = answer.json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["completion_tokens"] == 12


async def test_a_completion_is_streamed(gateway: Gateway) -> None:
    request = completion(stream=True, stream_options={"include_usage": True})
    chunks = events((await gateway.client.post(PATH, json=request)).text)

    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-2]) == "t0 t1 t2 "
    assert chunks[-3]["choices"][0]["finish_reason"] == "length"
    assert chunks[-2]["usage"]["total_tokens"] == 6
    assert chunks[-1] == "[DONE]"


async def test_one_failing_prompt_of_several_is_told_in_the_stream(gateway: Gateway) -> None:
    answer = await gateway.client.post(PATH, json=completion(["fine", "refused"]))
    assert answer.status_code == 400


async def test_legacy_log_probabilities_come_through(gateway: Gateway) -> None:
    said = json.dumps([["logprobs", "a"], ["logprobs", "é"], ["finish", "stop"]])
    whole = (await gateway.client.post(PATH, json=completion(said, logprobs=1))).json()
    chunks = events((await gateway.client.post(PATH, json=completion(said, logprobs=1, stream=True))).text)

    logprobs = whole["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "é"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["top_logprobs"][0] == {"a": -0.5, "other": -1.5}
    assert logprobs["text_offset"] == [0, 1]
    # How many chunks there are depends on how fast the client reads.
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
    assert [offset for one in streamed if one for offset in one["text_offset"]] == [0, 1]


def test_the_first_token_of_a_prompt_has_no_log_probability() -> None:
    built = TextLogprobsBuilder().build(
        "ab", [TokenLogprob(b"a", math.nan), TokenLogprob(b"b", -math.inf, ((b"c", -0.5),))]
    )

    assert msgspec.to_builtins(built) == {
        "tokens": ["a", "b"],
        "token_logprobs": [None, LOGPROB_MIN],
        "top_logprobs": [None, {"c": -0.5, "b": LOGPROB_MIN}],
        "text_offset": [0, 1],
    }


@pytest.mark.parametrize(
    ("text", "tokens", "offsets"),
    [
        ("Rivers run", [b"<bos>", b"Rivers", b" run"], [0, 0, 6]),  # added by the tokenizer
        ("Rivers run to", [b"<bos>", b"Rivers", b" run"], [0, 0, 6]),  # the first slice of a longer prompt
        ("<bos>Rivers", [b"<bos>", b"Rivers"], [0, 5]),  # written by the client
        ("Rivers run", [b" Rivers", b" run"], [0, 7]),  # a tokenizer that puts a space before each text
        ("", [b"<bos>"], [0]),
    ],
)
def test_text_offsets_of_an_echo_do_not_count_what_the_tokenizer_put_before_it(
    text: str, tokens: list[bytes], offsets: list[int]
) -> None:
    builder = TextLogprobsBuilder()
    entries = [TokenLogprob(token, -1.0 if at else math.nan) for at, token in enumerate(tokens)]
    assert builder.build(text, entries).text_offset == offsets
    end = offsets[-1] + (len(tokens[-1]) if len(tokens) > 1 else 0)
    assert builder.build("!", [TokenLogprob(b"!", -1.0)]).text_offset == [end]

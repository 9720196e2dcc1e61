"""vLLM's fields about tokens, over HTTP on a real worker: ids of prompt and output, log-probabilities of the prompt."""

import itertools
import os
import signal
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import anyio
import httpx2
import mlx.core as mx
import mlx_lm
import openai
import pytest

from gateway.config.settings import ModelConfig
from gateway.request import generation
from tests.gateway.harness import Gateway, events, serving, until

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAID = "ka to mi ra sen lu por vi " * 12
MESSAGES = [{"role": "user", "content": SAID}]
PROMPTS: dict[str, dict[str, Any]] = {CHAT: {"messages": MESSAGES}, TEXT: {"prompt": SAID}}
TOLD = ("prompt_logprobs", "prompt_token_ids")
both = pytest.mark.parametrize("path", [CHAT, TEXT])


class Reference:
    """mlx-lm's own numbers of the model."""

    def __init__(self, folder: Path) -> None:
        self.model, self.tokenizer = mlx_lm.load(str(folder))[:2]

    def prompt(self, path: str) -> list[int]:
        if path == TEXT:
            return list(self.tokenizer.encode(SAID))
        return list(self.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False))

    def logprobs(self, ids: list[int]) -> Any:
        """Of what follows each of these ids."""
        logits = self.model(mx.array([ids]))[0].astype(mx.float32)
        return (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """The output, with the token that ends it."""
        output: list[int] = []
        while len(output) < count and output[-1:] != [self.tokenizer.eos_token_id]:
            best: Any = mx.argmax(self.model(mx.array([[*ids, *output]]))[0, -1]).item()
            output.append(best)
        return output


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("qwen3")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
async def gateway(folder: Path) -> AsyncGenerator[Gateway, None]:
    # Streams without drafts.
    plain = ModelConfig(name="m", path=str(folder), speculate="off")
    async with serving(plain) as made:
        yield made


def asked(path: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 24, "temperature": 0, "return_token_ids": True} | PROMPTS[path] | fields


async def posted(gateway: Gateway, path: str, **fields: Any) -> httpx2.Response:
    reply = await gateway.client.post(path, json=asked(path, **fields))
    assert reply.status_code == 200, reply.text
    assert "x-mlxd-ignored" not in reply.headers
    return reply


def ids_of(path: str, chunks: list[Any]) -> tuple[list[list[int]], list[int]]:
    """Prompts and output of a stream's choice 0."""
    prompts: list[list[int]] = []
    output: list[int] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            place = chunk if path == CHAT else choice
            prompts += [place["prompt_token_ids"]] if "prompt_token_ids" in place else []
            output += choice.get("token_ids", [])
    return prompts, output


@both
async def test_ids_are_those_of_the_tokenizer_and_of_greedy_decoding_streamed_and_whole(
    path: str, gateway: Gateway, reference: Reference
) -> None:
    prompt = reference.prompt(path)
    expected = reference.greedy(prompt, 24)
    for _ in range(2):  # the second time from the prefix cache
        whole = (await posted(gateway, path)).json()
        (choice,) = whole["choices"]
        assert (choice["token_ids"], whole["usage"]["completion_tokens"]) == (expected, len(expected))
        assert (whole if path == CHAT else choice)["prompt_token_ids"] == prompt
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    stream = await posted(gateway, path, stream=True)
    *chunks, done = events(stream.text)
    assert done == "[DONE]"
    assert "prompt_token_ids" in (chunks[0] if path == CHAT else chunks[0]["choices"][0])
    assert ids_of(path, chunks) == ([prompt], expected)


@both
async def test_ids_without_text_are_told_with_the_end(path: str, gateway: Gateway, reference: Reference) -> None:
    prompt, eos = reference.prompt(path), reference.tokenizer.eos_token_id
    free = reference.greedy(prompt, 24)
    text = reference.tokenizer.decode(free[:12])
    ways: list[dict[str, Any]] = [{"logit_bias": {str(eos): 100}}, {"stop_token_ids": [free[5]]}, {"stop": text[-4:]}]
    for fields in ways:
        whole = (await posted(gateway, path, **fields)).json()
        (choice,) = whole["choices"]
        ids = choice["token_ids"]
        assert choice["finish_reason"] == "stop"
        assert len(ids) == whole["usage"]["completion_tokens"]
        assert ids == ([eos] if "logit_bias" in fields else free[: len(ids)])
        *chunks, _ = events((await posted(gateway, path, stream=True, **fields)).text)
        assert ids_of(path, chunks) == ([prompt], ids)


@both
async def test_log_probabilities_of_a_prompt_are_those_of_the_model_on_all_of_it(
    path: str, gateway: Gateway, reference: Reference
) -> None:
    prompt = reference.prompt(path)
    first, second = [(await posted(gateway, path, prompt_logprobs=3, n=2)).json() for _ in range(2)]
    told = first["prompt_logprobs"] if path == CHAT else first["choices"][0]["prompt_logprobs"]
    assert (second if path == CHAT else second["choices"][1])["prompt_logprobs"] == told
    assert [each["token_ids"] for each in first["choices"]] == [each["token_ids"] for each in second["choices"]]
    assert (len(told), told[0]) == (len(prompt), None)
    for entry, token, row in zip(told[1:], prompt[1:], reference.logprobs(prompt), strict=False):
        own = entry[str(token)]
        assert next(iter(entry)) == str(token)
        assert own["logprob"] == pytest.approx(row[token], abs=1e-4)
        assert own["decoded_token"] == reference.tokenizer.decode([token])
        assert sum(each > own["logprob"] + 1e-4 for each in row) < own["rank"]
        assert own["rank"] <= 1 + sum(each > own["logprob"] - 1e-4 for each in row)
        best = sorted(entry.values(), key=lambda each: each["rank"])[:3]
        assert [each["rank"] for each in best] == [1, 2, 3]
        assert [each["logprob"] for each in best] == pytest.approx(sorted(row)[:-4:-1], abs=1e-4)
        assert len(entry) == 3 + (own["rank"] > 3)
    alone = (await posted(gateway, path, prompt_logprobs=0, max_tokens=1)).json()
    least = (alone if path == CHAT else alone["choices"][0])["prompt_logprobs"]
    assert [next(iter(each)) for each in least[1:]] == [str(token) for token in prompt[1:]]
    assert {len(each) for each in least[1:]} == {1}


@both
async def test_in_streams_there_are_none_and_more_than_twenty_are_refused(path: str, gateway: Gateway) -> None:
    for fields in ({"stream": True, "prompt_logprobs": 1}, {"prompt_logprobs": 21}, {"prompt_logprobs": -1}):
        reply = await gateway.client.post(path, json=asked(path, **fields))
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt_logprobs")
    reply = await gateway.client.post(path, json=asked(path, stream=True, prompt_logprobs=0))
    assert (reply.status_code, reply.headers["x-mlxd-ignored"]) == (200, "prompt_logprobs")


async def test_more_of_them_than_an_answer_holds_are_a_400_and_nothing_else(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "SCORES_BYTES_MAX", 100)
    for path in (CHAT, TEXT):
        reply = await gateway.client.post(path, json=asked(path, prompt_logprobs=3))
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt_logprobs")
    monkeypatch.undo()
    assert (await posted(gateway, CHAT, prompt_logprobs=3)).json()["prompt_logprobs"]


@pytest.mark.soak
async def test_scores_of_one_token_on_recurrent_layers_restart_no_worker(model_folder: Callable[[str], Path]) -> None:
    body = {"model": "r", "prompt": [[50], [51]], "max_tokens": 0, "echo": True, "logprobs": 1}
    async with serving(ModelConfig(name="r", path=str(model_folder("qwen3_5")))) as gateway:
        pids: set[int | None] = set()
        for _ in range(3):
            reply = await gateway.client.post(TEXT, json=body)
            assert reply.status_code == 200, reply.text
            choices_of = reply.json()["choices"]
            assert [each["logprobs"]["token_logprobs"] for each in choices_of] == [[None], [None]]
            pids.add(gateway.pool.worker("r").pid)
    assert len(pids) == 1


@both
async def test_several_prompts_and_parts_of_them_are_told_apart(path: str, gateway: Gateway) -> None:
    cut = (await posted(gateway, path, truncate_prompt_tokens=9, prompt_logprobs=1, max_tokens=2)).json()
    place = cut if path == CHAT else cut["choices"][0]
    assert (len(place["prompt_token_ids"]), len(place["prompt_logprobs"])) == (9, 9)
    if path == TEXT:
        several = (
            await posted(gateway, path, prompt=[[20, 21, 22], [30, 31]], n=2, prompt_logprobs=0, echo=True)
        ).json()
        told = [(each["prompt_token_ids"], len(each["prompt_logprobs"])) for each in several["choices"]]
        assert told == [([20, 21, 22], 3)] * 2 + [([30, 31], 2)] * 2


async def test_the_clients_of_openai_read_them(gateway: Gateway, reference: Reference) -> None:
    usual: dict[str, Any] = {"model": "m", "max_tokens": 4, "temperature": 0}
    ids = {"return_token_ids": True}
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client:
        chats, texts = client.chat.completions, client.completions
        chat: Any = await chats.create(messages=MESSAGES, extra_body=ids | {"prompt_logprobs": 1}, **usual)
        text: Any = await texts.create(prompt=SAID, extra_body=ids | {"prompt_logprobs": 1}, **usual)
        stream: Any = await chats.create(messages=MESSAGES, stream=True, extra_body=ids, **usual)
        chunks = [chunk async for chunk in stream]
    assert chat.prompt_token_ids == reference.prompt(CHAT)
    assert len(chat.prompt_logprobs) == len(chat.prompt_token_ids)
    assert text.choices[0].prompt_token_ids == reference.prompt(TEXT)
    assert len(text.choices[0].prompt_logprobs) == len(text.choices[0].prompt_token_ids)
    assert chunks[0].prompt_token_ids == chat.prompt_token_ids
    streamed = [getattr(choice, "token_ids", []) for chunk in chunks for choice in chunk.choices]
    assert list(itertools.chain(*streamed)) == chat.choices[0].token_ids


@pytest.mark.soak
async def test_ids_of_a_stream_whose_worker_was_killed_are_the_same(gateway: Gateway) -> None:
    fields = {"max_tokens": 800, "ignore_eos": True}
    expected = (await posted(gateway, CHAT, **fields)).json()
    lines: list[str] = []
    async with gateway.client.stream("POST", CHAT, json=asked(CHAT, stream=True, **fields)) as reply:
        async for line in reply.aiter_lines():
            lines.append(line)
            if len(lines) == 20:
                killed(gateway)
    *chunks, _ = events("\n".join([*lines, ""]))
    assert ids_of(CHAT, chunks) == ([expected["prompt_token_ids"]], expected["choices"][0]["token_ids"])


async def test_the_progress_of_a_prompt_reaches_its_length_and_begins_with_what_was_cached(gateway: Gateway) -> None:
    prompt = [20 + at * 11 % 400 for at in range(1100)]
    fields = {"prompt": prompt, "max_tokens": 1, "stream": True, "return_progress": True, "cache_salt": "progress"}
    for cached in (0, 1099):
        chunks = events((await posted(gateway, TEXT, **fields)).text)[:-1]
        shown = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]

        assert [each["processed"] for each in shown] == sorted(each["processed"] for each in shown)
        assert [each["time_ms"] for each in shown] == sorted(each["time_ms"] for each in shown)
        assert {(each["total"], each["cache"]) for each in shown} <= {(1100, cached)}
        assert [each["processed"] for each in shown[-1:]] == ([1100] if shown else [])
        assert shown or cached


@pytest.mark.soak
async def test_a_prompt_whose_worker_is_killed_amid_its_scores_is_told_once(gateway: Gateway) -> None:
    prompt = [20 + at * 7 % 400 for at in range(1500)]
    fields = {"prompt": prompt, "prompt_logprobs": 2, "max_tokens": 1}
    expected = (await posted(gateway, TEXT, **fields)).json()["choices"]
    answer: list[Any] = []

    async def ask() -> None:
        answer.append((await posted(gateway, TEXT, **fields)).json()["choices"])

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await until(lambda: any(each.prefilled_tokens > 0 for each in gateway.app.services.requests.of("m")) or answer)
        killed(gateway)
    assert answer == [expected]


def killed(gateway: Gateway) -> None:
    pid = gateway.pool.worker("m").pid
    assert pid
    os.kill(pid, signal.SIGKILL)


async def test_a_chat_is_rendered_as_the_template_writes_it(gateway: Gateway, reference: Reference) -> None:
    asked = {"model": "m", "messages": MESSAGES, "temperature": 0.5}
    whole = (await gateway.client.post("/apply-template", json=asked)).json()

    expected: Any = reference.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert whole == {"prompt": expected}
    counted = {"model": "m", "prompt": whole["prompt"], "add_special_tokens": False}
    ids = (await gateway.client.post("/tokenize", json=counted)).json()["tokens"]
    assert ids == reference.prompt(CHAT)
    refused = await gateway.client.post("/apply-template", json={"model": "m", "messages": []})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")

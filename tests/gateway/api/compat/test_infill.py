"""Filling in the middle over HTTP, in the forms of llama.cpp, OpenAI and Ollama."""

from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from gateway.config.settings import ModelConfig
from tests.gateway.harness import Gateway, events, serving
from tests.support.models import build
from tests.support.published import check_answer, check_events

pytestmark = pytest.mark.anyio

PATH = "/infill"
ASKED = {"model": "m", "input_prefix": "def f(x):\n    ", "input_suffix": "\n    return y", "n_predict": 6, "seed": 3}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer knows the tokens of Qwen Coder."""
    markers = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    return build("qwen3", tmp_path_factory.mktemp("coder"), markers=markers)


@pytest.fixture(scope="module")
async def gateway(folder: Path, model_folder: Callable[[str], Path]) -> AsyncGenerator[Gateway, None]:
    plain = ModelConfig(name="plain", path=str(model_folder("qwen3")))
    async with serving(ModelConfig(name="m", path=str(folder)), plain) as started:
        yield started


async def test_the_middle_comes_in_one_piece_and_streamed_and_is_the_same_in_all_apis(gateway: Gateway) -> None:
    whole = (await gateway.client.post(PATH, json=ASKED)).json()
    check_answer("POST", PATH, 200, whole)
    pieces = check_events(PATH, (await gateway.client.post(PATH, json=ASKED | {"stream": True})).text)

    assert whole["content"]
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert [piece["stop"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert whole["tokens_predicted"] <= 6
    assert whole["timings"]["prompt_n"] + whole["tokens_cached"] == whole["tokens_evaluated"]

    text = {"model": "m", "prompt": ASKED["input_prefix"], "suffix": ASKED["input_suffix"]}
    openai = await gateway.client.post("/v1/completions", json=text | {"max_tokens": 6, "seed": 3})
    assert openai.json()["choices"][0]["text"] == whole["content"]
    ollama = {"options": {"num_predict": 6, "seed": 3}, "stream": False}
    assert (await gateway.client.post("/api/generate", json=text | ollama)).json()["response"] == whole["content"]


async def test_a_prompt_can_be_computed_before_its_answer_is_wanted(gateway: Gateway) -> None:
    always = {"samplers": ["top_k", "top_p", "infill"], "n_indent": 4, "t_max_predict_ms": 500}
    body = ASKED | {"n_predict": 0, "input_prefix": "x = 1\n" * 60, "cache_prompt": True} | always
    warm = await gateway.client.post(PATH, json=body)
    assert (warm.json()["content"], warm.json()["tokens_predicted"]) == ("", 0)
    assert set(warm.headers["x-mlxd-ignored"].split(", ")) == set(always), "editors send these with each request"
    refused = await gateway.client.post(PATH, json=body | {"n_probs": 3})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n_probs")

    asked = (await gateway.client.post(PATH, json=body | {"n_predict": 2})).json()
    assert asked["tokens_cached"] > 50


async def test_a_text_is_continued_in_llama_cpps_own_form(gateway: Gateway) -> None:
    asked = {"model": "m", "prompt": "ka to mi ra sen " * 20, "n_predict": 6, "seed": 3}
    whole = (await gateway.client.post("/completion", json=asked)).json()
    check_answer("POST", "/completion", 200, whole)
    openai = {"model": "m", "prompt": asked["prompt"], "max_tokens": 6, "seed": 3}
    assert whole["content"] == (await gateway.client.post("/v1/completions", json=openai)).json()["choices"][0]["text"]

    streamed = await gateway.client.post("/completion", json=asked | {"stream": True, "return_progress": True})
    pieces = check_events("/completion", streamed.text)
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    shown = [piece["prompt_progress"] for piece in pieces if "prompt_progress" in piece]
    assert all(each["total"] == whole["tokens_evaluated"] for each in shown)
    assert (pieces[-1]["stop"], pieces[-1]["tokens_cached"]) == (True, whole["tokens_evaluated"] - 1)

    ids = (await gateway.client.post("/tokenize", json={"model": "m", "prompt": asked["prompt"]})).json()["tokens"]
    silent = (await gateway.client.post("/completion", json=asked | {"prompt": ids, "n_predict": 0})).json()
    assert (silent["content"], silent["tokens_predicted"], silent["stop_type"]) == ("", 0, "limit")
    for fields, param in (({"n": 2}, "n"), ({"prompt": ""}, "prompt"), ({"return_progress": True}, "return_progress")):
        refused = await gateway.client.post("/completion", json=asked | fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_a_model_that_cannot_fill_in_says_so(gateway: Gateway) -> None:
    answer = await gateway.client.post(PATH, json=ASKED | {"model": "plain"})

    assert answer.status_code == 400
    assert "no tokens to fill in the middle" in answer.json()["error"]["message"]
    streamed = await gateway.client.post(PATH, json=ASKED | {"model": "plain", "stream": True})
    assert streamed.status_code == 400 or "error" in events(streamed.text)[-1]
    assert (await gateway.client.post(PATH, json=ASKED | {"n": 2})).json()["error"]["param"] == "n"

"""Embeddings, ranks and scores over HTTP from real workers, by OpenAI's SDK and by hand, and who is refused."""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Final

import numpy as np
import openai
import pytest

from gateway.config.settings import ModelConfig
from gateway.workers.supervisor.spawn import default_command
from tests.gateway.harness import Gateway, running
from tests.support.models import build
from tests.support.pool import short_home
from tests.support.published import check_answer
from tests.support.reading_models import PAIRS, TEXTS, build_embedder, build_reranker
from tests.support.scale import patient

pytestmark = pytest.mark.anyio
REFERENCE: Final[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "worker" / "embedding" / "reference.json").read_text()
)
WANT: Final = np.array(REFERENCE["embed"]["bert"]["texts"])
SCORES: Final[list[float]] = REFERENCE["rerank"]["bert"]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    folder = tmp_path_factory.mktemp("models")
    models = [
        ModelConfig(name="bert", path=str(build_embedder("bert", folder / "bert")), matryoshka=True),
        ModelConfig(name="rank", path=str(build_reranker("bert", folder / "rank"))),
        ModelConfig(name="text", path=str(build("qwen3", folder / "text"))),
    ]
    with short_home() as home:
        async with running(home, models=models, command=default_command) as made:
            yield made


async def posted(gateway: Gateway, path: str, **body: Any) -> Any:
    reply = await gateway.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def refused(gateway: Gateway, path: str, **body: Any) -> tuple[int, str | None, str]:
    reply = await gateway.client.post(path, json=body)
    error = reply.json()["error"]
    return reply.status_code, error["code"], error["message"]


async def test_openais_sdk_gets_the_vectors_of_sentence_transformers(gateway: Gateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client:
        answer = await client.embeddings.create(model="bert", input=list(TEXTS))
        as_numbers = await client.embeddings.create(model="bert", input=TEXTS[0], encoding_format="float")
        cut = await client.embeddings.create(model="bert", input=TEXTS[0], dimensions=8)
    vectors = np.array([each.embedding for each in answer.data])
    assert np.abs(vectors - WANT).max() < 5e-6
    assert [each.index for each in answer.data] == list(range(len(TEXTS)))
    assert answer.model == "bert"
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)
    assert np.abs(np.array(as_numbers.data[0].embedding) - WANT[0]).max() < 5e-6
    part = WANT[0][:8] / np.linalg.norm(WANT[0][:8])
    assert np.abs(np.array(cut.data[0].embedding) - part).max() < 5e-6


async def test_numbers_come_as_a_list_or_as_little_endian_float32(gateway: Gateway) -> None:
    numbers = (await posted(gateway, "/v1/embeddings", model="bert", input="kato"))["data"][0]["embedding"]
    text = await posted(gateway, "/v1/embeddings", model="bert", input="kato", encoding_format="base64")
    packed = np.frombuffer(base64.b64decode(text["data"][0]["embedding"]), "<f4")
    assert packed.tolist() == numbers


async def test_a_batch_of_embeddings_has_the_same_vectors(gateway: Gateway) -> None:
    path = "/v1/embeddings"
    bodies = [{"model": "bert", "input": text} for text in TEXTS]
    lines = [{"custom_id": str(at), "method": "POST", "url": path, "body": body} for at, body in enumerate(bodies)]
    content = "\n".join(map(json.dumps, lines))
    reply = await gateway.client.post("/v1/files", files={"file": ("a", content)}, data={"purpose": "batch"})
    batch = {"input_file_id": reply.json()["id"], "endpoint": path, "completion_window": "24h"}
    name = (await posted(gateway, "/v1/batches", **batch))["id"]
    async with asyncio.timeout(patient(60)):
        while (done := (await gateway.client.get(f"/v1/batches/{name}")).json())["status"] != "completed":  # noqa: ASYNC110 - it happens in tasks of the gateway
            await asyncio.sleep(0.02)
    results = (await gateway.client.get(f"/v1/files/{done['output_file_id']}/content")).text.splitlines()
    vectors = {each["custom_id"]: each["response"]["body"]["data"] for each in map(json.loads, results)}
    assert vectors == {str(at): (await posted(gateway, path, **body))["data"] for at, body in enumerate(bodies)}
    assert done["usage"]["input_tokens"] == done["usage"]["total_tokens"] > len(TEXTS)


async def test_token_ids_are_taken_as_they_are(gateway: Gateway) -> None:
    text = {"model": "bert", "prompt": "kato"}
    ids = (await posted(gateway, "/tokenize", **text))["tokens"]
    by_text = await posted(gateway, "/v1/embeddings", model="bert", input=["kato", "kato"])
    by_ids = await posted(gateway, "/v1/embeddings", model="bert", input=[ids, ids])
    assert by_ids == by_text
    assert (await posted(gateway, "/v1/embeddings", model="bert", input=ids))["data"] == by_text["data"][:1]


async def test_content_is_tokenized_without_the_tokens_around_it_as_in_llama_cpp(gateway: Gateway) -> None:
    whole = (await posted(gateway, "/tokenize", model="bert", prompt="kato"))["tokens"]
    bare = (await posted(gateway, "/tokenize", model="bert", content="kato", parse_special=True))["tokens"]
    assert whole == [whole[0], *bare, whole[-1]]
    for fields in ({"content": "kato", "add_special": True}, {"prompt": "kato", "add_special_tokens": True}):
        assert (await posted(gateway, "/tokenize", model="bert", **fields))["tokens"] == whole
    asked = {"model": "bert", "prompt": "kato", "add_special_tokens": False}
    assert (await posted(gateway, "/tokenize", **asked))["tokens"] == bare
    decoded = await posted(gateway, "/detokenize", model="bert", tokens=bare)
    assert decoded["content"] == decoded["prompt"] == "kato"

    for fields, words in (
        ({"content": ""}, "'content' is empty"),
        ({}, "'prompt', 'content' and 'messages'"),
        ({"content": "kato", "prompt": "kato"}, "Exactly one"),
        ({"content": "kato", "with_pieces": True}, "'with_pieces' is not supported"),
        ({"content": "kato", "parse_special": False}, "'parse_special' is not supported"),
    ):
        assert words in (await refused(gateway, "/tokenize", model="bert", **fields))[2]


async def test_a_prompt_of_the_model_changes_the_vector(gateway: Gateway) -> None:
    plain, asked, named = [
        (await posted(gateway, "/v1/embeddings", model="bert", input="kato mira", **fields))["data"][0]["embedding"]
        for fields in ({}, {"input_type": "query"}, {"prompt_name": "query"})
    ]
    assert asked == named != plain
    assert np.abs(np.array(asked) - np.array(REFERENCE["embed"]["bert"]["query"])).max() < 5e-6


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"input": []}, "invalid_value", "1 to 2048"),
        ({"input": ""}, "invalid_value", "empty"),
        ({"input": ["a", ""]}, "invalid_value", "empty"),
        ({"input": ["a", [1]]}, "invalid_value", "mixes"),
        ({"input": [[1], [600]]}, "invalid_value", "token id 600"),
        ({"input": ["a"] * 2049}, "invalid_value", "2049 inputs"),
        ({"input": "kato " * 300}, "context_length_exceeded", "120 tokens"),
        ({"input": "a", "dimensions": 64}, "invalid_value", "have 32"),
        ({"input": "a", "encoding_format": "hex"}, "invalid_value", "hex"),
        ({"input": "a", "prompt_name": "none such"}, "invalid_value", "document, query"),
        ({"input": "a", "input_type": "image"}, "invalid_value", "image"),
        ({}, "missing_required_parameter", "'input'"),
    ],
)
async def test_a_request_that_cannot_be_answered_is_refused(
    gateway: Gateway, body: dict[str, Any], code: str, words: str
) -> None:
    status, got, message = await refused(gateway, "/v1/embeddings", model="bert", **body)
    assert (status, got) == (400, code)
    assert words in message


async def test_an_input_that_is_too_long_is_cut_where_that_is_asked_for(gateway: Gateway) -> None:
    answer = await posted(gateway, "/v1/embeddings", model="bert", input="kato " * 300, truncate_prompt_tokens=-1)
    assert answer["usage"]["prompt_tokens"] == 120


async def test_documents_are_ranked_by_their_scores(gateway: Gateway) -> None:
    query, documents = PAIRS[0][0], [PAIRS[0][1], PAIRS[1][1]]
    body = {"model": "rank", "query": query, "documents": [documents[0], {"text": documents[1]}]}
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        answer = await posted(gateway, path, **body)
        ranked = answer["results"]
        assert [each["index"] for each in ranked] == [1, 0]
        assert [each["relevance_score"] for each in ranked] == pytest.approx([SCORES[1], SCORES[0]], abs=5e-6)
        assert answer["usage"]["total_tokens"] > 0
        assert "document" not in ranked[0]
    (first,) = (await posted(gateway, "/v1/rerank", **body, top_n=1, return_documents=True))["results"]
    assert first["document"] == {"text": documents[1]}


async def test_texts_are_ranked_in_the_form_of_tei(gateway: Gateway) -> None:
    query, texts = PAIRS[0][0], [PAIRS[0][1], PAIRS[1][1]]
    body = {"model": "rank", "query": query, "texts": texts}
    answer = await posted(gateway, "/rerank", **body, raw_scores=False, truncate=False)
    assert [each["index"] for each in answer] == [1, 0]
    assert [each["score"] for each in answer] == pytest.approx([SCORES[1], SCORES[0]], abs=5e-6)
    assert [each.keys() for each in answer] == [{"index", "score"}] * 2
    whole = await posted(gateway, "/rerank", **body, return_text=True)
    assert [each["text"] for each in whole] == [texts[1], texts[0]]
    check_answer("POST", "/v1/rerank", 200, whole)

    long = body | {"texts": ["kato " * 500]}
    assert (await refused(gateway, "/rerank", **long))[1] == "context_length_exceeded"
    assert len(await posted(gateway, "/rerank", **long, truncate=True)) == 1
    for fields in ({"raw_scores": True}, {"truncation_direction": "Left"}):
        assert (await refused(gateway, "/rerank", **body, **fields))[1] == "unsupported_parameter"
    assert "'texts' holds an empty text" in (await refused(gateway, "/rerank", **body | {"texts": [""]}))[2]
    assert "'documents'" in (await refused(gateway, "/rerank", model="rank", query="a"))[2]
    assert "exclude" in (await refused(gateway, "/rerank", **body, documents=["a"]))[2]


async def test_pairs_are_scored_one_by_one_or_against_one_text(gateway: Gateway) -> None:
    first, second = zip(*PAIRS, strict=True)
    for path in ("/v1/score", "/score"):
        answer = await posted(gateway, path, model="rank", text_1=list(first), text_2=list(second))
        assert [each["score"] for each in answer["data"]] == pytest.approx(SCORES, abs=5e-6)
    one = await posted(gateway, "/v1/score", model="rank", text_1=first[0], text_2=[second[0], second[1]])
    assert [each["score"] for each in one["data"]] == pytest.approx(SCORES[:2], abs=5e-6)
    status, _, message = await refused(gateway, "/v1/score", model="rank", text_1=["a", "b"], text_2=["c"] * 3)
    assert status == 400
    assert "as many" in message


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/chat/completions", {"model": "bert", "messages": [{"role": "user", "content": "a"}]}, "/v1/embeddings"),
        ("/v1/completions", {"model": "rank", "prompt": "a"}, "/v1/rerank"),
        ("/v1/responses", {"model": "bert", "input": "a"}, "/v1/embeddings"),
        ("/v1/embeddings", {"model": "text", "input": "a"}, "/v1/chat/completions"),
        ("/v1/rerank", {"model": "bert", "query": "a", "documents": ["b"]}, "makes embeddings"),
    ],
)
async def test_a_model_of_another_kind_is_refused_in_the_dialect_before_it_is_loaded(
    gateway: Gateway, path: str, body: dict[str, Any], words: str
) -> None:
    status, code, message = await refused(gateway, path, **body)
    assert (status, code) == (400, "unsupported_model_kind")
    assert words in message
    assert gateway.pool.worker("text").ready is None


async def test_anthropics_dialect_says_so_in_its_own_shape(gateway: Gateway) -> None:
    body = {"model": "bert", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
    reply = await gateway.client.post("/v1/messages", json=body)
    assert reply.status_code == 400
    assert reply.json()["type"] == "error"
    assert "/v1/embeddings" in reply.json()["error"]["message"]


async def test_requests_are_counted_and_the_kind_is_listed(gateway: Gateway) -> None:
    await posted(gateway, "/v1/embeddings", model="bert", input="kato")
    ready = gateway.pool.worker("bert").ready
    assert ready is not None
    assert (ready.kind, ready.max_context) == ("embed", 120)
    for model in ("bert", "rank"):
        (probed,) = (await gateway.client.get(f"/healthz?deep=1&model={model}")).json()["models"]
        assert probed["ok"], probed
    cards = (await gateway.client.get("/v1/models")).json()["data"]
    assert {card["id"]: card["kind"] for card in cards} == {"bert": "embed", "rank": "rerank", "text": "text"}
    shown = await posted(gateway, "/api/show", model="bert")
    assert shown["capabilities"] == ["embedding"]

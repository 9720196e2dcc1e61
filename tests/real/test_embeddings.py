"""Embeddings of MiniLM against numpy, in each form and by each route, and retrieval of our own pages."""

import base64
from typing import Any, Final

import numpy as np
import pytest

from tests.real.documents import DOCS, PROMPTS, page
from tests.real.figures import Figures
from tests.real.numpy_bert import Array, NumpyBert
from tests.real.prepare import MINILM
from tests.real.serving import Served

MODELS = {"m": f'path = "{MINILM}"'}
CLOSE = 2e-6
TEXTS = (*PROMPTS, "?", "Ein Satz auf Deutsch, mit Umlauten: äöü.", page("memory", 600))
# A question about each page, in the words of someone who has not read it.
QUESTIONS: Final = {
    "How do I give a colleague a key with a monthly budget?": "keys",
    "Which file has the settings of the server, and what does each key mean?": "configuration",
    "How can one process serve several LoRA fine-tunes?": "adapters",
    "How do I transcribe an mp3 with Whisper?": "audio",
    "How do I get vectors of texts and rerank documents?": "embeddings",
    "How do I send a picture with my question?": "vision",
    "How does the model call my functions with valid JSON?": "tools",
    "Why did my request wait so long for its first token?": "slow-requests",
    "How are drafts of the next tokens verified?": "speculation",
    "How much memory does a model get, and what is evicted?": "memory",
    "Which Prometheus metrics and alerts are there?": "monitoring",
    "How do I run it as a background service that starts after a reboot?": "service",
    "How do I connect Ollama apps?": "ollama",
    "How do I run thousands of requests overnight from a file?": "batches",
    "What happens when a worker process crashes?": "supervision",
    "How is a model divided over several machines or processes?": "groups",
    "How do I serve a mixture of experts that is larger than memory?": "experts",
    "What could an attacker do, and what is protected?": "threat-model",
    "How do several daemons share their models?": "fleet",
    "How do I ask yes-or-no questions with probabilities?": "decisions",
}


@pytest.fixture(scope="module")
def numpy_bert() -> NumpyBert:
    return NumpyBert(MINILM)


def embed(served: Served, texts: Any, **options: Any) -> Array:
    data = served.post("/v1/embeddings", {"model": "m", "input": texts, **options})["data"]
    return np.array([entry["embedding"] for entry in data])


def test_embeddings_are_those_of_numpy(served: Served, figures: Figures, numpy_bert: NumpyBert) -> None:
    difference = np.abs(embed(served, list(TEXTS)) - [numpy_bert.embed(text) for text in TEXTS]).max()

    figures.note(f"{len(TEXTS)} texts, against numpy", f"within {difference:.1e}")
    assert difference < CLOSE


def test_a_text_embeds_alone_as_beside_others(served: Served) -> None:
    alone = np.concatenate([embed(served, text) for text in TEXTS])

    assert np.abs(embed(served, list(TEXTS)) - alone).max() < CLOSE


def test_token_ids_embed_as_their_text(served: Served, numpy_bert: NumpyBert) -> None:
    ids = [numpy_bert.ids(text) for text in PROMPTS]

    assert np.abs(embed(served, ids) - embed(served, list(PROMPTS))).max() < CLOSE


def test_base64_has_the_same_numbers(served: Served) -> None:
    body = {"model": "m", "input": list(PROMPTS), "encoding_format": "base64"}
    data = served.post("/v1/embeddings", body)["data"]
    decoded = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in data]

    assert np.abs(np.array(decoded) - embed(served, list(PROMPTS))).max() < 1e-7


def test_ollamas_routes_have_the_same_vectors(served: Served) -> None:
    expected = embed(served, list(PROMPTS))
    many = served.post("/api/embed", {"model": "m", "input": list(PROMPTS)})["embeddings"]
    one = served.post("/api/embeddings", {"model": "m", "prompt": PROMPTS[0]})["embedding"]

    assert np.abs(np.array(many) - expected).max() < CLOSE
    assert np.abs(np.array(one) - expected[0]).max() < CLOSE


def test_a_text_beyond_the_longest_input_is_refused_or_cut_as_numpy_cuts_it(
    served: Served, numpy_bert: NumpyBert
) -> None:
    long = page("memory", 4000)
    refused = served.client.post("/v1/embeddings", json={"model": "m", "input": long})

    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert np.abs(embed(served, long, truncate_prompt_tokens=-1)[0] - numpy_bert.embed(long)).max() < CLOSE


def test_paraphrases_are_nearer_than_other_sentences(served: Served, figures: Figures) -> None:
    texts = ["A cat sleeps on the sofa.", "A kitten is napping on the couch.", "The share price fell by two percent."]
    cat, kitten, share = embed(served, texts)

    figures.note("cosine of a paraphrase, of another sentence", f"{cat @ kitten:.2f}, {cat @ share:.2f}")
    assert cat @ kitten > 0.5 > cat @ share


def test_dimensions_are_refused_as_the_files_declare_none(served: Served) -> None:
    assert served.client.post("/v1/embeddings", json={"model": "m", "input": "a", "dimensions": 64}).status_code == 400


@pytest.mark.soak
def test_questions_find_the_page_that_answers_them(served: Served, figures: Figures) -> None:
    pages = sorted(each.stem for each in DOCS.glob("*.md") if each.stem != "real-weights")
    # The title and the beginning of each page, in pieces that the model can read whole.
    pieces = [(name, f"{page(name, 60).splitlines()[0]}\n{page(name)[at : at + 700]}") for name in pages
              for at in (0, 700, 1400)]  # fmt: skip
    vectors = embed(served, [text for _, text in pieces], truncate_prompt_tokens=-1)
    ranks: list[int] = []
    for vector, wanted in zip(embed(served, list(QUESTIONS)), QUESTIONS.values(), strict=True):
        best = [pieces[at][0] for at in np.argsort(-(vectors @ vector))]
        ranks.append(list(dict.fromkeys(best)).index(wanted) + 1)

    first, third = (sum(rank <= most for rank in ranks) for most in (1, 3))
    figures.note(f"{len(QUESTIONS)} questions over {len(pages)} pages, recall@1", f"{first / len(ranks):.2f}")
    figures.note(f"{len(QUESTIONS)} questions over {len(pages)} pages, recall@3", f"{third / len(ranks):.2f}")
    assert len(QUESTIONS) == 20
    assert first / len(ranks) >= 0.5
    assert third / len(ranks) >= 0.75

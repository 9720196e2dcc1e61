"""Log-probabilities and perplexity of served models, compared with mlx-lm's own forward pass."""

from typing import Any

import pytest

from tests.real.documents import page
from tests.real.figures import Figures
from tests.real.prepare import GEMMA3, SMOLLM2, SMOLLM2_BF16
from tests.real.reference import largest_difference, perplexity, reference
from tests.real.serving import Served

pytestmark = pytest.mark.soak
FOLDERS = {"smollm2": SMOLLM2, "gemma3": GEMMA3}
MODELS = {
    "smollm2": f'path = "{SMOLLM2}"',
    "gemma3": f'path = "{GEMMA3}"',
    "bf16": f'path = "{SMOLLM2_BF16}"\ndtype = "bfloat16"',
    "kv8": f'path = "{SMOLLM2}"\nkv_bits = 8',
    "kv4": f'path = "{SMOLLM2}"\nkv_bits = 4',
}
# Both sides compute in float32 and add in another order.
CLOSE = 1e-4
TEXT = page("architecture", 1800)
# Perplexity with fewer bits ÷ that in float32, at most. A head of 64 numbers has few to share an error.
MOST = {"bf16": 1.01, "kv8": 1.01, "kv4": 1.35}


def scored(served: Served, model: str, text: str = TEXT) -> dict[str, Any]:
    body = {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    return served.post("/v1/completions", body | {"return_token_ids": True})["choices"][0]


def prompt_logprobs(choice: dict[str, Any]) -> list[float]:
    ids = choice["prompt_token_ids"]
    entries = list(zip(ids, choice["prompt_logprobs"], strict=True))[1:]
    return [entry[str(token)]["logprob"] for token, entry in entries]


def test_prompt_logprobs_of_a_page_are_those_of_mlx_lm(served: Served, figures: Figures) -> None:
    choice = scored(served, "smollm2")
    ours, theirs = prompt_logprobs(choice), reference(SMOLLM2).logprobs(choice["prompt_token_ids"])

    assert choice["prompt_token_ids"] == reference(SMOLLM2).encode(TEXT)
    difference = largest_difference(ours, theirs)
    figures.note(f"SmolLM2: `prompt_logprobs` of {len(ours)} tokens", f"within {difference:.1e}")
    figures.note("SmolLM2: perplexity", f"{perplexity(ours):.3f}, mlx-lm {perplexity(theirs):.3f}")
    assert difference < CLOSE
    assert perplexity(ours) == pytest.approx(perplexity(theirs), rel=1e-4)


def test_prompt_logprobs_of_a_page_are_those_of_mlx_lm_with_sliding_windows(served: Served, figures: Figures) -> None:
    choice = scored(served, "gemma3")
    ours, theirs = prompt_logprobs(choice), reference(GEMMA3).logprobs(choice["prompt_token_ids"])

    assert choice["prompt_token_ids"] == reference(GEMMA3).encode(TEXT)
    difference = largest_difference(ours, theirs)
    figures.note(f"Gemma 3: `prompt_logprobs` of {len(ours)} tokens", f"within {difference:.1e}")
    figures.note("Gemma 3: perplexity", f"{perplexity(ours):.3f}, mlx-lm {perplexity(theirs):.3f}")
    assert difference < CLOSE


@pytest.mark.parametrize("model", FOLDERS)
def test_logprobs_of_an_answer_are_those_of_mlx_lm(served: Served, figures: Figures, model: str) -> None:
    body = {"model": model, "prompt": page("tutorial", 400), "max_tokens": 60, "temperature": 0, "logprobs": 1}
    choice = served.post("/v1/completions", body | {"return_token_ids": True})["choices"][0]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    theirs = reference(FOLDERS[model]).logprobs(ids)[len(choice["prompt_token_ids"]) - 1 :]
    ours = choice["logprobs"]["token_logprobs"]

    difference = largest_difference(ours, theirs[: len(ours)])
    figures.note(f"{model}: {len(ours)} generated tokens", f"within {difference:.1e}")
    assert len(ours) == 60
    assert difference < CLOSE


@pytest.mark.parametrize("model", FOLDERS)
def test_a_greedy_answer_is_that_of_mlx_lm(served: Served, model: str) -> None:
    prompt = "The three largest cities of Germany are"
    body = {"model": model, "prompt": prompt, "max_tokens": 40, "temperature": 0}
    theirs = reference(FOLDERS[model])

    text = served.post("/v1/completions", body)["choices"][0]["text"]
    # mlx-lm's detokenizer leaves out the first space.
    assert text.lstrip() == theirs.greedy(theirs.encode(prompt), 40).lstrip()


@pytest.mark.parametrize("model", MOST)
def test_perplexity_with_fewer_bits_is_near_that_in_float32(served: Served, figures: Figures, model: str) -> None:
    exact, fewer = (perplexity(prompt_logprobs(scored(served, name))) for name in ("smollm2", model))

    figures.note(f"SmolLM2, {model}: perplexity", f"{fewer:.3f}, {100 * (fewer / exact - 1):+.1f} % of float32")
    assert fewer / exact < MOST[model]


@pytest.mark.parametrize("model", FOLDERS)
def test_text_offsets_count_the_characters_of_the_echoed_text(served: Served, model: str) -> None:
    prompt = "Rivers run to the sea."
    body = {"model": model, "prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 1, "echo": True}
    choice = served.post("/v1/completions", body)["choices"][0]
    offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]

    assert choice["text"].startswith(prompt)
    visible = [(at, token) for at, token in zip(offsets, tokens, strict=True) if token != "<bos>"]
    assert [choice["text"][at : at + len(token)] for at, token in visible] == [token for _, token in visible]

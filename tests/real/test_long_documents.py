"""Conversations about our own pages over three turns, and facts in long texts, with and without approximations."""

import time
from typing import Any

import pytest

from tests.real.dialects import CHAT
from tests.real.documents import page
from tests.real.figures import Figures
from tests.real.prepare import SMOLLM2
from tests.real.serving import Served

pytestmark = pytest.mark.soak
MODELS = {
    "m": f'path = "{SMOLLM2}"',
    "kv8": f'path = "{SMOLLM2}"\nkv_bits = 8',
    "kv4": f'path = "{SMOLLM2}"\nkv_bits = 4',
    "sparse": f'path = "{SMOLLM2}"\ndraft = "{SMOLLM2}"\nspeculate = "off"\nsparse_prefill = 0.5',
}
KV_OF = {"m": "plain KV", "kv8": "8-bit KV", "kv4": "4-bit KV"}
DOCUMENT = (
    f"This is a page of a manual.\n\n{page('speculation', 5600)}\n\nWhat is this page about? Answer in a sentence."
)
LATER = ("Name one thing that the page warns of.", "Say the same in fewer words.")
FACT = "The secret word of the harbour master is marigold."
QUESTION = "What is the secret word of the harbour master?"
# Where in the text the fact stands.
PLACES = (0.3, 0.7)
# The part of the tokens that a sparse prefill keeps, and the place of the fact. The first and the last five blocks of
# 128 tokens are always kept, so only a longer text has some to choose from.
SPARSE = ((0.5, 0.3), (0.5, 0.7), (0.3, 0.5))
SPARSE_CHARACTERS = 8000


def with_fact(place: float, characters: int = 2800) -> str:
    text = page("monitoring", characters)
    at = text.index("\n", int(len(text) * place))
    return f"{text[:at]}\n{FACT}\n{text[at:]}\n\n{QUESTION} Answer with the sentence of the text."


def turn(served: Served, messages: list[dict[str, str]], salt: str) -> dict[str, Any]:
    body = {"model": "m", "messages": messages, "max_tokens": 24, "temperature": 0, "cache_salt": salt}
    return served.post("/v1/chat/completions", body)


def test_later_turns_about_a_document_compute_only_what_is_new(served: Served, figures: Figures) -> None:
    messages = [{"role": "user", "content": DOCUMENT}]
    shares: list[str] = []
    for later in (*LATER, ""):
        start = time.monotonic()
        answered = turn(served, messages, "turns")
        usage = answered["usage"]
        cached, prompt = usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
        shares.append(f"{cached} of {prompt} in {time.monotonic() - start:.1f} s")
        if len(messages) > 1:
            assert cached > 0.9 * prompt
        messages += [answered["choices"][0]["message"] | {"content": answered["choices"][0]["message"]["content"]}]
        messages += [{"role": "user", "content": later}]
    figures.note("three turns: cached prompt tokens", "; ".join(shares))

    # The last turn again, of which nothing is cached under another salt.
    cold = turn(served, [*messages[:-2]], "cold")
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cold["choices"][0]["message"]["content"] == messages[-2]["content"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("model", KV_OF)
def test_a_fact_in_a_long_text_is_found(served: Served, figures: Figures, model: str, place: float) -> None:
    text = CHAT.whole(served, model, with_fact(place), 24)

    figures.note(f"{KV_OF[model]}: fact at {place:.0%}", "found" if "marigold" in text else "lost")
    # Four bits are too few for a head of 64 numbers: what they cost is written down, not asserted.
    assert "marigold" in text or model == "kv4"


@pytest.mark.parametrize(("keep", "place"), SPARSE)
def test_a_sparse_prefill_answers_from_a_part_of_the_text(
    served: Served, figures: Figures, keep: float, place: float
) -> None:
    start = time.monotonic()
    answered = CHAT.ask(served, "sparse", with_fact(place, SPARSE_CHARACTERS), 24, sparse_prefill={"keep": keep})
    spent = time.monotonic() - start

    text = CHAT.text(answered)
    found = "found" if "marigold" in text else "lost"
    usage = answered["usage"]
    kept, prompt = usage["prompt_tokens_details"]["kept_tokens"], usage["prompt_tokens"]
    figures.note(f"sparse prefill, {kept} of {prompt} tokens: fact at {place:.0%}", f"{found}, {spent:.1f} s")
    assert kept < prompt
    # A model of 135M chooses badly for itself: whether the fact is kept is written down, not asserted.
    assert text.startswith("The secret word of the harbour master")


def test_a_sparse_prefill_of_everything_answers_as_a_whole_one(served: Served) -> None:
    prompt = with_fact(0.5, 1500)

    assert CHAT.whole(served, "sparse", prompt, 24, sparse_prefill={"keep": 1}) == CHAT.whole(served, "m", prompt, 24)

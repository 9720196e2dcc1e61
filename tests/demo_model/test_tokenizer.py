"""The shipped tokenizer, and the recipe that makes it."""

import pytest
from tokenizers import Tokenizer

from deploy.demo_model import tokenizer
from deploy.demo_model.corpus import generate
from tests.support.demo_answers import SHIPPED

# Conversations that the vocabulary is made from: `corpus_samples` of the recipe.
SAMPLES = 30000


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))


@pytest.mark.soak
def test_the_recipe_makes_the_shipped_tokenizer_to_the_byte(bpe: Tokenizer) -> None:
    renderer = tokenizer.Renderer()
    texts = (renderer.conversation(generate.training_sample(generate.SEED, -1, index)) for index in range(SAMPLES))
    assert tokenizer.train(texts).to_str() == bpe.to_str()


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "héllo 🙂 \u4f60\u597d",
        "  two  spaces\n\n\ttab ",
        '{"a": [1, 2.50]}',
        "ALL CAPS getWeather_now",
    ],
)
def test_any_text_comes_back_unchanged(bpe: Tokenizer, text: str) -> None:
    assert bpe.decode(bpe.encode(text).ids, skip_special_tokens=False) == text


def test_digits_and_capitals_stand_alone(bpe: Tokenizer) -> None:
    assert [bpe.decode([token]) for token in bpe.encode("2048").ids] == ["2", "0", "4", "8"]
    assert [bpe.decode([token]) for token in bpe.encode("CAT").ids] == ["C", "A", "T"]


def test_only_the_chatml_tokens_are_special(bpe: Tokenizer) -> None:
    added = bpe.get_added_tokens_decoder().values()
    assert {token.content for token in added if token.special} == set(tokenizer.SPECIAL)
    assert {token.content for token in added if not token.special} == set(tokenizer.MARKS)

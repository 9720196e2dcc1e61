"""Text in slices: the tokens are those of the whole text, wherever it was cut."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.models import tiny_tokenizer
from tests.support.scale import scaled
from worker.model.loader import DEMO_DIR
from worker.prompt.encode import PromptEncoder

CORPUS = ["the cat sat on the mat and a bat, 12 cats ran; it's naïve 日本 text"] * 4
# cl100k's, as most models of today have it in their own variation.
MODERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def modern() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(MODERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    trained(backend, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    made = wrapped(backend)
    at = backend.token_to_id("<s>")
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <s>", special_tokens=[("<s>", at)]
    )
    return made


def llama() -> PreTrainedTokenizerFast:
    """As SentencePiece has it: no pre-tokenizer, spaces as letters, one before the text."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    # Trained on words, so that no piece reaches from one into the next.
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trained(backend, special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))])
    backend.pre_tokenizer = None  # type: ignore[assignment]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return wrapped(backend)


def gemma() -> PreTrainedTokenizerFast:
    made = llama()
    made.backend_tokenizer.normalizer = normalizers.Replace(" ", "▁")
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return made


def unigram() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    )
    return wrapped(backend)


def word_piece() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=80, special_tokens=["[UNK]"], show_progress=False)
    )
    return wrapped(backend)


def trained(backend: Tokenizer, **settings: Any) -> None:
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, show_progress=False, **settings))


def demo() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(DEMO_DIR)


MAKERS: list[Callable[[], Any]] = [demo, tiny_tokenizer, modern, llama, gemma, unigram, word_piece]
TOKENIZERS = {maker.__name__: maker() for maker in MAKERS}

pieces = st.sampled_from(
    [
        "the", "cat", "The", "I", "a", "CATS", "it's", "'s", " ", " ", "  ", "\n", " \n", "\t", "1", "234", ".", ",",
        "-", "é", "e\u0301", "\u0301", "日本", "🙂", "<s>", "<think>", "▁", "\u00a0", "ſ", "\x00",
    ]
)  # fmt: skip
texts = st.lists(pieces, max_size=30).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=scaled(80, 32), deadline=None)
@given(text=texts, size=st.integers(1, 12), add_special_tokens=st.booleans())
def test_the_slices_of_a_text_are_its_tokens(name: str, text: str, size: int, add_special_tokens: bool) -> None:
    encoder = PromptEncoder(TOKENIZERS[name], slice_chars=size)
    parts = encoder.slices(text, add_special_tokens=add_special_tokens)
    whole = encoder.encode(text, add_special_tokens=add_special_tokens)
    assert [token for part in parts for token in part] == whole


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_usual_tokenizer_can_be_cut(name: str) -> None:
    encoder = PromptEncoder(TOKENIZERS[name], slice_chars=20)
    text = "the cat sat on the mat " * 50
    assert max(map(len, encoder.slices(text, add_special_tokens=True))) < 40


def test_a_tokenizer_whose_pieces_reach_over_words_is_never_cut() -> None:
    words = ["<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz", "e▁c"]
    backend = Tokenizer(
        models.BPE({word: at for at, word in enumerate(words)}, [], unk_token="<unk>"),
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    encoder = PromptEncoder(wrapped(backend), slice_chars=4)
    assert len(list(encoder.slices("a cat or a dog", add_special_tokens=False))) == 1


@pytest.mark.parametrize(
    "token", [AddedToken("new york"), AddedToken("word", rstrip=True), AddedToken("word", lstrip=True)]
)
def test_a_tokenizer_with_a_token_that_reaches_over_a_gap_is_never_cut(token: AddedToken) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.add_tokens([token])
    encoder = PromptEncoder(tokenizer, slice_chars=4)
    text = "in new york a word is a word "
    assert list(encoder.slices(text, add_special_tokens=False)) == [encoder.encode(text, add_special_tokens=False)]


def test_a_tokenizer_in_code_is_used_as_it_is() -> None:
    class InCode:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [ord(char) for char in text] + [0] * add_special_tokens

    assert list(PromptEncoder(InCode(), 1).slices("a b", add_special_tokens=True)) == [[97, 32, 98, 0]]

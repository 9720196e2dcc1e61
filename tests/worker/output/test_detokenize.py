"""Detokenizing: token by token gives the tokenizer's own text, and never half a character."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from worker.output.detokenize import Vocabulary

CHARS = "aé日🙂\n ▁👩‍👩‍👧 ẞ\u0301\x00"


@dataclass(frozen=True)
class Kind:
    """One family of tokenizers; `invented` are ids that a model may emit but no text encodes to."""

    tokenizer: PreTrainedTokenizerFast
    vocabulary: Vocabulary
    size: int


def kind(backend: Tokenizer) -> Kind:
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False), AddedToken("naïve café")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", clean_up_tokenization_spaces=False
    )
    return Kind(tokenizer, Vocabulary(tokenizer), backend.get_vocab_size())


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        ["the cat sat on the mat, naïve 日本語 🙂🙂"] * 4,
        trainers.BpeTrainer(
            vocab_size=320, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
        ),
    )
    return made


def byte_level_in_a_sequence() -> Tokenizer:
    made = byte_level()
    made.decoder = decoders.Sequence([decoders.ByteLevel()])
    return made


def pieces() -> dict[str, int]:
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["▁", "▁the", "▁cat", "s", "a", "▁▁", "é", "日", "▁🙂", "</", "tag>", "▁a▁b"]
    return {name: at for at, name in enumerate(names)}


def llama() -> Tokenizer:
    made = Tokenizer(models.BPE(pieces(), [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def gemma() -> Tokenizer:
    made = Tokenizer(models.BPE(pieces(), [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def metaspace() -> Tokenizer:
    words = ["<unk>", "▁", "▁the", "▁cat", "s", "a", "é", "日", "▁🙂", "▁▁"]
    made = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, [], unk_token="<unk>"))
    made.decoder = decoders.Metaspace()
    return made


def word_piece() -> Tokenizer:
    words = ["[UNK]", "the", "cat", "##s", "##é", "日", ",", ".", "'", "n't", "do", "##🙂"]
    made = Tokenizer(models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    return made


MAKERS = [byte_level, byte_level_in_a_sequence, llama, gemma, metaspace, word_piece]
KINDS = {maker.__name__: kind(maker()) for maker in MAKERS}
EXACT = ["byte_level", "byte_level_in_a_sequence", "metaspace"]
WITH_BYTES = ["llama", "gemma"]


def stream(name: str, ids: Sequence[int], context: Sequence[int] = ()) -> str:
    detokenizer = KINDS[name].vocabulary.detokenizer(context)
    return "".join(detokenizer.add(token) for token in ids) + detokenizer.finish()


def visible(name: str, ids: Sequence[int]) -> list[int]:
    return [token for token in ids if token != KINDS[name].tokenizer.eos_token_id]


def whole(name: str, ids: Sequence[int]) -> str:
    return KINDS[name].tokenizer.decode(visible(name, ids), skip_special_tokens=False)


@st.composite
def some_ids(draw: st.DrawFn, names: Sequence[str]) -> tuple[str, list[int]]:
    name = draw(st.sampled_from(names))
    return name, draw(st.lists(st.integers(0, KINDS[name].size - 1), max_size=40))


@given(some_ids(EXACT))
def test_any_ids_give_the_text_of_the_tokenizer_itself(case: tuple[str, list[int]]) -> None:
    name, ids = case
    assert stream(name, ids) == whole(name, ids)


@st.composite
def valid_pieces(draw: st.DrawFn) -> tuple[str, list[int]]:
    """Ids of SentencePiece models whose byte pieces spell whole characters."""
    name, table = draw(st.sampled_from(WITH_BYTES)), pieces()
    plain = st.integers(table["▁"], KINDS[name].size - 1).map(lambda token: [token])
    spelled = st.sampled_from(CHARS).map(lambda char: [table[f"<0x{byte:02X}>"] for byte in char.encode()])
    return name, list(itertools.chain(*draw(st.lists(plain | spelled, max_size=20))))


@given(valid_pieces())
def test_byte_pieces_that_spell_characters_give_the_text_of_the_tokenizer_itself(case: tuple[str, list[int]]) -> None:
    name, ids = case
    assert stream(name, ids) == whole(name, ids)


SPACE, BYTES, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
# Orders of steps in which one sees what others have made of several pieces.
ORDERS = {
    "a strip of each piece": [SPACE, BYTES, decoders.Strip(" ", 1, 0), FUSE],
    "a strip before spaces": [FUSE, decoders.Strip(" ", 1, 0), SPACE],
    "a replacement behind bytes": [SPACE, BYTES, decoders.Replace("é", "e"), FUSE],
}


def ordered(steps: Sequence[decoders.Decoder]) -> Kind:
    backend = llama()
    backend.decoder = decoders.Sequence(list(steps))
    return kind(backend)


ORDERED = {name: ordered(steps) for name, steps in ORDERS.items()}


@given(valid_pieces(), st.sampled_from(sorted(ORDERED)))
def test_the_order_of_a_decoders_steps_is_kept(case: tuple[str, list[int]], order: str) -> None:
    _, ids = case
    made, hidden = ORDERED[order], ORDERED[order].tokenizer.eos_token_id
    detokenizer = made.vocabulary.detokenizer()
    text = "".join(detokenizer.add(token) for token in ids) + detokenizer.finish()
    shown = [token for token in ids if token != hidden]
    assert text == made.tokenizer.decode(shown, skip_special_tokens=False)


@given(some_ids(list(KINDS)))
def test_whatever_a_model_invents_is_text_that_can_be_encoded(case: tuple[str, list[int]]) -> None:
    name, ids = case
    detokenizer = KINDS[name].vocabulary.detokenizer([0])
    for token in [*ids, KINDS[name].size + 1000]:
        detokenizer.add(token).encode()
    detokenizer.finish().encode()


@given(st.text(), st.sampled_from(["byte_level", "llama", "gemma"]))
def test_any_text_comes_back_whole(text: str, name: str) -> None:
    ids = KINDS[name].tokenizer.encode(text, add_special_tokens=False)
    before = KINDS[name].tokenizer.encode("s")
    assert stream(name, ids, context=before) == whole(name, [*before, *ids])[1:]


@given(st.text(alphabet=CHARS, min_size=1))
def test_a_character_leaves_only_when_all_of_it_is_there(text: str) -> None:
    detokenizer = KINDS["byte_level"].vocabulary.detokenizer()
    for token in KINDS["byte_level"].tokenizer.encode(text):
        assert "\ufffd" not in detokenizer.add(token)
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("name", WITH_BYTES)
def test_bytes_that_are_no_character_do_not_change_the_text_before_them(name: str) -> None:
    table = pieces()
    euro = [table["<0xE2>"], table["<0x82>"], table["<0xAC>"]]
    detokenizer = KINDS[name].vocabulary.detokenizer([0])
    texts = [detokenizer.add(token) for token in [*euro, table["<0xFF>"], table["a"]]]
    assert texts == ["", "", "€", "\ufffd", "a"]


@pytest.mark.parametrize("name", ["byte_level", "byte_level_in_a_sequence", *WITH_BYTES])
def test_an_incomplete_character_becomes_the_replacement_character_at_the_end(name: str) -> None:
    vocabulary = KINDS[name].tokenizer.get_vocab()
    first = vocabulary["<0xF0>"] if name in WITH_BYTES else vocabulary["ð"]
    detokenizer = KINDS[name].vocabulary.detokenizer([0])
    assert detokenizer.add(first) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("name", ["llama", "gemma", "metaspace"])
def test_a_continuation_keeps_its_leading_space(name: str) -> None:
    vocabulary = KINDS[name].tokenizer.get_vocab()
    assert stream(name, [vocabulary["▁cat"], vocabulary["s"]], context=[vocabulary["▁the"]]) == " cats"


def test_a_byte_level_continuation_keeps_its_leading_space() -> None:
    the = KINDS["byte_level"].tokenizer.encode("the")
    cat = KINDS["byte_level"].tokenizer.encode(" cat")
    assert stream("byte_level", cat, context=the) == " cat"
    assert stream("byte_level", cat) == " cat"


def test_a_word_piece_continuation_is_joined_as_the_tokenizer_joins_it() -> None:
    table = KINDS["word_piece"].tokenizer.get_vocab()
    ids = [table["cat"], table["##s"], table["the"], table["##🙂"]]
    assert stream("word_piece", ids, context=[table["the"]]) == " cats the🙂"


@pytest.mark.parametrize("name", list(KINDS))
def test_control_tokens_have_no_text_and_other_added_tokens_do(name: str) -> None:
    tokenizer = KINDS[name].tokenizer
    end, think = tokenizer.convert_tokens_to_ids(["<|end|>", "<think>"])
    assert stream(name, [end]) == ""
    assert stream(name, [end, think, end]).strip() == "<think>"


@pytest.mark.parametrize("name", list(KINDS))
def test_ids_beyond_the_table_have_no_text(name: str) -> None:
    size = KINDS[name].size
    assert stream(name, [size, size + 1, 10**6]) == ""
    assert KINDS[name].vocabulary.token_bytes(size + 1) == b""


def test_a_control_token_made_visible_has_text() -> None:
    tokenizer = KINDS["byte_level"].tokenizer
    shown = Vocabulary(tokenizer, visible=frozenset({"<|end|>"})).detokenizer()
    assert shown.add(tokenizer.eos_token_id) == "<|end|>"


@given(st.text(alphabet=CHARS), st.sampled_from(["byte_level", "llama", "gemma"]))
def test_the_bytes_of_tokens_spell_the_text(text: str, name: str) -> None:
    ids = KINDS[name].tokenizer.encode(text, add_special_tokens=False)
    spelled = b"".join(KINDS[name].vocabulary.token_bytes(token) for token in ids)
    expected = text.replace("▁", " ") if name != "byte_level" else text
    assert spelled.decode() == expected


def test_the_bytes_of_a_token_are_those_it_stands_for() -> None:
    table, vocabulary = pieces(), KINDS["llama"].vocabulary
    assert vocabulary.token_bytes(table["<0xE2>"]) == b"\xe2"
    assert vocabulary.token_bytes(table["▁cat"]) == b" cat"
    assert vocabulary.token_bytes(KINDS["llama"].tokenizer.eos_token_id) == b"<|end|>"


@pytest.mark.parametrize("name", ["byte_level", "llama", "gemma"])
@pytest.mark.parametrize("char", ["é", "日", "🦊"])
def test_a_character_that_the_context_has_begun_is_the_first_of_the_text(name: str, char: str) -> None:
    ids = KINDS[name].tokenizer.encode(f"a{char}", add_special_tokens=False)
    bytes_of = KINDS[name].vocabulary.token_bytes
    cuts = [
        at for at in range(1, len(ids)) if b"".join(map(bytes_of, ids[at:])).decode(errors="replace")[0] == "\ufffd"
    ]
    for at in cuts:
        assert stream(name, ids[at:], context=ids[:at]) == char
    if char == "🦊":
        assert cuts


def test_half_a_character_that_cannot_be_one_is_not_waited_for() -> None:
    table = pieces()
    for begun in ("<0xFF>", "<0xC0>", "<0x9F>", "</"):
        context = [table["▁the"], table[begun]]
        assert stream("gemma", [table["▁cat"]], context=context) == " cat"


def test_what_stands_before_a_control_token_is_over() -> None:
    table = pieces()
    end = KINDS["gemma"].tokenizer.eos_token_id
    assert stream("gemma", [table["▁cat"]], context=[table["<0xF0>"], end]) == " cat"

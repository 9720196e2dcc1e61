"""The tokenizer is the one that tokenizer.json describes, whatever class tokenizer_config.json names."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from tests.support.engine import spec
from tests.support.models import build
from worker.model.loader import load, load_described

TEXTS = [
    "In 1234 there were 56 cats and 7890 dogs, 100,000 birds; x = 42 + 1337", "call 555 0199 now",
    "year 2024 2025 2026 1999", "a b c d e", "日本語の文 中文字", "def f(x_1):\n    return x_1 ** 2\n",
] * 20  # fmt: skip
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PROBES = ["In 2024 there were 1234 cats", " 日本語 2024", "def f(x):\n    return 42\n\n", "e\u0301 \u00e9", "x  y"]
DIGITS = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
CLASSES = (
    "GPT2Tokenizer", "GPT2TokenizerFast", "CohereTokenizerFast", "GPTNeoXTokenizerFast", "Qwen2Tokenizer",
    "LlamaTokenizerFast", "CodeLlamaTokenizerFast", "GemmaTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend",
)  # fmt: skip


def describe(folder: Path, pre: Any, **settings: Any) -> Tokenizer:
    """Write a byte-level tokenizer whose vocabulary has merges of several digits; return what its file describes."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = BYTES, decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.pre_tokenizer = pre
    tokenizer.save(str(folder / "tokenizer.json"))
    own = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "unk_token": "<|endoftext|>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def of_text(folder: Path) -> Any:
    return load_described(folder, lambda path, settings: load_tokenizer(path, dict(settings)))


def of_encoder(folder: Path) -> Any:
    def load_any(path: Path, settings: Mapping[str, Any]) -> Any:
        return AutoTokenizer.from_pretrained(path, **settings)

    return load_described(folder, load_any)


@pytest.mark.parametrize("model_type", ["llama", "starcoder2", "qwen3_5", "granite"])
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("open_it", [of_text, of_encoder])
def test_tokens_are_those_of_the_file_whatever_class_is_named(
    tmp_path: Path, name: str, model_type: str, open_it: Callable[[Path], Any]
) -> None:
    described = describe(tmp_path, DIGITS, tokenizer_class=name, chat_template="{{ messages }}")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = open_it(tmp_path)
    for text in PROBES:
        wanted = described.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == wanted
        assert tokenizer.decode(wanted) == described.decode(wanted)
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")
    assert tokenizer.chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    "name", ["T5Tokenizer", "XLMRobertaTokenizer", "AlbertTokenizer", "MarianTokenizer", "ByT5Tokenizer"]
)
@pytest.mark.parametrize("open_it", [of_text, of_encoder])
def test_a_class_for_another_kind_of_file_or_without_one_is_replaced(
    tmp_path: Path, name: str, open_it: Callable[[Path], Any]
) -> None:
    described = describe(tmp_path, DIGITS, tokenizer_class=name)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = open_it(tmp_path)
    for text in PROBES:
        assert tokenizer.encode(text, add_special_tokens=False) == described.encode(text, add_special_tokens=False).ids
    assert tokenizer.eos_token == "<|im_end|>"


def test_a_tokenizer_that_is_read_without_its_class_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    describe(tmp_path, DIGITS, tokenizer_class="GPT2Tokenizer")
    with caplog.at_level(logging.WARNING, "mlxd.worker"):
        of_text(tmp_path)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "mlxd.worker"]
    assert "GPT2Tokenizer" in line
    assert str(tmp_path) in line
    assert "\n" not in line


def test_special_tokens_that_the_class_has_by_default_are_kept(tmp_path: Path) -> None:
    describe(tmp_path, DIGITS)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = of_text(tmp_path)
    assert type(tokenizer._tokenizer).__name__ != "GPT2Tokenizer"
    assert (tokenizer.eos_token, tokenizer.eos_token_ids) == ("<|endoftext|>", {0})


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True}, {"add_prefix_space": True}])
@pytest.mark.parametrize("name", ["GPT2Tokenizer", "PreTrainedTokenizerFast", "LlamaTokenizerFast"])
def test_a_class_that_agrees_with_the_file_is_kept_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, settings: dict[str, bool]
) -> None:
    describe(tmp_path, BYTES, tokenizer_class=name, **settings)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with caplog.at_level(logging.WARNING, "mlxd.worker"):
        of_text(tmp_path)
    assert [record for record in caplog.records if record.name == "mlxd.worker"] == []


def test_special_tokens_around_a_text_and_a_pair_are_those_of_the_file(tmp_path: Path) -> None:
    describe(tmp_path, DIGITS, tokenizer_class="GPT2Tokenizer")
    content = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    content.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", pair="<|im_start|> $A <|im_end|> $B <|im_end|>",
        special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
    )  # fmt: skip
    content.enable_truncation(4)
    content.save(str(tmp_path / "tokenizer.json"))
    content.no_truncation()
    tokenizer = of_encoder(tmp_path)
    assert tokenizer.encode("In 2024") == content.encode("In 2024").ids
    assert tokenizer.encode("In 2024", "a b") == content.encode("In 2024", "a b").ids


def test_a_normalizer_of_the_file_is_neither_dropped_nor_added(tmp_path: Path) -> None:
    for at, (name, normalizer) in enumerate([("GPT2Tokenizer", normalizers.NFKC()), ("Qwen2Tokenizer", None)]):
        describe(tmp_path / str(at), BYTES, tokenizer_class=name)
        content = Tokenizer.from_file(str(tmp_path / str(at) / "tokenizer.json"))
        if normalizer is not None:
            content.normalizer = normalizer
        content.save(str(tmp_path / str(at) / "tokenizer.json"))
        for text in ("\uff21\uff22 e\u0301", "x\u00b2"):
            wanted = content.encode(text, add_special_tokens=False).ids
            assert of_text(tmp_path / str(at)).encode(text, add_special_tokens=False) == wanted


def test_a_model_is_loaded_with_the_tokenizer_of_its_file(tmp_path: Path) -> None:
    folder = build("llama", tmp_path / "model")
    described = describe(folder, DIGITS, tokenizer_class="GPT2Tokenizer")
    tokenizer = load(spec(folder), lambda _stage, _done, _total: None).tokenizer
    assert tokenizer.encode(PROBES[0], add_special_tokens=False) == described.encode(PROBES[0]).ids

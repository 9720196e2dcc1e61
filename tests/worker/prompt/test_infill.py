"""Prompts to fill in the middle, by the tokens of each family's vocabulary."""

from typing import Any

import pytest

from protocol.to_worker import Infill
from worker.errors import RequestInvalid
from worker.prompt.encode import PromptEncoder
from worker.prompt.infill import InfillPrompts

VOCAB = 2000


class Letters:
    """A tokenizer of one token a character, with control tokens."""

    def __init__(self, *tokens: str, bos: bool = False) -> None:
        self.names = dict(enumerate(tokens, 1000))
        self._bos = bos

    def get_vocab(self) -> dict[str, int]:
        return {name: token for token, name in self.names.items()}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [*([1] if self._bos and add_special_tokens else []), *map(ord, text)]


def shown(tokenizer: Letters, prefix: str, infill: Infill) -> str:
    ids = InfillPrompts(tokenizer, PromptEncoder(tokenizer), VOCAB).encode(prefix, infill)
    return "".join("<s>" if token == 1 else tokenizer.names.get(token) or chr(token) for token in ids)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (
            ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
            "<|fim_prefix|>ab<|fim_suffix|>yz<|fim_middle|>m",
        ),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<fim_prefix>ab<fim_suffix>yz<fim_middle>m"),
        (("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"), "▁<PRE>ab▁<SUF>yz▁<MID>m"),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
            "<｜fim▁begin｜>ab<｜fim▁hole｜>yz<｜fim▁end｜>m",
        ),
        (("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"), "<[fim-suffix]>yz<[fim-prefix]>ab<[fim-middle]>m"),
        (("[SUFFIX]", "[PREFIX]"), "[SUFFIX]yz[PREFIX]abm"),
    ],
)
def test_each_family_has_its_tokens_and_their_order(tokens: tuple[str, ...], expected: str) -> None:
    tokenizer = Letters(*tokens)

    assert shown(tokenizer, "ab", Infill("yz", "m")) == expected
    assert set(InfillPrompts(tokenizer, PromptEncoder(tokenizer), VOCAB).stop_ids) == set(tokenizer.names)


def test_other_files_come_first_each_behind_its_name() -> None:
    tokens = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    files = Infill("z", files=(("a.py", "x = 1"),))
    qwen = Letters(*tokens, "<|repo_name|>", "<|file_sep|>", bos=True)

    assert shown(qwen, "a", files) == (
        "<s><|repo_name|>project\n<|file_sep|>a.py\nx = 1\n<|file_sep|>filename\n"
        "<|fim_prefix|>a<|fim_suffix|>z<|fim_middle|>"
    )
    assert shown(Letters(*tokens), "a", files).startswith("\n\n--- snippet ---\n\nx = 1\n<|fim_prefix|>")


def test_a_model_without_such_tokens_says_so() -> None:
    tokenizer: Any = Letters("<|im_start|>", "[PREFIX]")
    with pytest.raises(RequestInvalid, match="no tokens to fill in the middle") as refused:
        shown(tokenizer, "a", Infill("b"))
    assert refused.value.failure.param == "suffix"
    assert InfillPrompts(tokenizer, PromptEncoder(tokenizer), VOCAB).stop_ids == ()


def test_tokens_that_the_tokenizer_knows_and_the_model_does_not_end_nothing_and_make_no_form() -> None:
    form = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    tokenizer = Letters(*form, "<|file_sep|>", "<|fim_pad|>")
    files = Infill("z", files=(("a.py", "x"),))

    without = InfillPrompts(tokenizer, PromptEncoder(tokenizer), 1000 + len(form))
    assert without.stop_ids == (1000, 1001, 1002)
    assert max(without.encode("a", files)) == 1002

    with pytest.raises(RequestInvalid, match="no tokens to fill in the middle"):
        InfillPrompts(tokenizer, PromptEncoder(tokenizer), 1002).encode("a", files)

"""Fill-in-the-middle prompts, with the control tokens that a model was trained on for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from protocol.failures import Code
from protocol.to_worker import Infill
from worker.errors import RequestInvalid
from worker.prompt.encode import PromptEncoder

# Repository name written after `<repo_name>`, for models that have that token.
_REPOSITORY_NAME: Final = "project"
# Separator of files for models without a token for it, the same as in llama.cpp.
_FILE_SEPARATOR: Final = "\n\n--- snippet ---\n\n"


@dataclass(frozen=True, slots=True)
class _Form:
    """Fill-in-the-middle tokens of one family. `order` lists the tokens before the prefix, suffix and middle, in the
    prompt's order.

    `ends` are tokens that end the middle, in addition to the model's own end tokens; `repository` and `file` begin the
    context.
    """

    order: tuple[tuple[str, str], ...]
    ends: tuple[str, ...] = ()
    repository: str = ""
    file: str = ""


def _forms() -> tuple[_Form, ...]:
    prefix, suffix, middle = "prefix", "suffix", "middle"
    return (
        # Tokens of Qwen Coder and CodeGemma.
        _Form(
            (("<|fim_prefix|>", prefix), ("<|fim_suffix|>", suffix), ("<|fim_middle|>", middle)),
            ("<|fim_pad|>", "<|endoftext|>", "<|file_separator|>", "<|cursor|>"),
            "<|repo_name|>",
            "<|file_sep|>",
        ),
        # Tokens of StarCoder and Granite Code.
        _Form(
            (("<fim_prefix>", prefix), ("<fim_suffix>", suffix), ("<fim_middle>", middle)),
            ("<fim_pad>", "<|endoftext|>"),
            "<repo_name>",
            "<file_sep>",
        ),
        # Tokens of Code Llama.
        _Form((("▁<PRE>", prefix), ("▁<SUF>", suffix), ("▁<MID>", middle)), ("▁<EOT>",)),
        # Tokens of DeepSeek Coder.
        _Form(
            (("<｜fim▁begin｜>", prefix), ("<｜fim▁hole｜>", suffix), ("<｜fim▁end｜>", middle)),
            ("<|EOT|>", "<｜end▁of▁sentence｜>"),
        ),
        # Tokens of Seed Coder.
        _Form((("<[fim-suffix]>", suffix), ("<[fim-prefix]>", prefix), ("<[fim-middle]>", middle))),
        # Tokens of Codestral; the middle directly follows the prefix.
        _Form((("[SUFFIX]", suffix), ("[PREFIX]", prefix))),
    )


class InfillPrompts:
    """Fill-in-the-middle prompts of one model. `stop_ids` end the middle; empty for a model without support."""

    def __init__(self, tokenizer: Any, encoder: PromptEncoder, vocab_size: int) -> None:
        self._encoder = encoder
        self._vocabulary: Mapping[str, int] = tokenizer.get_vocab()
        # Number of ids that the model knows; a tokenizer may have more.
        self._vocab_size = vocab_size
        known = (form for form in _forms() if all(self._id(token) is not None for token, _ in form.order))
        self._form = next(known, None)
        form = self._form
        named = () if form is None else (*(token for token, _ in form.order), *form.ends, form.repository, form.file)
        self.stop_ids = tuple(dict.fromkeys(token for token in map(self._id, named) if token is not None))

    def _id(self, name: str) -> int | None:
        token = self._vocabulary.get(name)
        return token if token is not None and token < self._vocab_size else None

    def encode(self, prefix: str, infill: Infill) -> list[int]:
        """Return the tokens before the middle. Raises `RequestInvalid`."""
        if self._form is None:
            message = "this model has no tokens to fill in the middle: its vocabulary knows none that mark a suffix"
            raise RequestInvalid(Code.UNSUPPORTED, message, param="suffix")
        texts = {"prefix": prefix, "suffix": infill.suffix, "middle": infill.middle}
        # The tokenizer's leading special tokens come first.
        ids = self._encoder.encode("", add_special_tokens=True)
        ids += self._context(infill)
        for token, part in self._form.order:
            ids += [self._vocabulary[token], *self._plain(texts[part])]
        return ids + (self._plain(infill.middle) if len(self._form.order) == 2 else [])

    def _context(self, infill: Infill) -> list[int]:
        """Return the tokens of the other files, each after its name."""
        assert self._form is not None
        if not infill.files:
            return []
        repository, file = (self._id(token) for token in (self._form.repository, self._form.file))
        if file is None:
            return self._plain("".join(f"{_FILE_SEPARATOR}{text}" for _, text in infill.files) + "\n")
        ids = [] if repository is None else [repository, *self._plain(f"{_REPOSITORY_NAME}\n")]
        for name, text in infill.files:
            ids += [file, *self._plain(f"{name}\n{text}\n")]
        return [*ids, file, *self._plain("filename\n")]

    def _plain(self, text: str) -> list[int]:
        return self._encoder.encode(text, add_special_tokens=False) if text else []

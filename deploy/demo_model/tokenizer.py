"""Byte-level BPE tokenizer, and the template that renders conversations for it."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import jinja2
import jinja2.sandbox
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from deploy.demo_model.corpus.samples import Sample

VOCABULARY: Final = 2560
SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATE: Final = Path(__file__).with_name("chat_template.jinja")
# Digits are single tokens, so that the model copies and adds numbers digit by digit. Letters of words in capitals are
# single tokens for spelling. Other words include the space before them.
SPLIT: Final = (
    r"\p{N}| ?\p{Lu}(?!\p{Ll})| ?\p{Lu}?\p{Ll}+| ?[\p{L}\p{M}]+| ?[^\s\p{L}\p{N}\p{M}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()  # mlx-lm streams a tokenizer with this decoder in linear time
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(mark, special=True, normalized=False) for mark in SPECIAL]
        + [AddedToken(mark, special=False, normalized=False) for mark in MARKS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=14,
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    shape = json.loads(bpe.to_str())
    for token in shape["added_tokens"]:
        token["special"] = token["content"] in SPECIAL  # the trainer marks all added tokens as special
    return Tokenizer.from_str(json.dumps(shape))


def environment() -> jinja2.Environment:
    """Return a Jinja environment with the settings that transformers uses for chat templates."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    return made


class Renderer:
    """Renderer of conversations with the shipped template."""

    def __init__(self) -> None:
        self._template = environment().from_string(TEMPLATE.read_text())

    def conversation(self, sample: Sample) -> str:
        return self._template.render(messages=sample.messages, tools=sample.tools)

    def prompt(self, sample: Sample) -> str:
        """Return the prompt for which the model must generate the sample's last message."""
        return self._template.render(
            messages=sample.messages[:-1],
            tools=sample.tools,
            enable_thinking=sample.thinking,
            add_generation_prompt=True,
        )


def save(bpe: Tokenizer, folder: Path) -> None:
    """Write the tokenizer's files, in the format that mlx-lm and transformers load."""
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())

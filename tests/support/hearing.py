"""Folders of tiny models that hear: a processor's files, a template, random weights."""

import json
from pathlib import Path
from typing import Any, Final

from tests.support import processors, vision_models
from tests.support.small_towers import small_towers

# Each with a tower, or a projection, of its own.
FAMILIES: Final = ("gemma3n", "gemma4", "gemma4_unified")
_VOCAB: Final = 2600
_MARKS: Final = {
    "gemma3n": ("<image_soft_token>", "<audio_soft_token>"),
    "gemma4": ("<|image|>", "<|audio|>"),
    "gemma4_unified": ("<|image|>", "<|audio|>"),
}


def build(family: str, folder: Path) -> Path:
    placeholders = processors.build(family, folder)
    tokens = {token: number for number, token in enumerate(processors.FAMILIES[family][0], start=2560)}
    changes: dict[str, dict[str, Any]] = {
        "": {"vocab_size": _VOCAB, **{f"{kind}_token_id": number for kind, number in placeholders.items()}},
        "text_config": {"vocab_size": _VOCAB},
    }
    if family == "gemma3n":
        changes[""] |= {"eoi_token_id": tokens["<end_of_image>"], "eoa_token_id": tokens["<end_of_audio>"]}
        changes["text_config"]["vocab_size_per_layer_input"] = 2560
        changes["vision_config"] = {"vocab_offset": 2560, "vocab_size": 2}
        changes["audio_config"] = {"vocab_offset": 2562, "vocab_size": _VOCAB - 2562}
    elif "vocab_size_per_layer_input" in vision_models.FAMILIES[family]["text_config"]:
        changes["text_config"]["vocab_size_per_layer_input"] = _VOCAB
    with small_towers():
        vision_models.build(family, folder, changes=changes)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer["chat_template"] = _template(*_MARKS[family])
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


def _template(image: str, audio: str) -> str:
    """Parts of each message in their order."""
    return (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
        f"{{% if part.type == 'text' %}}{{{{ part.text }}}}{{% elif part.type == 'audio' %}}{audio}"
        f"{{% else %}}{image}{{% endif %}}"
        "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )

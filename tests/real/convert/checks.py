"""Checks of a converted language model: a wrong layer, norm, position or merge makes nonsense of a known text."""

from pathlib import Path
from typing import Any, Final

import mlx.core as mx

TEXT: Final = (
    "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is named after the "
    "engineer Gustave Eiffel, whose company designed and built the tower from 1887 to 1889."
)

# A text with what tokenizers get wrong: digits, quotes, lines, spaces, accents, and signs that are in no vocabulary.
_ODD_TEXT: Final = 'In 1889, Gustave\'s "tower"\n\n  was naïve: 漢字 🙂!'


def expect(truth: bool, message: str) -> None:
    if not truth:
        raise SystemExit(f"check failed: {message}")


def check_tokenizer(out: Path, *, begins: str | None = None, pieces: dict[str, list[str]] | None = None) -> None:
    """A text comes back unchanged, begins with what it should, and is cut where it should be."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer.encode(_ODD_TEXT)
    if begins is not None:
        expect(tokenizer.convert_ids_to_tokens(ids[0]) == begins, f"{out.name}: a text does not begin with {begins}")
        ids = ids[1:]
    back = tokenizer.decode(ids)
    expect(back == _ODD_TEXT, f"{out.name}: {_ODD_TEXT!r} comes back as {back!r}")
    for word, expected in (pieces or {}).items():
        got = tokenizer.tokenize(word)
        expect(got == expected, f"{out.name}: {word!r} is cut into {got}")


def check_text(out: Path, *, most: float) -> None:
    """The nats a token of a known text are at most `most`."""
    from mlx import nn
    from mlx_lm import load

    model, tokenizer = load(str(out))[:2]
    ids = mx.array([tokenizer.encode(TEXT)])
    logits = model(ids[:, :-1]).astype(mx.float32)
    nats = float(nn.losses.cross_entropy(logits, ids[:, 1:]).mean())
    print(f"{out.name}: {nats:.3f} nats a token over {ids.size} tokens", flush=True)
    expect(nats <= most, f"{out.name}: {nats:.3f} nats a token of a text, at most {most} were expected")


def _generate(out: Path, prompt: Any, tokens: int) -> str:
    from mlx_lm import generate, load

    model, tokenizer = load(str(out))[:2]
    ids = prompt if isinstance(prompt, str) else tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
    return generate(model, tokenizer, ids, max_tokens=tokens)


def check_continuation(out: Path, prompt: str, word: str) -> None:
    text = _generate(out, prompt, 12)
    print(f"{out.name}: {prompt} | {text!r}", flush=True)
    expect(word in text, f"{out.name}: {prompt!r} goes on with {text!r}, without {word}")


def check_chat(out: Path, question: str, word: str) -> None:
    text = _generate(out, [{"role": "user", "content": question}], 24)
    print(f"{out.name}: {question} | {text!r}", flush=True)
    expect(word in text, f"{out.name}: {question!r} is answered with {text!r}, without {word}")

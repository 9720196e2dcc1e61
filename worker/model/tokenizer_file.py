"""Tokenizer that tokenizer.json describes, whatever class tokenizer_config.json names.

transformers 5 builds normalizer and pre-tokenizer of some classes itself and takes only the vocabulary from
tokenizer.json, so that digits, spaces or accents become other tokens than in training.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer
from transformers import PreTrainedConfig

from protocol.checkpoint import file_json
from protocol.failures import Code
from worker.errors import LoadFailed, foreign_code
from worker.model.checkpoint_view import checkpoint_view

log = logging.getLogger("mlxd.worker")

_DESCRIPTION: Final = "tokenizer.json"
_CONFIG: Final = "tokenizer_config.json"
# The class of transformers that uses tokenizer.json as it is, and the key that names a class.
_PLAIN_CLASS: Final = {"tokenizer_class": "PreTrainedTokenizerFast"}
# Text that normalizers and pre-tokenizers treat differently. It begins with a space, because whether one is put before
# a text may be set in tokenizer_config.json.
_SAMPLE: Final = (
    " In 2024 there were 1234 cats, 100,000 birds and 3.14e-10 fish; it's We're don't STOP ifThen  two   three\ttab"
    " na\u00efve na\u0131\u0308ve e\u0301 \ufb01ne \uff21\uff22\uff11 \u00bd x\u00b2 \u65e5\u672c\u8a9e\u306e\u6587"
    " \u4e2d\u6587\u5b57 \ud55c\uad6d\uc5b4 \u0440\u0443\u0441 \u0639\u0631\u0628\u064a \U0001f642 \u200bzero\u00a0wide"
    "\ndef f(x_1, y2):\n    return x_1 ** 2 != y2[0]  # 42\n\n\n\tfor(int i=0;i<10;++i){a[i]+=0xFF;}\r\n <html> end"
)
_WITHOUT_SPACE: Final = "In 2024 it began"
# Settings by which tokenizer_config.json changes on purpose what tokenizer.json describes.
_PREFIX_KEYS: Final = frozenset({"add_prefix_space", "legacy"})
_SPECIAL_KEYS: Final = frozenset({"add_bos_token", "add_eos_token"})
_LISTED_TOKENS: Final = 6


class _Differs(Exception):
    """Raised for a tokenizer that is not the described one; the text is the difference."""


def load_described(folder: Path, load: Callable[[Path, Mapping[str, Any]], Any]) -> Any:
    """Load the tokenizer of a folder with `load`, in the class that it names or else without a class of its own.

    `load` gets a folder and arguments for transformers' AutoTokenizer, and returns its tokenizer or mlx-lm's wrapper of
    it. Raises `LoadFailed`, and the errors of `load`.
    """
    settings = _settings(folder)
    if not (folder / _DESCRIPTION).exists() or "auto_map" in settings:  # code in the checkpoint is allowed or refused
        return load(folder, {})
    described = Tokenizer.from_file(str(folder / _DESCRIPTION))
    described.no_truncation()
    described.no_padding()
    named: Any = None
    try:
        with foreign_code(lambda error: _Differs(f"{type(error).__name__}: {error}"), _Differs):
            named = load(folder, {})
            return _checked(named, described, settings)
    except _Differs as difference:
        if named is None and not settings:  # no class is named that could be replaced
            return load(folder, {})
        specials = _special_tokens(named, described) if named is not None else {}
        changed = {**settings, **specials, **_PLAIN_CLASS}
        with checkpoint_view(folder, {_CONFIG: changed}) as view:
            # Some types of models have a class of tokenizers whatever tokenizer_config.json names, but not this one.
            tokenizer = load(view, {"config": PreTrainedConfig()})
        name = settings.get("tokenizer_class") or type(named).__name__
        try:
            _checked(tokenizer, described, settings)
        except _Differs as other:
            if named is not None and str(other) == str(difference):
                return named  # transformers mends some files on purpose, in every class
            message = f"{folder}: neither {name} nor the plain class reads its {_DESCRIPTION}: {difference}"
            raise LoadFailed(Code.MODEL_UNSUPPORTED, message) from difference
        log.warning("%s: %s differs from %s, which is used as it is: %s", folder, name, _DESCRIPTION, difference)
        return tokenizer


def _special_tokens(tokenizer: Any, described: Tokenizer) -> dict[str, str]:
    """Return the special tokens of a tokenizer by their names, such as `eos_token`; some are defaults of its class."""
    tokens = tokenizer.special_tokens_map.items()
    return {key: text for key, text in tokens if isinstance(text, str) and described.token_to_id(text) is not None}


def _settings(folder: Path) -> dict[str, Any]:
    try:
        content = file_json(folder / _CONFIG)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _checked(tokenizer: Any, described: Tokenizer, settings: Mapping[str, Any]) -> Any:
    """Return the tokenizer. Raises `_Differs` if it gives other tokens or texts than the described one.

    A class without a backend has its vocabulary from elsewhere.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None) or tokenizer
    samples = [_SAMPLE] if _PREFIX_KEYS & settings.keys() else [_SAMPLE, _WITHOUT_SPACE]
    for sample in samples:
        wanted = described.encode(sample, add_special_tokens=False).ids
        _compare(described, tokenizer.encode(sample, add_special_tokens=False), wanted)
        if backend.decode(wanted, skip_special_tokens=False) != described.decode(wanted, skip_special_tokens=False):
            raise _Differs("its tokens become another text")
    if not _SPECIAL_KEYS & settings.keys():
        _compare(described, tokenizer.encode(samples[0]), described.encode(samples[0]).ids)
        _compare(described, tokenizer.encode(samples[0], samples[-1]), described.encode(samples[0], samples[-1]).ids)
    return tokenizer


def _compare(described: Tokenizer, ids: list[int], wanted: list[int]) -> None:
    if list(ids) == wanted:
        return
    at = next((at for at, (a, b) in enumerate(zip(ids, wanted, strict=False)) if a != b), min(len(ids), len(wanted)))
    ours, theirs = ([described.id_to_token(id) for id in each[at : at + _LISTED_TOKENS]] for each in (ids, wanted))
    raise _Differs(f"{ours} instead of {theirs}")

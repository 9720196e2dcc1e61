"""Forms of this daemon's models: by them peers know whether a model here and one there give the same tokens."""

import asyncio
import time
from collections.abc import Iterable
from typing import Final

from gateway.config.settings import ModelConfig
from gateway.model_files.served_form import FormReader

# Between two looks at the files.
LOOK_S: Final = 10.0


class Forms:
    """The forms as of the newest look. Owned by the fleet."""

    def __init__(self) -> None:
        self._reader = FormReader()
        self._known: dict[str, str] = {}
        self._looked_at = float("-inf")
        self._models: tuple[ModelConfig, ...] = ()

    def known(self, model: ModelConfig) -> str:
        """Empty while it is not known, and for a model that is not on this machine."""
        return self._known.get(model.name, "")

    async def refresh(self, models: Iterable[ModelConfig]) -> None:
        """Look at the files of these models, unless that was done a moment ago."""
        wanted, now = tuple(models), time.monotonic()
        if wanted == self._models and now - self._looked_at < LOOK_S:
            return
        self._models, self._looked_at = wanted, now
        self._known = await asyncio.to_thread(self._read, wanted)

    def _read(self, models: tuple[ModelConfig, ...]) -> dict[str, str]:
        return {model.name: self._reader.read(model.path, _settings(model)) for model in models}


def _settings(model: ModelConfig) -> tuple[str, ...]:
    """Settings on which the tokens and the events of an answer depend."""
    code = "code" if model.trust_remote_code else ""
    kv = (f"kv_bits {model.kv_bits}",) if model.kv_bits else ()
    return (model.dtype, model.parser, model.chat_template, code, *kv)

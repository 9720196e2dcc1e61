"""Forms of this daemon's models. Two models with the same form generate the same tokens, even on different daemons."""

import asyncio
import time
from collections.abc import Iterable
from typing import Final

from gateway.config.settings import ModelConfig
from gateway.model_files.served_form import FormReader

REFRESH_INTERVAL_S: Final = 10.0


class Forms:
    """Forms (digests) of this daemon's models as of the newest refresh. The fleet owns them."""

    def __init__(self) -> None:
        self._reader = FormReader()
        self._known: dict[str, str] = {}
        self._refreshed_at = float("-inf")
        self._models: tuple[ModelConfig, ...] = ()

    def known(self, model: ModelConfig) -> str:
        """Return the form of a model; empty if it is not known yet, or if the model is not on this machine."""
        return self._known.get(model.name, "")

    async def refresh(self, models: Iterable[ModelConfig]) -> None:
        """Read the files of these models, unless they were read recently."""
        current, now = tuple(models), time.monotonic()
        if current == self._models and now - self._refreshed_at < REFRESH_INTERVAL_S:
            return
        self._models, self._refreshed_at = current, now
        self._known = await asyncio.to_thread(self._read, current)

    def _read(self, models: tuple[ModelConfig, ...]) -> dict[str, str]:
        return {model.name: self._reader.read(model.path, _settings(model)) for model in models}


def _settings(model: ModelConfig) -> tuple[str, ...]:
    """Return the settings that affect the tokens or the events of a response."""
    code = "code" if model.trust_remote_code else ""
    kv = (f"kv_bits {model.kv_bits}",) if model.kv_bits else ()
    return (model.dtype, model.parser, model.chat_template, code, *kv)

"""Chooser of the prompt tokens to keep: the smaller model reads one prompt at a time, within the time limit of a
tick."""

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from protocol.stats import Stats
from worker.sparse.importance import ImportanceReader, PromptReading
from worker.sparse.selected_tokens import SelectedTokens, choose

# Maximum number of cached choices, which serve requests with several answers and repeated requests.
_MAX_CACHED_CHOICES: Final = 64

_Key = tuple[bytes, float, str]


@dataclass(slots=True)
class _CurrentPrompt:
    """Prompt that the smaller model currently reads; `rid` is the first request that needs it."""

    rid: int
    key: _Key
    reading: PromptReading
    nbytes: int


class Chooser:
    """Chooser owned by the engine thread. `kept` requests the choice for a prompt, `step` continues reading."""

    def __init__(self, reader: ImportanceReader, stream: Any) -> None:
        self._reader = reader
        self._stream = stream
        self._current: _CurrentPrompt | None = None
        self._known: OrderedDict[_Key, SelectedTokens] = OrderedDict()
        self.counts = Stats()

    @property
    def is_busy(self) -> bool:
        return self._current is not None

    @property
    def nbytes(self) -> int:
        """Bytes of KV that the current prompt takes once it is read completely."""
        return self._current.nbytes if self._current is not None else 0

    def needs(self, tokens: int) -> int:
        """Return the bytes of KV for reading the current prompt, or a prompt of `tokens` tokens if there is none."""
        return self.nbytes or self._reader.nbytes(tokens)

    def longest(self, budget: int) -> int:
        """Return the length of the longest prompt that can be read within `budget` bytes."""
        return budget // self._reader.token_bytes

    def kept(self, rid: int, prompt: npt.NDArray[np.int32], part: float, salt: str) -> SelectedTokens | None:
        """Return the tokens of a prompt to keep; None while they are being chosen, or while another prompt is read.

        Choices are cached separately for each salt, so that timing reveals nothing about other prompts.
        """
        if self._current is not None:
            return None
        key = hashlib.blake2b(prompt.tobytes()).digest(), part, salt
        kept = self._known.get(key)
        if kept is not None:
            self._known.move_to_end(key)
            self._count(len(prompt), kept)
        else:
            with mx.stream(self._stream):
                self._current = _CurrentPrompt(rid, key, self._reader.read(prompt), self._reader.nbytes(len(prompt)))
        return kept

    def step(self, limit_s: float) -> None:
        """Continue reading for about `limit_s` seconds, with at least one forward pass."""
        began = now = time.perf_counter()
        with mx.stream(self._stream):
            while self._current is not None:
                self._current.reading.step()
                if self._current.reading.is_complete:
                    self._learn(self._current)
                    self._current = None
                before, now = now, time.perf_counter()
                if 2 * now - before - began > limit_s:  # the next pass would probably exceed the limit
                    break
        self.counts.sparse_read_s += now - began

    def forget(self, rid: int) -> None:
        """Stop reading for a request that is no longer waiting."""
        if self._current is not None and self._current.rid == rid:
            self._current = None

    def drop(self) -> int | None:
        """Cancel the reading; return the rid of its request, if any."""
        current, self._current = self._current, None
        return current.rid if current is not None else None

    def _learn(self, current: _CurrentPrompt) -> None:
        self._known[current.key] = choose(current.reading.importance, current.key[1])
        while len(self._known) > _MAX_CACHED_CHOICES:
            self._known.popitem(last=False)

    def _count(self, tokens: int, kept: SelectedTokens) -> None:
        self.counts.sparse_prompts += 1
        self.counts.sparse_prompt_tokens += tokens
        self.counts.sparse_kept_tokens += kept.count

"""Recent prompts of one model, kept in memory to explain why a prompt did not come from the prefix cache.

The prompts are bounded in number and size, are never written anywhere, and are only kept while there is a prefix cache,
which holds the same tokens.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from msgspec import structs

from protocol.prompts import ChatPrompt, NextTurnPrompt, Prompt
from worker.engine.row import Row, RowStats, Thinking
from worker.prefix_cache.radix_tree import Tokens

MAX_PROMPTS: Final = 256
MAX_BYTES: Final = 16 << 20
# Approximate size of a message's objects beside its text.
_MESSAGE_BYTES: Final = 1024
# Size of a token in a list of the output.
_OUTPUT_BYTES: Final = 36


@dataclass(frozen=True, slots=True, eq=False)
class RecentPrompt:
    """Prompt of a row, with the parts of the row that the engine goes on changing: `output`, `stats` and `thinking`.

    `keys` are the prompt's keys in the prefix cache, and `prompt_bytes` is the approximate size without the output.
    """

    rid: int
    prompt: Prompt
    keys: Tokens
    salt: str
    adapter: str
    left_out: tuple[int, int]
    is_sparse: bool
    output: list[int]
    stats: RowStats
    thinking: Thinking
    prompt_bytes: int

    def text(self) -> Tokens:
        """Return the keys of the prompt and of the output so far."""
        return np.concatenate((self.keys, np.array(self.output, dtype=np.int32)))


class RecentPrompts:
    """The newest prompts, oldest first. The intake's thread adds them, and another thread reads them."""

    def __init__(self, max_prompts: int = MAX_PROMPTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_prompts = max_prompts
        self._max_bytes = max_bytes
        self._prompts: deque[RecentPrompt] = deque()
        # Outputs of the prompts, which grow while their rows run, and the size of everything else.
        self._outputs: deque[list[int]] = deque()
        self._prompt_bytes = 0
        # Whether there is a prefix cache. Without it prompts are not kept.
        self.is_on: Callable[[], bool] = lambda: True

    def add(self, row: Row, prompt: Prompt, characters: int) -> None:
        """Add a new row with a prompt of about this many characters, and drop the oldest prompts beyond the limits.

        Prompts of next turns are not kept, because no client has sent them.
        """
        if not self.is_on() or isinstance(prompt, NextTurnPrompt):
            return
        keys = row.keys()[: len(row.prompt)]
        size = keys.nbytes + characters
        if isinstance(prompt, ChatPrompt):
            size += _MESSAGE_BYTES * (len(prompt.messages) + len(prompt.tools))
            media = tuple(structs.replace(medium, data=b"") for medium in prompt.media)
            prompt = structs.replace(prompt, media=media)
        adapter = row.adapter.name if row.adapter is not None else ""
        own = row.output, row.stats, row.thinking
        self._prompts.append(
            RecentPrompt(
                row.rid, prompt, keys, row.cache_salt, adapter, row.left_out, bool(row.keep), *own, prompt_bytes=size
            )
        )
        self._outputs.append(row.output)
        self._prompt_bytes += size
        while len(self._prompts) > self._max_prompts or (self._prompts and self.nbytes > self._max_bytes):
            self._prompt_bytes -= self._prompts.popleft().prompt_bytes
            self._outputs.popleft()

    @property
    def nbytes(self) -> int:
        return self._prompt_bytes + _OUTPUT_BYTES * sum(map(len, self._outputs))

    def until(self, rid: int) -> list[RecentPrompt]:
        """Return the prompt of this request after those that arrived before it, or [] if it is not known any more."""
        prompts = list(self._prompts)
        for at in range(len(prompts) - 1, -1, -1):
            if prompts[at].rid == rid:
                return prompts[: at + 1]
        return []

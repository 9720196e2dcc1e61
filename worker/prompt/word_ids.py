"""Token ids of the texts in sampling parameters."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from protocol.to_worker import Sampling
from worker.output.detokenize import Vocabulary
from worker.prompt.encode import PromptEncoder
from worker.sampling.penalties import NO_WORDS, BadWords

# Maximum number of cached sets of DRY sequence breakers.
_MAX_CACHED_BREAKERS: Final = 8


class WordIds:
    """Token ids of texts for one model. Owned by the thread that encodes prompts."""

    def __init__(self, encoder: PromptEncoder, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._encoder = encoder
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        # Text of each token; the first request with breakers fills it.
        self._texts: list[bytes] = []
        self._breakers = lru_cache(maxsize=_MAX_CACHED_BREAKERS)(self._find_breakers)

    def of(self, sampling: Sampling) -> BadWords:
        breakers = self._breakers(sampling.dry_breakers) if sampling.dry_multiplier > 0 else ()
        if not sampling.bad_words and not breakers and not sampling.bias_texts:
            return NO_WORDS
        bias = [(token, value) for text, value in sampling.bias_texts for token in self._ids(text)]
        bad = dict.fromkeys(ids for word in sampling.bad_words for ids in self._forms(word))
        return BadWords(tuple(bad), breakers, tuple(bias))

    def _forms(self, word: str) -> Iterator[tuple[int, ...]]:
        """Yield a word's ids at the beginning of a text, and after a space."""
        for text in (word, f" {word.lstrip()}"):
            if ids := self._ids(text):
                yield ids

    def _ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text; () if the model has no logits for one of its tokens."""
        ids = tuple(self._encoder.encode(text, add_special_tokens=False))
        return ids if ids and max(ids) < self._vocab_size else ()

    def _find_breakers(self, texts: tuple[str, ...]) -> tuple[int, ...]:
        if not self._texts:
            self._texts = [self._vocabulary.token_bytes(token) for token in range(self._vocab_size)]
        wanted = [text.encode() for text in texts if text]
        return tuple(token for token, own in enumerate(self._texts) if any(text in own for text in wanted))

"""Encoder of text to token ids that does not block the step loop's thread through the GIL.

Token ids of a request's other texts: those in sampling parameters, and its prediction.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

from protocol.to_worker import Generate, Sampling
from worker.output.detokenize import Vocabulary
from worker.sampling.penalties import NO_WORDS, BadWords
from worker.speculation.draft_state import UNLIMITED_DRAFT_TOKENS, Drafting
from worker.speculation.text_sources import BREAK

# Maximum number of characters per token of the context; longer text hardly ever fits the context.
MAX_CHARS_PER_TOKEN: Final = 8
# Maximum number of characters encoded at once: encoding takes about 200 times the memory of the text.
_SLICE_CHARS: Final = 64 * 1024
# Matches a place where text may be cut: a space between two words of ASCII letters, which every pre-tokenizer
# separates.
_GAP: Final = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_NORMAL_GAP: Final = re.compile(r"(?<=[A-Za-z])[ ▁](?=[A-Za-z])")
_CROSSING: Final = re.compile(r"[A-Za-z][ ▁Ġ]")
# Sample text with the combinations of words, numbers, spaces and punctuation that pre-tokenizers treat differently.
_PROBE: Final = (
    "The cat sat on a MAT and it's We're  done x  y\tz Then AB c De fG 12 a 345 b6 c , d. e! f\n g\n\nh (i j) k"
    " naïve é日本 l 🙂 m don't STOP ifThen else_ n I am po\u0301p <q r> s\n"
)


class PromptEncoder:
    """Encoder of text for one tokenizer. Its calls may take long, so only threads that can wait use it.

    It uses the batch call of the `tokenizers` backend, if there is one, because that call releases the GIL. Through
    transformers, 300 kB of text took four times as long and blocked the step loop for 40 ms at a time.
    """

    def __init__(self, tokenizer: Any, slice_chars: int = _SLICE_CHARS) -> None:
        self._tokenizer = tokenizer
        self._slice_chars = slice_chars
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            # Truncation and padding are turned off once: changing them later fails while another thread encodes or
            # decodes.
            self._backend.no_truncation()
            self._backend.no_padding()
        # Number of characters that the next slice omits at a cut; None if text cannot be cut.
        self._skip = self._find_skip()

    @property
    def opening(self) -> int:
        """Return the number of special tokens before each text."""
        around = self._around()
        return len(around[0]) if around is not None else 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._backend is None:
            return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=add_special_tokens)]
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def slices(self, text: str, *, add_special_tokens: bool) -> Iterator[list[int]]:
        """Yield the ids of `encode` in parts, or in one part if the tokenizer does not separate words."""
        around = self._around() if add_special_tokens else ([], [])
        if self._skip is None or around is None or len(text) <= self._slice_chars:
            yield self.encode(text, add_special_tokens=add_special_tokens)
            return
        yield around[0]
        at = 0
        while (gap := _GAP.search(text, at + self._slice_chars)) is not None:
            yield self.encode(text[at : gap.start()], add_special_tokens=False)
            at = gap.start() + self._skip
        yield self.encode(text[at:], add_special_tokens=False)
        yield around[1]

    def _around(self) -> tuple[list[int], list[int]] | None:
        """Return the special tokens before and after a text; None if they cannot be determined."""
        plain = self.encode("a", add_special_tokens=False)
        whole = self.encode("a", add_special_tokens=True)
        for at in range(len(whole) - len(plain) + 1):
            if whole[at : at + len(plain)] == plain:
                return whole[:at], whole[at + len(plain) :]
        return None

    def _find_skip(self) -> int | None:
        """Return the number of characters to omit at a cut; None if text cannot be cut.

        Text can be cut at a gap if no token crosses the gap, and if the rest has the same tokens when encoded alone.
        """
        if self._backend is None or not self._keeps_gaps():
            return None
        whole = self.encode(_PROBE, add_special_tokens=False)
        cuts = [gap.start() for gap in _GAP.finditer(_PROBE)]
        for skip in (0, 1):
            if all(self._joined(_PROBE[:at], _PROBE[at + skip :]) == whole for at in cuts):
                return skip
        return None

    def _joined(self, *parts: str) -> list[int]:
        return [token for part in parts for token in self.encode(part, add_special_tokens=False)]

    def _keeps_gaps(self) -> bool:
        """Return whether no token crosses a gap, because the pre-tokenizer splits there or the vocabulary has no token
        with a gap."""
        backend = self._backend
        if any(_reaches(token) for token in backend.get_added_tokens_decoder().values()):
            return False
        text = backend.normalizer.normalize_str(_PROBE) if backend.normalizer is not None else _PROBE
        gaps = [gap.start() for gap in _NORMAL_GAP.finditer(text)]
        if len(gaps) < len(_GAP.findall(_PROBE)):
            return False
        if backend.pre_tokenizer is not None:
            spans: Sequence[tuple[int, int]] = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
            if not any(begin < gap < end for gap in gaps for begin, end in spans):
                return True
        if type(backend.model).__name__ not in ("BPE", "Unigram"):
            return False
        return not any(map(_CROSSING.search, backend.get_vocab(with_added_tokens=False)))


def _reaches(token: Any) -> bool:
    """Return whether an added token may contain a gap, or absorb an adjacent gap."""
    text: str = token.content
    at_edge = (token.rstrip and text[-1:].isalpha()) or (token.lstrip and text[:1].isalpha())
    return bool(at_edge or _GAP.search(text) or _NORMAL_GAP.search(text))


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

    def drafting(self, request: Generate, context: int, *, is_sparse: bool) -> Drafting:
        """Return the drafting options of a request; a prediction is cut to the length of the context."""
        most = UNLIMITED_DRAFT_TOKENS if request.most_drafted is None else request.most_drafted
        text = request.prediction[: context * MAX_CHARS_PER_TOKEN] if most else ""
        ids = self._encoder.encode(text, add_special_tokens=False)[:context] if text else []
        # A tokenizer may have more tokens than the model: no draft may contain such tokens, nor continue after them.
        known = tuple(token if token < self._vocab_size else BREAK for token in ids)
        # The draft model would need the KV of tokens that sparse prefill skips.
        return Drafting(most, known, request.cache_salt, by_model=not is_sparse)

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

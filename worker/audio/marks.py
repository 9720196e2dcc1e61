"""Control tokens that clients write in texts. A model family's library would encode them as tokens, not as text."""

import re
import unicodedata
from typing import Any, Final

# Matches punctuation. An added token of letters and spaces only is ordinary text.
_PUNCTUATION: Final = re.compile(r"[^\w\s]")


class AddedTokens:
    """Added tokens of a tokenizer; unlike the tokenizer, usable from any thread. Empty without a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        texts = sorted(
            {str(each.content) for each in added if _PUNCTUATION.search(str(each.content))}, key=len, reverse=True
        )
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None

    def first(self, text: str) -> str:
        """Return the first control token in a text, before or after Unicode normalization; "" if there is none."""
        if self._pattern is None:
            return ""
        match = self._pattern.search(text) or self._pattern.search(unicodedata.normalize("NFKC", text))
        return match.group() if match is not None else ""

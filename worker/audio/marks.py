"""Control tokens in texts of clients: a family's library would encode them as what they are for the model."""

import re
import unicodedata
from typing import Any, Final

# Added tokens of letters and spaces alone are text.
_SIGN: Final = re.compile(r"[^\w\s]")


class AddedTokens:
    """Added tokens of a tokenizer, for any thread: the tokenizer itself is the loop's. None for no tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        texts = sorted({str(each.content) for each in added if _SIGN.search(str(each.content))}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None

    def first(self, text: str) -> str:
        """The first control token in a text, as it is or as a tokenizer may normalise it; empty for none."""
        if self._pattern is None:
            return ""
        match = self._pattern.search(text) or self._pattern.search(unicodedata.normalize("NFKC", text))
        return match.group() if match is not None else ""

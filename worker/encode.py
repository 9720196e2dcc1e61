"""Text to token ids, without stopping the step loop."""

from typing import Any


class Encoder:
    """One tokenizer, used by one thread.

    Where there is a `tokenizers` backend its batch call is used, which gives up the GIL while it works. By way of
    transformers, 300 kB of text cost four times as long and kept the step loop from running for 40 ms at a time.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            # Once and for all: changing them later fails while another thread decodes.
            self._backend.no_truncation()
            self._backend.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._backend is None:
            return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=add_special_tokens)]
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

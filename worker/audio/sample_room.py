"""Room for samples of clips that wait for their turn, so that the intake decodes no more than memory holds."""

import threading
from typing import Final

# An hour of a clip at 16,000 samples a second is 230 MB.
_BYTES: Final = 512 << 20


class SampleRoom:
    """Bytes of samples in all jobs. One thread takes, another gives back."""

    def __init__(self, most_bytes: int = _BYTES) -> None:
        self._most = most_bytes
        self._held = 0
        self._changed = threading.Condition()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until something is free; whether it is. What is decoded then is taken, whatever its size."""
        with self._changed:
            return self._changed.wait_for(lambda: self._held < self._most, timeout_s)

    def take(self, size_bytes: int) -> None:
        with self._changed:
            self._held += size_bytes

    def give_back(self, size_bytes: int) -> None:
        with self._changed:
            self._held -= size_bytes
            self._changed.notify_all()

"""Text-level stop strings: nothing of a stop string is ever emitted, in any split of the text."""


class StopScanner:
    """Holds back text that may be the start of a stop string.

    The earliest match in the text wins; of two that start at the same place, either ends the text there.
    """

    __slots__ = ("_held", "_longest", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self._longest = max((len(stop) for stop in stops), default=0)

    def feed(self, text: str) -> tuple[str, bool]:
        """Take new text; return (text that is safe to emit, whether a stop string was hit)."""
        if not self._stops:
            return text, False
        held = self._held + text
        hits = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if hits:
            self._held = ""
            return held[: min(hits)], True
        cut = len(held) - self._partial(held)
        self._held = held[cut:]
        return held[:cut], False

    def flush(self) -> str:
        """The text held back, when the sequence ended for another reason."""
        held, self._held = self._held, ""
        return held

    def _partial(self, held: str) -> int:
        """Length of the longest end of `held` that begins a stop string."""
        for size in range(min(len(held), self._longest - 1), 0, -1):
            end = held[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0

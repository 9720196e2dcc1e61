"""Cuts of a long clip into windows: at the quietest place near the end of each."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from worker.audio.transcriber import Samples

# A window ends in its last third, where these hundredths of a second are the quietest on average.
_SEARCHED: Final = 1 / 3
_STRIDE_S: Final = 0.01
_QUIET_S: Final = 0.1


def windows(samples: Samples, rate: int, most_s: float) -> Iterator[tuple[int, int]]:
    """First sample and end of each window of at most `most_s` seconds."""
    longest = int(most_s * rate)
    start = 0
    while len(samples) - start > longest:
        first = start + int(longest * (1 - _SEARCHED))
        end = first + _quietest(samples[first : start + longest], rate)
        yield start, end
        start = end
    yield start, len(samples)


def _quietest(part: Samples, rate: int) -> int:
    """The middle of the quietest tenth of a second of a part; the last of those that are equal."""
    stride, length = max(1, int(_STRIDE_S * rate)), max(1, int(_QUIET_S * rate))
    energy = np.concatenate([np.zeros(1), np.cumsum(np.square(part, dtype=np.float64))])
    starts = np.arange(0, max(1, len(part) - length + 1), stride)
    sums = energy[np.minimum(starts + length, len(part))] - energy[starts]
    quietest = int(starts[len(sums) - 1 - int(np.argmin(sums[::-1]))])
    return max(1, quietest + length // 2)

"""Split of a long clip into windows, each cut at the quietest place near its end."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from worker.audio.transcriber import Samples

# Each window ends in its last third, at the middle of the quietest tenth of a second, in steps of 10 ms.
_SEARCHED_FRACTION: Final = 1 / 3
_STRIDE_S: Final = 0.01
_QUIET_S: Final = 0.1


def windows(samples: Samples, rate: int, most_s: float) -> Iterator[tuple[int, int]]:
    """Yield the first sample and the end of each window of at most `most_s` seconds."""
    longest = int(most_s * rate)
    start = 0
    while len(samples) - start > longest:
        first = start + int(longest * (1 - _SEARCHED_FRACTION))
        end = first + _quietest(samples[first : start + longest], rate)
        yield start, end
        start = end
    yield start, len(samples)


def _quietest(part: Samples, rate: int) -> int:
    """Return the middle of the quietest tenth of a second of a part; the last one if several are equal."""
    stride, length = max(1, int(_STRIDE_S * rate)), max(1, int(_QUIET_S * rate))
    energy = np.concatenate([np.zeros(1), np.cumsum(np.square(part, dtype=np.float64))])
    starts = np.arange(0, max(1, len(part) - length + 1), stride)
    sums = energy[np.minimum(starts + length, len(part))] - energy[starts]
    quietest = int(starts[len(sums) - 1 - int(np.argmin(sums[::-1]))])
    return max(1, quietest + length // 2)

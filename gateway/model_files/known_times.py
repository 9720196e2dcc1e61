"""Timing profiles that workers have measured on this machine. They give estimates before a model is loaded.

Estimated memory of a worker, by its model's weights. KV and cached prefixes are not included.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gateway.control_types import Speeds
from protocol.timing_profile import PassKind, TimingProfile, UnusableProfile, newest

log = logging.getLogger(__name__)

MIB: Final = 1 << 20
# Python, MLX and a tokenizer take 55 MiB on Linux as measured (docs/memory.md); Metal's share was not measured.
OVERHEAD_BYTES: Final = 128 * MIB
# The buffers of a step and the overhead of the weights take a fraction of the weights, but at least BUFFER_BYTES.
BUFFER_BYTES: Final = 64 * MIB
BUFFER_PART: Final = 20
# A model with towers caches at least FEATURES_BYTES of features; encoding, and images in transit, need ENCODE_BYTES
# more.
FEATURES_BYTES: Final = 64 * MIB
ENCODE_BYTES: Final = 128 * MIB


def fixed_bytes(weights_bytes: int, *, has_towers: bool) -> int:
    """Return the memory of the weights, of the process, and of the buffers of its steps."""
    towers = FEATURES_BYTES + ENCODE_BYTES if has_towers else 0
    return OVERHEAD_BYTES + weights_bytes + max(BUFFER_BYTES, weights_bytes // BUFFER_PART) + towers


CACHE_TTL_S: Final = 5.0
_SHORT_BAND: Final = 0


class KnownTimes:
    """Reads the profiles of one folder. The event loop and threads may use it: results are replaced, never changed.

    An unusable file is logged once and ignored.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._answers: dict[tuple[str, str], tuple[float, TimingProfile | None]] = {}
        self._logged: set[str] = set()

    def of(self, model: str, path: str) -> TimingProfile | None:
        """Return the newest profile of a model that is loaded from `path`."""
        now = self._clock()
        at, answer = self._answers.get((model, path), (0.0, None))
        if (model, path) in self._answers and now - at < CACHE_TTL_S:
            return answer
        try:
            answer = newest(self._folder, model, path)
        except (UnusableProfile, OSError) as error:
            answer = None
            if model not in self._logged:
                self._logged.add(model)
                log.warning("measured times of model %s are not used: %s", model, error)
        self._answers[model, path] = now, answer
        return answer

    def load_s(self, model: str, path: str) -> float:
        """Return the seconds that the newest load of a model took; 0 if unknown."""
        profile = self.of(model, path)
        return profile.load.seconds if profile is not None and profile.load is not None else 0.0


def speeds(profile: TimingProfile | None) -> Speeds | None:
    """Summarize speeds: from a calibration, or else from measurements at short contexts. None if there are neither."""
    if profile is None:
        return None
    load_s = profile.load.seconds if profile.load is not None else 0.0
    calibration = profile.calibration
    if calibration is not None:
        decode = tuple((each.size, each.tokens_per_s) for each in calibration.decode)
        # The longest prompt is nearest to those that take long.
        prefill = calibration.prefill[-1].tokens_per_s if calibration.prefill else 0.0
        return Speeds(load_s, decode, prefill, calibration.at, calibration.max_running)
    passes = [each for each in profile.passes if each.band == _SHORT_BAND]
    plain = {each.rows: each.rows / each.seconds for each in passes if each.kind is PassKind.STEP and each.size == 1}
    prefill = max((each.size / each.seconds for each in passes if each.kind is PassKind.ALONE), default=0.0)
    return Speeds(load_s, tuple(sorted(plain.items())), prefill)

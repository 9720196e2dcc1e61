"""Failures of a request or a worker: one closed set of codes for both sides of the wire."""

from enum import IntEnum

import msgspec


class Code(IntEnum):
    """Failure code. The values are sent between gateway and worker, so codes are only ever appended."""

    INTERNAL = 0
    INVALID_REQUEST = 1
    UNSUPPORTED = 2
    CONTEXT_LENGTH_EXCEEDED = 3
    TEMPLATE_ERROR = 4
    BUSY = 5
    DEADLINE_EXCEEDED = 6
    ABORTED = 7
    DRAINING = 8
    WORKER_DIED = 9
    QUARANTINED = 10
    ROW_FAILED = 11
    # The model takes no media of this kind, or none at all.
    UNSUPPORTED_MODALITY = 12
    INVALID_IMAGE = 13
    IMAGE_TOO_LARGE = 14
    INVALID_VIDEO = 15
    INVALID_AUDIO = 16
    TOO_MANY_MEDIA = 17
    MODEL_MISSING = 20
    MODEL_CORRUPT = 21
    MODEL_UNSUPPORTED = 22
    OUT_OF_MEMORY = 23
    LOAD_TIMEOUT = 24
    BAD_CONFIG = 25
    INCOMPATIBLE = 26
    DOES_NOT_FIT = 27


# Failures after which the same request may succeed on another attempt, later or on the worker's successor.
RETRYABLE = frozenset({Code.BUSY, Code.DRAINING, Code.WORKER_DIED, Code.LOAD_TIMEOUT, Code.OUT_OF_MEMORY})


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Failure with a code. `message` is safe for clients, `detail` is only for logs, `param` is the request's field."""

    code: Code
    message: str
    detail: str = ""
    param: str | None = None
    # Numbers that an API dialect puts into its message. For CONTEXT_LENGTH_EXCEEDED: prompt length and context length,
    # in tokens.
    numbers: tuple[int, ...] = ()

    @property
    def is_retryable(self) -> bool:
        return self.code in RETRYABLE


class ExitStatus(IntEnum):
    """Exit statuses of a worker. They are those of sysexits.h where it has a suitable one."""

    OK = 0
    BAD_CONFIG = 64
    MODEL_UNUSABLE = 66
    INCOMPATIBLE = 69
    INTERNAL = 70
    OUT_OF_MEMORY = 71
    # Another rank of the group ended, timed out or was out of step. A restart helps.
    PARTNER_LOST = 72


# Exit statuses after which a restart cannot help until the configuration or the files change.
FINAL_EXITS = frozenset(
    {ExitStatus.BAD_CONFIG, ExitStatus.MODEL_UNUSABLE, ExitStatus.INCOMPATIBLE, ExitStatus.OUT_OF_MEMORY}
)

EXIT_MEANING = {
    0: "stopped as asked",
    64: "bad configuration",
    66: "the model is missing, corrupt or unsupported",
    69: "gateway and worker speak different protocol versions",
    70: "a fault in the step loop",
    71: "not enough memory",
    72: "a partner of its group was lost",
    -6: "SIGABRT: a Metal or C++ abort",
    -9: "SIGKILL: killed, most often for memory",
    -11: "SIGSEGV: an out-of-bounds access in native code",
    -15: "SIGTERM",
}
"""Meaning of exit statuses for operators; negative numbers are signals, as in subprocess."""

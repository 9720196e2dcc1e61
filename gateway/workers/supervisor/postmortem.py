"""Post-mortem of a worker process: the kind of its exit, and the failures told to waiters, clients and the log."""

import signal
import sys
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from protocol.failures import EXIT_MEANING, FINAL_EXITS, Code, ExitStatus, Failure
from protocol.from_worker import Goodbye

# The failures behind a final exit, for a worker whose exit status cannot be read.
_FINAL_CODES: Final = frozenset(
    {Code.BAD_CONFIG, Code.MODEL_MISSING, Code.MODEL_CORRUPT, Code.MODEL_UNSUPPORTED, Code.INCOMPATIBLE}
)
CODES: Final[dict[int | None, Code]] = {
    ExitStatus.BAD_CONFIG: Code.BAD_CONFIG,
    ExitStatus.MODEL_UNUSABLE: Code.MODEL_CORRUPT,
    ExitStatus.INCOMPATIBLE: Code.INCOMPATIBLE,
    ExitStatus.OUT_OF_MEMORY: Code.OUT_OF_MEMORY,
}

# Of an abort in Metal or C++, of a segmentation fault, and the like.
_REPORTED: Final = frozenset({-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGTRAP})


class ExitKind(Enum):
    """Kind of an exit, by status and last message."""

    STOPPED = auto()
    CRASHED = auto()
    PARTNER_LOST = auto()
    FINAL = auto()
    INCOMPATIBLE = auto()


@dataclass(frozen=True, slots=True)
class Postmortem:
    """`failure` is for those who wait for the model, `stream_failure` for running streams."""

    kind: ExitKind
    failure: Failure
    stream_failure: Failure


def examine(
    name: str, status: int | None, goodbye: Goodbye | None, lines: list[str], known: Failure | None = None
) -> Postmortem:
    """Classify an exit by its status (None: unknown), the worker's last message and the end of its output.

    `known` is the reason that its process gives, which the worker itself does not know.
    """
    meaning = "its exit status is not known" if status is None else EXIT_MEANING.get(status, f"exit status {status}")
    detail = "\n".join(lines)
    reported = goodbye.failure if goodbye is not None else None
    died = Failure(Code.WORKER_DIED, f"the worker of model '{name}' died ({meaning})", detail)
    failure = died
    if known is not None:
        failure = known
    elif reported is not None:
        failure = reported
    elif status in CODES:
        failure = Failure(CODES[status], f"model '{name}' cannot be loaded: {meaning}", detail)
    return Postmortem(_kind(status, goodbye), failure, died)


def crash_report(status: int | None, platform: str = sys.platform) -> str:
    """Folder of the report of a crash on a Mac, written some seconds later; empty where there is no report."""
    if platform != "darwin" or status not in _REPORTED:
        return ""
    return "; crash report: in ~/Library/Logs/DiagnosticReports, of a service in /Library/Logs/DiagnosticReports"


def _kind(status: int | None, goodbye: Goodbye | None) -> ExitKind:
    code = goodbye.failure.code if goodbye is not None and goodbye.failure is not None else None
    if status == ExitStatus.INCOMPATIBLE or code is Code.INCOMPATIBLE:
        return ExitKind.INCOMPATIBLE
    if status in FINAL_EXITS or (status is None and code in _FINAL_CODES):
        return ExitKind.FINAL
    if status == ExitStatus.PARTNER_LOST:
        return ExitKind.PARTNER_LOST
    if status == ExitStatus.OK or (status is None and goodbye is not None and code is None):
        return ExitKind.STOPPED
    return ExitKind.CRASHED

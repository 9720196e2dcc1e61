"""Records of files and batches, as they are stored on the disk."""

import secrets
from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
# How a line ended. Only lines that succeeded are in the output file.
Outcome = Literal["succeeded", "errored", "canceled", "expired"]
Purpose = Literal["batch", "batch_output"]

# Files without an expiry of their own, and batches that have ended, are deleted after this time.
RECORD_AGE_S: Final = 30 * 86400.0
ENDED: Final = frozenset[Status]({"failed", "completed", "expired", "cancelled"})
FILE_PREFIX: Final = "file-"
OPENAI_PREFIX: Final = "batch_"
ANTHROPIC_PREFIX: Final = "msgbatch_"
PREFIXES: Final = (FILE_PREFIX, OPENAI_PREFIX, ANTHROPIC_PREFIX)


class StoredFile(Struct, frozen=True, kw_only=True):
    """One file. Only `tenant` may read it. Times are Unix times."""

    id: str
    tenant: str
    purpose: Purpose
    filename: str
    size_bytes: int
    created: float
    # None means after the configured age.
    expires: float | None = None


class LineProblem(Struct, frozen=True):
    """Reason for which a line of the input file, or the whole file, cannot be run. Lines are counted from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchTokens(Struct, frozen=True):
    """Tokens of all answers of a batch."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0


class StoredBatch(Struct, frozen=True, kw_only=True):
    """One batch. Only `tenant` may read it. Times are Unix times.

    `key` is the name of the key that made it. `is_everybodys` means that it was made without a key, while there were
    no keys. `reached` are the times at which the batch reached its statuses.
    """

    id: str
    tenant: str
    key: str | None
    is_everybodys: bool
    endpoint: str
    created: float
    expires: float
    status: Status
    input_file: str = ""
    output_file: str = ""
    error_file: str = ""
    metadata: dict[str, str] | None = None
    # Age at which the output files are deleted; None means the configured age.
    output_age_s: int | None = None
    total: int = 0
    # Numbers of lines by outcome. While the batch runs, `RunningBatch` has the current ones.
    counts: Mapping[str, int] = {}
    # The only model of all lines; None if there are several.
    model: str | None = None
    tokens: BatchTokens | None = None
    problems: tuple[LineProblem, ...] = ()
    reached: Mapping[str, float] = {}

    @property
    def is_anthropic(self) -> bool:
        return self.id.startswith(ANTHROPIC_PREFIX)

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


def new_name(prefix: str) -> str:
    """Return a new id of a file or batch."""
    return prefix + secrets.token_hex(12)

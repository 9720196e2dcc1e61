"""Errors of a worker.

WorkerError
├── LoadFailed        the model cannot be served; ends the process with the status that says why
├── RequestInvalid    one request cannot be served; becomes `Rejected`
└── StepFailed        the step loop cannot go on; ends the process with status 70
    └── PartnerLost   another rank of its group was lost; ends the process with status 72
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from protocol.failures import Code, ExitStatus, Failure
from worker.output.stops import encodable

# Texts in messages of MLX's exceptions that leave the device in an unknown state.
GPU_FAULTS: Final = ("[METAL]", "Command buffer", "CUDA", "cuda")
# Texts in messages of MLX's exceptions that mean that another rank is lost. A further collective would wait forever.
FABRIC_FAULTS: Final = ("[ring]", "[nccl]", "[jaccl]", "[distributed]")
# Texts in messages of MLX's failed allocations; a smaller allocation may succeed.
NO_MEMORY: Final = (
    "[metal::malloc]", "Unable to allocate", "Insufficient Memory", "OutOfMemory", "out of memory", "Resource limit",
)  # fmt: skip
# Exit status of a failed load by its code; other codes have the status `MODEL_UNUSABLE`.
_EXIT_STATUSES: Final = {
    Code.OUT_OF_MEMORY: ExitStatus.OUT_OF_MEMORY,
    Code.BAD_CONFIG: ExitStatus.BAD_CONFIG,
    Code.INCOMPATIBLE: ExitStatus.INCOMPATIBLE,
}


def is_allocation_failure(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in NO_MEMORY)


def is_gpu_fault(error: BaseException) -> bool:
    return any(sign in str(error) for sign in GPU_FAULTS)


def is_fabric_fault(error: BaseException) -> bool:
    return any(sign in str(error) for sign in FABRIC_FAULTS)


class WorkerError(Exception):
    """Error that contains the `Failure` for the gateway."""

    def __init__(
        self, code: Code, message: str, *, detail: str = "", param: str | None = None, numbers: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        # A message may quote text of a client or a model, and that text may have half a surrogate pair.
        self.failure = Failure(code, encodable(message), encodable(detail), param, numbers)


class LoadFailed(WorkerError):
    @property
    def exit_status(self) -> ExitStatus:
        return _EXIT_STATUSES.get(self.failure.code, ExitStatus.MODEL_UNUSABLE)


class RequestInvalid(WorkerError):
    pass


class StepFailed(WorkerError):
    pass


class PartnerLost(StepFailed):
    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(Code.WORKER_DIED, message, detail=detail)


@contextmanager
def foreign_code(explain: Callable[[BaseException], Exception], *passed: type[Exception]) -> Generator[None]:
    """Translate exceptions of the code inside the `with` block, which may be code of any architecture, with `explain`.

    A `WorkerError` and the types in `passed` are not translated.
    """
    try:
        yield
    except (WorkerError, KeyboardInterrupt, *passed):
        raise
    except BaseException as error:  # a panic of Rust code is no `Exception`; only `explain` decides what an error means
        raise explain(error) from error


def cannot_run(error: BaseException) -> LoadFailed:
    """Return the failure of a model whose first pass raised `error`."""
    code = Code.OUT_OF_MEMORY if is_allocation_failure(error) else Code.MODEL_UNSUPPORTED
    return LoadFailed(code, f"the model cannot be run: {type(error).__name__}: {str(error).partition(chr(10))[0]}")

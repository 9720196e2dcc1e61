"""`python -m worker.smoke`: does this installation generate? One token of the demo model, in a second or two.

Exit statuses: 0 it does · else as a worker's.
"""

import sys
from typing import Final

from protocol.failures import Exit
from protocol.messages import Generate, Sampling, TextPrompt
from protocol.spec import WorkerSpec
from worker.checked_model import load_checked
from worker.errors import LoadFailed
from worker.prompt.intake import Intake
from worker.verify.engine_session import Session

# Of no link and no gateway; nothing is cached.
SPEC: Final = WorkerSpec(name="demo", path="demo", epoch=1, down="", up="", cache_bytes=0)


def main(spec: WorkerSpec = SPEC) -> int:
    """Load, generate, say so; returns the exit status."""
    try:
        loaded = load_checked(spec, lambda _stage, _done, _total: None)
    except LoadFailed as error:
        print(error.failure.message, file=sys.stderr)
        return error.exit_status
    request = Generate(1, TextPrompt("Hello"), Sampling(temperature=0.0, ignore_eos=True), max_tokens=1)
    output = Session(loaded, Intake(loaded, spec.parser), spec).run([[request]])[0]
    if output.failure is not None or len(output.ids) != 1:
        print(output.failure.message if output.failure else "the demo model said nothing", file=sys.stderr)
        return Exit.MODEL_UNUSABLE
    print("one token generated")
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main())

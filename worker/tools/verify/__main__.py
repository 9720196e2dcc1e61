"""Command `python -m worker.tools.verify`: checks that a request's output does not depend on how it is run.

It runs the same requests alone, then batched, chunked, from caches, preempted, resumed and with drafts, and compares
every token. Before that it compares the perplexity of a paragraph with that of mlx-lm alone, and measures the time to
the first token. It prints a `protocol.verify_output.VerifyCheck` per line. Exit statuses: 0 all equal · 1 a difference,
a wrong number, or a check that proved nothing · otherwise a worker's.
"""

import argparse
import os
import sys
from collections.abc import Generator, Sequence
from typing import Final

import msgspec

from protocol.checkpoint import AUDIO, TEXT
from protocol.failures import ExitStatus, Failure
from protocol.spec import WorkerSpec, read_spec
from protocol.verify_output import VerifyCheck
from worker.embedding.load_model import kind_of_spec, load_embedding_model
from worker.errors import LoadFailed, PartnerLost, RequestInvalid
from worker.group.coordinator import open_group
from worker.model import memory
from worker.start.checked_model import load_checked
from worker.tools.verify.audio_and_embedding_checks import reader_checks
from worker.tools.verify.verifier import LONGEST_WORDS, Verifier, reference_of

EXIT_DIFFERENT: Final = 1


def _checks(spec: WorkerSpec, tokens: int, words: int) -> Generator[VerifyCheck]:
    """Run the checks for the model's kind. Raises `LoadFailed`, `RequestInvalid`, and `PartnerLost`."""
    kind = kind_of_spec(spec)
    if kind == AUDIO:
        # This module imports mlx-audio, which may not be installed.
        from worker.tools.verify.audio_and_embedding_checks import audio_checks

        yield from audio_checks(spec)
        return
    if kind != TEXT:
        yield from reader_checks(load_embedding_model(spec, kind, lambda _stage, _done, _total: None))
        return
    reference = reference_of(spec) if spec.group is None else None
    lead, division = open_group(spec, _lost) if spec.group is not None else (None, None)
    loaded = load_checked(spec, lambda _stage, _done, _total: None, division, lead)
    grant = memory.MemoryGrant(spec, loaded.weights_bytes)
    grant.enforce(grant.limits())
    yield from Verifier(loaded, spec, tokens, words, lead, reference).checks()
    if lead is not None:
        lead.leave()


def _lost(failure: Failure, status: int) -> None:
    """End the process; its main thread may otherwise wait for another rank forever."""
    print(failure.message, file=sys.stderr, flush=True)
    os._exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Verify one model; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="worker.tools.verify", description="Compare what a model says however it is run."
    )
    parser.add_argument("--spec", required=True, help="a WorkerSpec as JSON; - reads it from standard input")
    parser.add_argument("--tokens", type=int, default=48, help="generated for each request")
    parser.add_argument("--words", type=int, default=LONGEST_WORDS, help="of the longest prompt")
    options = parser.parse_args(argv)
    try:
        spec = read_spec(options.spec)
    except msgspec.DecodeError as error:
        print(f"bad --spec: {error}", file=sys.stderr)
        return ExitStatus.BAD_CONFIG
    try:
        status = 0
        for check in _checks(spec, options.tokens, options.words):
            print(msgspec.json.encode(check).decode(), flush=True)
            if not check.is_good:
                status = EXIT_DIFFERENT
    except LoadFailed as error:
        print(error.failure.message, file=sys.stderr)
        return error.exit_status
    except PartnerLost as error:
        print(error.failure.message, file=sys.stderr)
        return ExitStatus.PARTNER_LOST
    except RequestInvalid as error:
        print(f"the model cannot take the requests of this test: {error.failure.message}", file=sys.stderr)
        return ExitStatus.MODEL_UNUSABLE
    return status


if __name__ == "__main__":
    sys.exit(main())

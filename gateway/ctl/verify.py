"""`mlxctl verify`: the worker's own checks in a process of their own, and one through the running daemon."""

import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from threading import Event
from typing import Any, Final

import msgspec

from gateway.command_failed import CommandFailed
from gateway.config.settings import Config, ModelConfig
from gateway.config.worker_spec_and_group import worker_spec
from gateway.ctl import client
from gateway.ctl.calibrate import spec_input
from gateway.ctl.tables import records
from gateway.workers.supervisor.ranks import ranks_of, variables_of
from gateway.workers.supervisor.spawn import default_command
from protocol.spec import LOCAL, STDIN, WorkerSpec
from protocol.verify_output import Difference, VerifyCheck

STREAMS: Final = 6
STREAM_TOKENS: Final = 256
# Answers are made this long if shorter ones had all ended before their worker could be killed.
LONGER_TOKENS: Final = 1536
# Output that a worker has sent before it is stopped arrives within this time.
SETTLE_S: Final = 1.0
FIRST_DELTA_TIMEOUT_S: Final = 600.0
# The other ranks have this long to exit after a verification.
FOLLOWER_S: Final = 15.0
NOTHING_WRONG: Final = frozenset({0, 1})

_check = msgspec.json.Decoder(VerifyCheck)


def checks(config: Config, model: ModelConfig, tokens: int, *, kill: bool) -> Generator[VerifyCheck, None, None]:
    """Yield the result of each check as soon as it is done. Raises `CommandFailed`."""
    yield from in_process(config, model, tokens)
    if kill:
        yield through_daemon(model.name)


def in_process(config: Config, model: ModelConfig, tokens: int) -> Generator[VerifyCheck, None, None]:
    """Load the model once more, in addition to the daemon's, and compare its outputs with each other. Raises
    `CommandFailed`.
    """
    if set(model.group.ranks) - {LOCAL}:
        raise CommandFailed("a model with ranks on other machines cannot be verified by a process beside the daemon")
    spec = worker_spec(config, model)
    first, *followers = ranks_of(spec) if spec.group is not None else [spec]
    argv = [sys.executable, "-P", "-m", "worker.tools.verify", "--spec", STDIN, "--tokens", str(tokens)]
    with ExitStack() as ranks:
        stdin = ranks.enter_context(spec_input(first))
        process = subprocess.Popen(argv, stdin=stdin, stdout=subprocess.PIPE, env=os.environ | variables_of(first))
        for follower in followers:
            ranks.enter_context(_following(follower))
        with process:
            assert process.stdout is not None
            yield from records(process.stdout, _check)
    if process.returncode not in NOTHING_WRONG:
        raise CommandFailed(f"the model could not be verified (exit status {process.returncode})")


@contextmanager
def _following(spec: WorkerSpec) -> Generator[None, None, None]:
    """Run a follower of the verifying process. It is killed if it does not end with that process."""
    with (
        spec_input(spec) as stdin,
        subprocess.Popen(default_command(spec), stdin=stdin, env=os.environ | variables_of(spec)) as process,
    ):
        try:
            yield
            process.wait(FOLLOWER_S)
        finally:
            process.kill()


def through_daemon(name: str) -> VerifyCheck:
    """Kill the model's worker in the running daemon during streams; check that they resume. Raises `CommandFailed`."""
    check = _killed(name, STREAM_TOKENS)
    return _killed(name, LONGER_TOKENS) if check.note and not check.differences else check


def _killed(name: str, tokens: int) -> VerifyCheck:
    with ThreadPoolExecutor(STREAMS) as threads:
        expected = [answer.result() for answer in _ask(threads, name, tokens, Event())]
        pid = _pid(name)
        has_begun = Event()
        answers = _ask(threads, name, tokens, has_begun)
        has_begun.wait(FIRST_DELTA_TIMEOUT_S)
        is_killed = _kill_amid(pid, answers)
        outputs = [answer.result() for answer in answers]
    differences = [
        Difference(index, _common(output, other))
        for index, (output, other) in enumerate(zip(outputs, expected, strict=True))
        if output != other
    ]
    note = "" if is_killed else "every stream had ended before its worker could be killed"
    return VerifyCheck("killed worker", STREAMS, STREAMS * tokens, 0, tuple(differences), note)


def _ask(threads: ThreadPoolExecutor, name: str, tokens: int, has_begun: Event) -> list[Future[str]]:
    return [threads.submit(_answer, name, index, tokens, has_begun) for index in range(STREAMS)]


def _answer(name: str, index: int, tokens: int, has_begun: Event) -> str:
    request: dict[str, Any] = {
        "model": name,
        "stream": True,
        "messages": [{"role": "user", "content": f"Tell me story number {index}, as long as you can."}],
        "max_tokens": tokens,
        "seed": index,
        "temperature": 0.8 if index % 2 else 0.0,
    }
    text = ""
    try:
        for delta in client.stream_chat(request):
            text += (delta.get("reasoning_content") or "") + (delta.get("content") or "")
            if text:
                has_begun.set()
    finally:
        # The event is set after a failure too, so that no thread waits for it forever.
        has_begun.set()
    return text


def _pid(name: str) -> int:
    """Return the process id of the model's worker; 0 if it has none."""
    return next((model.pid for model in client.status().models if model.name == name), 0)


def _kill_amid(pid: int, answers: Sequence[Future[str]]) -> bool:
    """Kill a worker unless all answers are complete; return whether it was killed.

    The worker is stopped first, so that output that it has already sent can arrive before the decision.
    """
    if not pid:
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        futures.wait(answers, SETTLE_S)
        is_amid = not all(answer.done() for answer in answers)
        os.kill(pid, signal.SIGKILL if is_amid else signal.SIGCONT)
        return is_amid
    return False


def _common(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def row(check: VerifyCheck) -> str:
    """Format a check as one line of the table."""
    if check.is_skipped:
        verdict = f"left out: {check.note}"
    elif check.differences:
        verdict = "DIFFERENT: " + ", ".join(_describe(difference) for difference in check.differences)
    elif check.note:
        verdict = f"PROVES NOTHING: {check.note}"
    else:
        verdict = f"WRONG: {check.measured}" if check.is_wrong else check.measured or "equal"
    return f"{check.name:<16} {check.requests:>8} {check.tokens:>7} {check.cached:>7}  {verdict}"


HEADER: Final = f"{'CHECK':<16} {'REQUESTS':>8} {'TOKENS':>7} {'CACHED':>7}  RESULT"


def _describe(difference: Difference) -> str:
    margin = "" if difference.margin is None else f" (margin {difference.margin:g})"
    return f"request {difference.request} at {difference.position}{margin}"

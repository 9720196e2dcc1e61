"""A real worker process: how it introduces itself, serves, survives its gateway, and leaves."""

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import structs

from protocol import PROTOCOL
from protocol.codec import encode
from protocol.failures import Code, ExitStatus
from protocol.from_worker import (
    Accepted,
    Delta,
    DeltaKind,
    Drained,
    Finish,
    Goodbye,
    Hello,
    Loading,
    Pong,
    Ready,
    Rejected,
    Step,
    Tokenized,
    Up,
)
from protocol.sockets import addresses
from protocol.spec import WorkerSpec
from protocol.to_worker import (
    Abort,
    ChatPrompt,
    Constraint,
    ConstraintKind,
    Drain,
    Dump,
    Generate,
    Media,
    Ping,
    Sampling,
    SetLogLevel,
    Shutdown,
    TextPrompt,
    Tokenize,
    TokensPrompt,
    Welcome,
)
from tests.support.models import VOCAB
from tests.support.pictures import encoded, halves
from tests.support.process import ROOT, TIMEOUT_S, Gateway, start
from tests.support.scale import patient
from worker.errors import LoadFailed, StepFailed, foreign_code
from worker.main import WorkerMain

ENDLESS = Sampling(temperature=0.0, ignore_eos=True)
rids = itertools.count(1)


@pytest.fixture(scope="module")
def gateway(model_folder: Callable[[str], Path]) -> Iterator[Gateway]:
    """One worker for the tests that leave it as they found it."""
    with (
        tempfile.TemporaryDirectory(prefix="mlxd-", dir="/tmp") as home,
        Gateway(Path(home), model_folder("qwen3")) as made,
    ):
        made.ready()
        yield made


def endless() -> Generate:
    return Generate(next(rids), TokensPrompt((20, 30)), ENDLESS)


def deltas_until_end(gateway: Gateway, rid: int) -> list[Delta]:
    found: list[Delta] = []
    while not found or found[-1].finish is None:
        step = gateway.expect(Step, lambda step: any(delta.rid == rid for delta in step.deltas))
        found += [delta for delta in step.deltas if delta.rid == rid]
    return found


def running(gateway: Gateway) -> Generate:
    """An endless request that has begun to speak."""
    request = endless()
    gateway.send(request)
    gateway.expect(Step, lambda step: any(delta.rid == request.rid and delta.text for delta in step.deltas))
    return request


# -- serving -------------------------------------------------------------------------------------------------------


def test_a_worker_says_hello_then_loads_then_is_ready(run_dir: Path, model_folder: Callable[[str], Path]) -> None:
    with Gateway(run_dir, model_folder("qwen3"), context=200, max_running=3) as gateway:
        ready = gateway.ready()
        hello, *loading = gateway.seen[: gateway.seen.index(ready)]
        assert isinstance(hello, Hello)
        assert (hello.worker, hello.epoch, hello.protocol, hello.state) == ("test", 3, PROTOCOL, "loading")
        assert hello.pid == gateway.process.pid
        # It is introduced once unasked, and once to the gateway that welcomes it.
        assert [message for message in loading if not isinstance(message, Loading)] == [hello]
        stages = [message.stage for message in loading if isinstance(message, Loading)]
        assert stages == sorted(stages, key=["import", "weights", "check", "warmup"].index)
        assert set(stages) == {"import", "weights", "check", "warmup"}
        assert (ready.epoch, ready.max_context, ready.max_running, ready.vocab_size) == (3, 200, 3, VOCAB)
        assert (ready.model_type, ready.has_chat_template) == ("qwen3", True)
        assert ready.weights_bytes > 0
        gateway.send(Shutdown())
        assert gateway.expect(Goodbye).failure is None
        assert gateway.exit_status() == ExitStatus.OK


def test_a_request_is_accepted_streamed_and_ended(gateway: Gateway) -> None:
    request = Generate(next(rids), ChatPrompt([{"role": "user", "content": "kato"}]), ENDLESS, max_tokens=12)
    gateway.send(request)
    accepted = gateway.expect(Accepted)
    deltas = deltas_until_end(gateway, request.rid)
    assert accepted.rid == request.rid
    assert deltas[-1].finish is Finish.LENGTH
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.prompt == accepted.prompt_tokens
    assert sum(len(delta.token_ids) for delta in deltas) == 12


def test_a_worker_says_which_media_it_takes_and_counts_and_refuses_them_by_its_specification(run_dir: Path) -> None:
    with Gateway(run_dir, "demo-vision", media_count=1, batching="together") as gateway:
        ready = gateway.ready()
        assert ready.modalities == ("image", "video")
        assert ready.media is not None
        assert ready.media.tower_bytes > 1 << 20
        assert (ready.media.image_tokens, ready.media.max_pixels, ready.media.reason) == (64, 128 * 128, "")

        image = Media("image", b"1" * 32, encoded(halves(96, 64)), {}, "input[0]")
        shown = [{"type": "image", "media": 0}, {"type": "text", "text": "What is it?"}]
        prompt = ChatPrompt([{"role": "user", "content": shown}], media=(image,))
        gateway.send(Generate(next(rids), prompt, ENDLESS, max_tokens=2))
        accepted = gateway.expect(Accepted)
        usage = deltas_until_end(gateway, accepted.rid)[-1].usage
        assert usage is not None
        assert (usage.prompt, usage.image_tokens) == (accepted.prompt_tokens, 24)
        gateway.send(Tokenize(next(rids), prompt))
        assert gateway.expect(Tokenized).count == accepted.prompt_tokens

        gateway.send(Generate(next(rids), structs.replace(prompt, media=(image, image)), ENDLESS))
        failure = gateway.expect(Rejected).failure
        assert (failure.code, failure.param) == (Code.TOO_MANY_MEDIA, "input[0]")


def test_the_log_level_changes_without_a_restart(gateway: Gateway) -> None:
    gateway.send(SetLogLevel("error"))
    gateway.send(SetLogLevel("quiet"))
    gateway.send(SetLogLevel("info"))
    gateway.send(SetLogLevel("loud"))

    assert "unknown log level 'quiet'" not in gateway.wait_for_stderr("unknown log level 'loud'")


def test_a_request_that_cannot_be_served_is_rejected_and_the_next_one_is_served(gateway: Gateway) -> None:
    bad = Generate(next(rids), TokensPrompt((10**9,)), ENDLESS)
    good = Generate(next(rids), TextPrompt("kato"), ENDLESS, max_tokens=2)
    gateway.send(bad)
    gateway.send(good)
    rejected = gateway.expect(Rejected)
    assert (rejected.rid, rejected.failure.code) == (bad.rid, Code.INVALID_REQUEST)
    assert deltas_until_end(gateway, good.rid)[-1].finish is Finish.LENGTH


def test_a_request_out_of_range_is_rejected_by_name_and_the_next_one_is_served(gateway: Gateway) -> None:
    bad = Generate(next(rids), TextPrompt("kato"), structs.replace(ENDLESS, temperature=9.0))
    good = Generate(next(rids), TextPrompt("kato"), ENDLESS, max_tokens=2)
    gateway.send(bad)
    gateway.send(good)
    rejected = gateway.expect(Rejected)
    assert (rejected.rid, rejected.failure.code, rejected.failure.param) == (
        bad.rid,
        Code.INVALID_REQUEST,
        "temperature",
    )
    assert deltas_until_end(gateway, good.rid)[-1].finish is Finish.LENGTH


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(ConstraintKind.JSON_SCHEMA, '{"properties": {"\\ud800": {"type": 5}}}'),
        Constraint(ConstraintKind.GRAMMAR, 'start: %json {"properties": {"\\ud800": {"type": 5}}}'),
    ],
    ids=["schema", "grammar"],
)
def test_a_refusal_that_quotes_half_a_surrogate_arrives_and_the_worker_lives(
    gateway: Gateway, constraint: Constraint
) -> None:
    request = Generate(next(rids), TextPrompt("kato"), ENDLESS, constraint=constraint)
    gateway.send(request)
    assert gateway.expect(Rejected).rid == request.rid
    good = Generate(next(rids), TextPrompt("kato"), ENDLESS, max_tokens=2)
    gateway.send(good)
    assert deltas_until_end(gateway, good.rid)[-1].finish is Finish.LENGTH


def test_the_name_of_a_tool_with_half_a_surrogate_arrives_and_the_worker_lives(gateway: Gateway) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    call = json.dumps('\n{"name": "f\\ud800", "id": "\\ud800", "arguments": {}}\n')
    request = Generate(
        next(rids),
        ChatPrompt([{"role": "user", "content": "kato"}], [tool]),
        Sampling(temperature=0.0),
        max_tokens=200,
        constraint=Constraint(ConstraintKind.GRAMMAR, f"start: <tool_call> {call} </tool_call>"),
    )
    gateway.send(request)
    deltas = deltas_until_end(gateway, request.rid)
    assert [delta.tool.name for delta in deltas if delta.kind is DeltaKind.TOOL_BEGIN and delta.tool] == ["f?"]
    assert deltas[-1].finish is Finish.TOOL_CALLS


def test_requests_are_served_before_the_questions_that_came_before_them(gateway: Gateway) -> None:
    long = TextPrompt("kato mira " * 13_000)
    questions = [Tokenize(next(rids), long) for _ in range(40)]
    for question in questions:
        gateway.send(question)
    request = Generate(next(rids), TextPrompt("kato"), ENDLESS, max_tokens=1)
    gateway.send(request)
    assert deltas_until_end(gateway, request.rid)[-1].finish is Finish.LENGTH
    answered = sum(isinstance(message, Tokenized) for message in gateway.seen)
    assert answered < len(questions)

    # Nobody waits for the others any more: the next question is the next that is answered.
    gateway.send(Abort(tuple(question.rid for question in questions)))
    last = Tokenize(next(rids), TextPrompt("kato"))
    gateway.send(last)
    gateway.expect(Tokenized, lambda answer: answer.rid == last.rid)
    assert sum(isinstance(message, Tokenized) for message in gateway.seen) < len(questions)


def test_an_abort_sent_with_its_request_ends_it_whichever_is_handled_first(gateway: Gateway) -> None:
    text = TextPrompt("kato mira sen " * 200)
    for _ in range(5):
        request = Generate(next(rids), text, ENDLESS)
        gateway.send(request)
        gateway.send(Abort((request.rid,)))
        assert deltas_until_end(gateway, request.rid)[-1].finish is Finish.ABORT
    assert gateway.pong(1).stats.running == 0


def test_pings_are_answered_while_busy_with_the_age_of_the_step(gateway: Gateway) -> None:
    request = running(gateway)
    first = gateway.pong(10).stats
    deadline = time.monotonic() + patient(TIMEOUT_S)
    while (stats := gateway.pong(11).stats).step_seq < first.step_seq + 3 and time.monotonic() < deadline:
        assert stats.running == 1
        assert stats.step_age_ms < 5000
    assert stats.step_seq >= first.step_seq + 3
    gateway.send(Abort((request.rid,)))
    assert deltas_until_end(gateway, request.rid)[-1].finish is Finish.ABORT


def test_an_idle_worker_has_no_step_age_and_tells_its_memory(gateway: Gateway) -> None:
    deadline = time.monotonic() + patient(TIMEOUT_S)
    while (stats := gateway.pong(40).stats).running + stats.waiting and time.monotonic() < deadline:
        pass
    stats = gateway.pong(41).stats
    assert (stats.step_age_ms, stats.running, stats.waiting, stats.kv_bytes) == (0, 0, 0, 0)
    assert stats.active_bytes > 0
    assert stats.memory_bytes > 0


@pytest.mark.parametrize("frame", [b"", b"\x00", b"\xc1", b"\x91" * 5000, b"\x93\x06\x01\xa1x", encode(Accepted(1, 2))])
def test_a_malformed_frame_is_dropped_and_the_worker_serves_on(gateway: Gateway, frame: bytes) -> None:
    gateway.send_frame(frame)
    assert gateway.pong(50).seq == 50


def test_a_restarted_gateway_gets_hello_and_ready_again(gateway: Gateway) -> None:
    gateway.send(Welcome(0, 1, 1.0))
    gateway.send(Welcome(0, 2, 1.0))
    hello, ready = gateway.expect(Hello), gateway.expect(Ready)
    assert (hello.state, hello.epoch, ready.epoch) == ("ready", 3, 3)
    assert hello.mlx_version != ""
    gateway.send(Welcome(0, 2, 1.0))
    first = len(gateway.seen)
    gateway.pong(60)
    assert not any(isinstance(message, Hello | Ready) for message in gateway.seen[first:])


def test_a_dump_writes_the_stacks_of_every_thread(gateway: Gateway) -> None:
    gateway.send(Dump(1))
    stacks = gateway.wait_for_stderr("worker/link.py")
    assert "most recent call first" in stacks
    assert gateway.pong(70).seq == 70


def test_a_drained_worker_says_so(gateway: Gateway) -> None:
    request = running(gateway)
    gateway.send(Drain(0.0))
    end = deltas_until_end(gateway, request.rid)[-1]
    assert end.failure is not None
    assert end.failure.code is Code.DRAINING
    assert gateway.expect(Drained).aborted == 1


# -- leaving -------------------------------------------------------------------------------------------------------


def test_sigterm_ends_every_request_says_goodbye_and_exits_zero(
    run_dir: Path, model_folder: Callable[[str], Path]
) -> None:
    with Gateway(run_dir, model_folder("qwen3")) as gateway:
        gateway.ready()
        request = running(gateway)
        gateway.signal(signal.SIGINT)  # a terminal's ^C is the gateway's business
        gateway.pong(1)
        gateway.signal(signal.SIGTERM)
        end = deltas_until_end(gateway, request.rid)[-1]
        assert end.failure is not None
        assert end.failure.code is Code.DRAINING
        goodbye = gateway.expect(Goodbye)
        assert (goodbye.epoch, goodbye.failure) == (3, None)
        assert gateway.exit_status() == ExitStatus.OK


@pytest.mark.soak
def test_sigterm_ends_an_idle_worker(run_dir: Path, model_folder: Callable[[str], Path]) -> None:
    with Gateway(run_dir, model_folder("qwen3")) as gateway:
        gateway.ready()
        gateway.signal(signal.SIGTERM)
        assert gateway.expect(Goodbye).failure is None
        assert gateway.exit_status() == ExitStatus.OK


def test_grammars_that_wait_for_their_compiler_do_not_keep_the_process(run_dir: Path) -> None:
    """Python would run everything that its pools have, and hold the model's memory meanwhile."""
    down, up = addresses(run_dir)
    process = WorkerMain(WorkerSpec(name="m", path="demo", epoch=1, down=down, up=up))
    compiled, interrupt = threading.Event(), signal.getsignal(signal.SIGINT)
    grammars = [process._compilers.submit(compiled.wait) for _ in range(5)]  # pyright: ignore[reportPrivateUsage]
    process._load_and_serve = lambda: ExitStatus.OK  # pyright: ignore[reportPrivateUsage]
    try:
        assert process.run() == ExitStatus.OK
    finally:
        signal.signal(signal.SIGINT, interrupt)
        compiled.set()
    assert [grammar.cancelled() for grammar in grammars] == [False, False, True, True, True]


def test_a_panic_while_a_request_is_prepared_is_the_end_of_that_request() -> None:
    """A panic in the tokenizer's Rust code is no `Exception`."""

    class PanicException(BaseException):
        pass

    process = WorkerMain(WorkerSpec(name="m", path="demo", epoch=1, down="", up=""))
    sent: list[Up] = []
    process._link.send = sent.append  # pyright: ignore[reportPrivateUsage]
    with process._refusing(7):  # pyright: ignore[reportPrivateUsage]
        raise PanicException("called `Option::unwrap()` on a `None` value")
    process._link._context.term()  # pyright: ignore[reportPrivateUsage]
    (rejected,) = sent
    assert isinstance(rejected, Rejected)
    assert (rejected.rid, rejected.failure.code) == (7, Code.INTERNAL)


class _Panic(BaseException):
    """As a panic of the tokenizer's Rust code is."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TypeError("'<' not supported between instances of 'str' and 'int'"), Code.MODEL_CORRUPT),
        (OverflowError("cannot convert float infinity to integer"), Code.MODEL_CORRUPT),
        (_Panic("called `Option::unwrap()` on a `None` value"), Code.MODEL_CORRUPT),
        (NotImplementedError("no cache of this kind"), Code.MODEL_UNSUPPORTED),
        (MemoryError(), Code.OUT_OF_MEMORY),
    ],
)
def test_an_error_of_a_load_that_nothing_has_explained_is_a_reason_and_no_crash(
    error: BaseException, code: Code
) -> None:
    process = WorkerMain(WorkerSpec(name="m", path="demo", epoch=1, down="", up=""))
    with pytest.raises(LoadFailed) as caught, foreign_code(process._explain):  # pyright: ignore[reportPrivateUsage]
        raise error
    assert caught.value.failure.code is code
    process._link._context.term()  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("fault", ["[METAL] Command buffer execution failed", "[ring] Couldn't connect"])
def test_a_fault_of_the_device_during_a_load_stays_a_crash(fault: str) -> None:
    process = WorkerMain(WorkerSpec(name="m", path="demo", epoch=1, down="", up=""))
    with pytest.raises(StepFailed), foreign_code(process._explain):  # pyright: ignore[reportPrivateUsage]
        raise RuntimeError(fault)
    process._link._context.term()  # pyright: ignore[reportPrivateUsage]


def test_while_loading_pings_are_answered_requests_refused_drains_done_and_shutdown_obeyed(
    run_dir: Path, model_folder: Callable[[str], Path]
) -> None:
    # A pipe in place of a weights file: loading waits for as long as the test likes.
    folder = run_dir / "slow"
    folder.mkdir()
    for file in model_folder("qwen3").iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    os.mkfifo(folder / "config.json")
    with Gateway(run_dir, folder) as gateway:
        gateway.reachable()
        gateway.expect(Loading)
        assert gateway.pong(1).stats.running == 0
        request = endless()
        gateway.send(request)
        rejected = gateway.expect(Rejected)
        assert (rejected.rid, rejected.failure.code) == (request.rid, Code.BUSY)
        assert rejected.failure.is_retryable
        gateway.send(Drain(1.0))
        assert gateway.expect(Drained).aborted == 0
        gateway.send(Shutdown())
        assert gateway.exit_status() == ExitStatus.OK


def test_a_model_that_cannot_be_loaded_is_told_and_not_worth_another_start(run_dir: Path) -> None:
    with Gateway(run_dir, run_dir / "nothing") as gateway:
        goodbye = gateway.expect(Goodbye)
        assert goodbye.failure is not None
        assert goodbye.failure.code is Code.MODEL_MISSING
        assert gateway.exit_status() == ExitStatus.MODEL_UNUSABLE
        assert "nothing" in gateway.stderr()


def test_a_model_without_text_that_is_to_be_kept_warm_is_refused(run_dir: Path) -> None:
    with Gateway(run_dir, "demo", kind="embed", keep_warm_s=300.0) as gateway:
        goodbye = gateway.expect(Goodbye)
        assert goodbye.failure is not None
        assert goodbye.failure.code is Code.BAD_CONFIG
        assert goodbye.failure.message == "keep_warm is for models that generate text"


@pytest.mark.parametrize(
    "spec",
    [
        "{",
        "{}",
        '{"name": 5}',
        '{"name": "m", "path": "p", "epoch": 1, "down": "ipc://d", "up": "ipc://u", "no_such_key": 1}',
        '{"name": "m", "path": "p", "epoch": 1, "down": "ipc://d", "up": "ipc://u", "log_level": "loud"}',
        '{"name": "m", "path": "p", "epoch": 1, "down": "ipc://d", "up": "ipc://u", "max_running": -1}',
        '{"name": "m", "path": "p", "epoch": 1, "down": "ipc://d", "up": "ipc://u", "prefill_chunk": 0}',
    ],
)
def test_a_bad_spec_is_a_mistake_of_the_configuration(run_dir: Path, spec: str) -> None:
    process = start(spec, run_dir)
    assert process.wait(patient(TIMEOUT_S)) == ExitStatus.BAD_CONFIG, (run_dir / "stderr").read_text()
    assert (run_dir / "stderr").read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("MLX_ENABLE_CACHE_THRASHING_CHECK", "0"),
        pytest.param("MLX_MAX_OPS_PER_BUFFER", "20", marks=pytest.mark.skipif(sys.platform != "linux", reason="CUDA")),
    ],
)
@pytest.mark.parametrize("given", [None, "7"])
def test_settings_of_mlx_are_those_of_the_operator_or_ours(name: str, default: str, given: str | None) -> None:
    code = (
        "import os; from protocol.spec import WorkerSpec; from worker.main import _prepare_process;"
        f"_prepare_process(WorkerSpec('m', '', 1, '', '')); print(os.environ[{name!r}])"
    )
    env = {each: value for each, value in os.environ.items() if each != name} | {"PYTHONPATH": str(ROOT)}
    env |= {name: given} if given else {}
    output = subprocess.check_output([sys.executable, "-c", code], env=env, text=True)
    assert output.strip() == (given or default)


def test_an_orphan_ends_its_requests_and_can_be_adopted_and_ends_itself_at_last(
    run_dir: Path, model_folder: Callable[[str], Path]
) -> None:
    with Gateway(run_dir, model_folder("qwen3"), orphan_grace_s=0.3, orphan_max_s=1 + patient(0.2)) as gateway:
        # A load may take longer than that.
        gateway.ready(ping_s=0.1)
        request = running(gateway)
        end = deltas_until_end(gateway, request.rid)[-1]
        assert end.failure is not None
        # A gateway that comes back is served.
        adopted = Generate(next(rids), TextPrompt("kato"), ENDLESS, max_tokens=2)
        gateway.send(Welcome(0, 9, 1.0))
        gateway.send(adopted)
        assert deltas_until_end(gateway, adopted.rid)[-1].finish is Finish.LENGTH
        assert gateway.expect(Goodbye).failure is None
        assert gateway.exit_status() == ExitStatus.OK


@pytest.mark.soak
def test_streams_outlive_a_restart_of_the_gateway(run_dir: Path, model_folder: Callable[[str], Path]) -> None:
    with Gateway(run_dir, model_folder("qwen3")) as gateway:
        gateway.ready()
        request = running(gateway)
        gateway.restart(boot=2)
        hello, ready = gateway.expect(Hello), gateway.expect(Ready)
        assert (hello.epoch, hello.state, ready.epoch) == (3, "ready", 3)
        gateway.expect(Step, lambda step: any(delta.rid == request.rid and delta.text for delta in step.deltas))
        gateway.send(Abort((request.rid,)))
        assert deltas_until_end(gateway, request.rid)[-1].finish is Finish.ABORT


def test_a_worker_outlives_the_reader_of_its_log(run_dir: Path, model_folder: Callable[[str], Path]) -> None:
    """Its standard error is a pipe to a gateway that may die."""
    with Gateway(run_dir, model_folder("qwen3"), has_log_pipe=True) as gateway:
        gateway.ready()
        assert gateway.process.stderr is not None
        gateway.process.stderr.close()
        gateway.send_frame(b"\xc1")
        gateway.send(Dump(1))
        request = Generate(next(rids), TokensPrompt((20, 30)), ENDLESS, max_tokens=4)
        gateway.send(request)
        assert deltas_until_end(gateway, request.rid)[-1].finish is Finish.LENGTH
        gateway.signal(signal.SIGTERM)
        assert gateway.expect(Goodbye).failure is None
        assert gateway.exit_status() == ExitStatus.OK


@pytest.mark.soak
def test_a_worker_whose_gateway_is_gone_for_good_exits(run_dir: Path, model_folder: Callable[[str], Path]) -> None:
    spec = WorkerSpec(
        "test", str(model_folder("qwen3")), 3, f"ipc://{run_dir}/d.sock", f"ipc://{run_dir}/u.sock",
        orphan_grace_s=0.2, orphan_max_s=3.0,
    )  # fmt: skip
    assert start(spec, run_dir).wait(patient(TIMEOUT_S)) == ExitStatus.OK


def test_sigabrt_leaves_the_stacks_behind(run_dir: Path, model_folder: Callable[[str], Path]) -> None:
    with Gateway(run_dir, model_folder("qwen3")) as gateway:
        gateway.ready()
        gateway.signal(signal.SIGABRT)
        assert gateway.exit_status() == -signal.SIGABRT
        assert "Fatal Python error: Aborted" in gateway.stderr()
        assert "worker/engine/loop.py" in gateway.stderr()


@pytest.mark.soak
def test_a_frozen_worker_goes_on_where_it_was(run_dir: Path, model_folder: Callable[[str], Path]) -> None:
    # One token a step: drafts would end the stream before it can be stopped.
    with Gateway(run_dir, model_folder("qwen3"), orphan_grace_s=60.0, speculate="off") as gateway:
        gateway.ready()
        request = Generate(next(rids), TokensPrompt((20, 30)), ENDLESS, max_tokens=1000)
        gateway.send(request)
        gateway.expect(Step, lambda step: bool(step.deltas))
        gateway.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, gateway.process.pid, os.WSTOPPED)
        gateway.send(Ping(5, 0))
        gateway.signal(signal.SIGCONT)
        deltas = deltas_until_end(gateway, request.rid)
        assert deltas[-1].finish is Finish.LENGTH
        # The first token is in the step that was awaited above.
        assert sum(len(delta.token_ids) for delta in deltas) == 999
        gateway.pong(6)
        assert any(isinstance(message, Pong) and message.seq == 5 for message in gateway.seen)

"""Ranks that are gone, stopped, late, of another version or out of step: noticed, named, and before a wrong token."""

import json
import shutil
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from protocol.failures import ExitStatus
from protocol.from_worker import Goodbye, Step
from protocol.to_worker import Generate, Sampling, Shutdown, TextPrompt
from tests.support.engine import EngineHarness, spec
from tests.support.models import build
from tests.support.ranks import ROOT, RunningGroup, group_spec
from tests.support.scale import patient, scaled

PROMPT = "ka to mi ra sen lu por vi " * 12
ASTRAY = ROOT / "tests" / "workers" / "astray.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen2", tmp_path_factory.mktemp("group"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Iterator[list[int]]:
    with EngineHarness(spec(folder, cache_bytes=0, speculate="off")) as engine:
        yield engine.run([request(0)])[0].ids


def request(rid: int) -> Generate:
    sampling = Sampling(temperature=0.7, seed=3, ignore_eos=True)
    return Generate(rid, TextPrompt(PROMPT), sampling, max_tokens=24)


def group_of(run_dir: Path, folder: Path, fault: str = "", **changes: float) -> RunningGroup:
    programs = {1: (str(ASTRAY), fault)} if fault else {}
    return RunningGroup(run_dir, group_spec(folder, "pipeline", cache_bytes=1 << 24), programs, **changes)


def farewell(group: RunningGroup) -> str:
    """The last words of rank 0."""
    goodbye = group.expect(Goodbye)
    assert goodbye.failure is not None
    return f"{goodbye.failure.message} {goodbye.failure.detail}"


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["budget", *scaled(["extra", "other"], [])])
def test_a_follower_out_of_step_is_noticed_before_a_wrong_token_leaves(
    fault: str, run_dir: Path, folder: Path, expected: list[int]
) -> None:
    with group_of(run_dir, folder, fault, step_s=patient(2), first_s=patient(0.5), stuck_s=patient(4)) as group:
        group.ready()
        warm = group.run([request(1)])[0]
        assert warm.ids == expected, "before it went astray"
        group.submit(request(2000))
        assert group.process.wait(patient(60)) == ExitStatus.PARTNER_LOST, group.stderr()
        while group.poll(0.1):
            pass
        deltas = [delta for message in group.seen if isinstance(message, Step) for delta in message.deltas]
        said = [token for delta in deltas if delta.rid == 2000 for token in delta.token_ids]
        assert said == expected[: len(said)]
        assert group.ranks[1].wait(patient(60)) != 0


@pytest.mark.soak
def test_a_slow_follower_is_waited_for_and_one_without_a_lead_ends(
    run_dir: Path, folder: Path, expected: list[int]
) -> None:
    # It hardly runs in one of its plans, for longer than a plan may need: no CPU time is used up.
    slow = {"step_s": 1.0, "first_s": 0.2, "stuck_s": patient(60)}
    with group_of(run_dir, folder, "slow", **slow) as group:
        group.ready()
        assert group.run([request(2000)])[0].ids == expected
        group.process.send_signal(signal.SIGKILL)
        assert group.ranks[1].wait(patient(60)) == ExitStatus.PARTNER_LOST, group.stderr()


def test_a_follower_that_is_stopped_or_hangs_ends_the_group_by_name(run_dir: Path, folder: Path) -> None:
    with group_of(run_dir, folder, beat_s=patient(1.5)) as group:
        group.ready()
        group.ranks[1].send_signal(signal.SIGSTOP)
        assert "rank 1 (local)" in farewell(group)
        assert group.process.wait(patient(60)) == ExitStatus.PARTNER_LOST


def pause(group: RunningGroup, ranks: list[int], seconds: float) -> None:
    """Stop processes for so long, as a machine without time for them does."""
    for rank in ranks:
        group.ranks[rank].send_signal(signal.SIGSTOP)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        group.poll(0.1)
    for rank in ranks:
        group.ranks[rank].send_signal(signal.SIGCONT)


@pytest.mark.soak
def test_ranks_that_their_machine_did_not_run_blame_nobody(run_dir: Path, folder: Path, expected: list[int]) -> None:
    with group_of(run_dir, folder, beat_s=2.0, step_s=2.0, first_s=0.5) as group:
        group.ready()
        assert group.run([request(1)])[0].ids == expected
        pause(group, [], 2.0)  # until no plan has run for a while
        pause(group, [0, 1], 6.0)
        assert group.run([request(2)])[0].ids == expected, group.stderr()


@pytest.mark.soak
def test_a_rank_that_is_stopped_for_less_than_its_silence_may_last_is_not_gone(
    run_dir: Path, folder: Path, expected: list[int]
) -> None:
    with group_of(run_dir, folder, beat_s=patient(60)) as group:
        group.ready()
        pause(group, [1], 6.5)  # longer than libzmq has waited for the other end
        assert group.run([request(2)])[0].ids == expected, group.stderr()


@pytest.mark.soak
def test_a_stop_is_clean_although_a_follower_hangs(run_dir: Path, folder: Path) -> None:
    with group_of(run_dir, folder, beat_s=patient(3)) as group:
        group.ready()
        group.ranks[1].send_signal(signal.SIGSTOP)
        group.send(Shutdown())
        assert group.process.wait(patient(60)) == ExitStatus.OK, group.stderr()
        group.ranks[1].send_signal(signal.SIGCONT)
        group.ranks[1].wait(patient(60))


@pytest.mark.soak
def test_a_step_that_takes_too_long_ends_the_group(run_dir: Path, folder: Path) -> None:
    with group_of(run_dir, folder, "hang", step_s=patient(1), first_s=patient(0.5), stuck_s=patient(3)) as group:
        group.ready()
        group.submit(request(2000))
        assert "rank 1 (local)" in farewell(group)
        assert group.process.wait(patient(60)) == ExitStatus.PARTNER_LOST


@pytest.mark.soak
def test_a_rank_that_holds_the_interpreter_is_ended_without_it(run_dir: Path, folder: Path) -> None:
    with group_of(run_dir, folder, "hold", beat_s=patient(3), step_s=patient(4), first_s=patient(1)) as group:
        group.ready()
        group.submit(request(2000))
        assert "rank 1 (local) has been silent" in farewell(group)
        assert group.process.wait(patient(60)) == ExitStatus.PARTNER_LOST
        assert group.ranks[1].wait(patient(60)) == 1
        assert "Timeout" in group.stderr(), "its stacks are in the log"


@pytest.mark.soak
def test_an_absent_follower_is_named_at_the_deadline(run_dir: Path, folder: Path) -> None:
    group = group_of(run_dir, folder, join_s=1.0)
    group.specs = group.specs[:1]
    with group:
        assert "rank 1 (local) did not join in time" in farewell(group)
        assert group.process.wait(patient(60)) == ExitStatus.PARTNER_LOST


@pytest.mark.soak
def test_a_follower_of_another_version_is_refused_by_name(run_dir: Path, folder: Path) -> None:
    with group_of(run_dir, folder, "version") as group:
        assert "rank 1 (local" in (words := farewell(group))
        assert "0.0.9" in words
        assert group.process.wait(patient(60)) == ExitStatus.INCOMPATIBLE


def test_a_follower_with_other_files_is_refused_by_name(run_dir: Path, folder: Path, tmp_path: Path) -> None:
    other = build("qwen2", tmp_path / "other", seed=1, num_hidden_layers=2)
    group = group_of(run_dir, folder)
    group.specs[1] = replace(group.specs[1], path=str(other))
    with group:
        assert "has other files of the model" in farewell(group)
        assert group.process.wait(patient(60)) == ExitStatus.MODEL_UNUSABLE


def with_memory(group: RunningGroup, size_bytes: int) -> RunningGroup:
    """The group, whose rank 1 is on another machine and has so many bytes there; 0 is what is free."""
    for rank, each in enumerate(group.specs):
        assert each.group is not None
        elsewhere = replace(each.group, nodes=("local", "far"))
        group.specs[rank] = replace(each, group=elsewhere, memory_bytes=rank * size_bytes)
    return group


@pytest.mark.soak
def test_a_rank_whose_weights_are_more_than_it_is_given_is_refused(run_dir: Path, folder: Path) -> None:
    with with_memory(group_of(run_dir, folder), 1 << 10) as group:
        assert "the weights of its part take" in farewell(group)
        assert group.process.wait(patient(60)) == ExitStatus.OUT_OF_MEMORY


@pytest.mark.soak
def test_a_rank_that_is_made_to_take_more_than_it_is_given_ends_the_group(run_dir: Path, folder: Path) -> None:
    # It is more than Python and MLX take, and less than the fault does.
    with with_memory(group_of(run_dir, folder, "greedy"), 256 << 20) as group:
        group.ready()
        assert group.run([request(1)])[0].terminals, "within it"
        group.submit(request(2000))
        assert "rank 1 of test: it takes" in farewell(group)
        assert group.process.wait(patient(60)) == ExitStatus.PARTNER_LOST


@pytest.mark.soak
def test_a_rank_on_another_machine_refuses_weights_that_its_machine_has_no_memory_for(
    run_dir: Path, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "large", ignore=shutil.ignore_patterns("*.index.json"))
    size = 1 << 40
    header = json.dumps({"more": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "large" / "model-more.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    with with_memory(group_of(run_dir, tmp_path / "large"), 0) as group:
        assert "the weights of its part take 5242" in farewell(group)
        assert group.process.wait(patient(60)) == ExitStatus.OUT_OF_MEMORY


def test_a_port_that_is_taken_is_told_and_worth_another_start(run_dir: Path, folder: Path) -> None:
    group = group_of(run_dir, folder)
    assert group.spec.rank is not None
    port = int(group.spec.rank.plan.rpartition(":")[2])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        group.specs = group.specs[:1]
        with group:
            assert "cannot listen" in farewell(group)
            assert group.process.wait(patient(60)) == ExitStatus.PARTNER_LOST


@pytest.mark.soak
def test_heads_that_the_ranks_do_not_divide_are_refused_before_a_rank_joins(run_dir: Path, tmp_path: Path) -> None:
    folder = build("qwen3", tmp_path / "model", num_hidden_layers=1, num_key_value_heads=1)
    with RunningGroup(run_dir, group_spec(folder, "tensor")) as group:
        assert "num_key_value_heads = 1 cannot be divided by 2 ranks" in farewell(group)
        assert group.process.wait(patient(60)) == ExitStatus.BAD_CONFIG

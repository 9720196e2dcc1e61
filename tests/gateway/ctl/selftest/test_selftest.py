"""The self-test as a whole: its runner, its report, and its cheap steps on this machine."""

import json
import os
import plistlib
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from msgspec import structs

from gateway.command_failed import CommandFailed
from gateway.ctl.selftest.gather import doctor, launch_agent
from gateway.ctl.selftest.report import StepResult, markdown, report_of, without_paths
from gateway.ctl.selftest.selftest_verb import TOTAL_S, run_steps
from gateway.ctl.selftest.steps import HAND, MAC, STEPS, SelftestStep
from gateway.ctl.selftest.trial import (
    StepTimeout,
    TimedMachine,
    Trial,
    at_home,
    trial,
    worker_pids,
    write_divisible_demo,
)
from gateway.ctl.selftest.verdicts import StepVerdict
from gateway.model_files.metadata import find
from gateway.service.installer import RealMachine
from tests.support.ctl import ctl
from tests.support.daemon import is_running
from tests.support.pool import short_home
from tests.support.scale import patient

DEADLINE_S = 20
PASSED = StepVerdict("passed", "well")


class Answering(RealMachine):
    """A machine whose commands answer what a test gives by their first words."""

    def __init__(self, **answers: str) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def run(self, argv: tuple[str, ...]) -> tuple[int, str]:
        self.asked.append(" ".join(argv))
        return 0, self.answers.get(Path(argv[0]).name, "")


# httpcore2 leaves the socket of a refused connection to the garbage collector.
refuses_connections = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def step(name: str, gather: Callable[[Trial], None], **fields: object) -> SelftestStep:
    made = SelftestStep(name, "a subject", "a file", "shows", ("darwin", "linux"), gather, lambda _: PASSED)
    return structs.replace(made, **fields)


def idle(trial: Trial) -> None:
    trial.note("idle", "yes")


def wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + patient(DEADLINE_S)
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


def tensors(file: Path) -> dict[str, mx.array]:
    loaded: Any = mx.load(str(file))
    return loaded


def outcomes(results: list[StepResult]) -> list[tuple[str, str]]:
    return [(result.name, result.outcome) for result in results]


def test_a_step_that_breaks_has_failed_and_the_next_one_runs(tmp_path: Path) -> None:
    def refuse(_: Trial) -> None:
        raise CommandFailed("mlxd does not run")

    def break_down(trial: Trial) -> None:
        idle(trial)
        raise KeyError("pid")

    trial = Trial(tmp_path, Answering(), "linux")
    results = list(run_steps([step("a", refuse), step("b", break_down), step("c", idle)], trial))

    assert outcomes(results) == [("a", "failed"), ("b", "failed"), ("c", "passed")]
    assert [result.text for result in results] == ["mlxd does not run", "KeyError: 'pid'", "well"]
    assert [result.evidence.text("idle") for result in results] == ["", "yes", "yes"]


def test_steps_of_another_system_and_those_without_time_are_skipped_with_the_reason(tmp_path: Path) -> None:
    times = iter([0.0, 1.0, 1.0, 2.0, TOTAL_S])
    trial = Trial(tmp_path, Answering(), "linux")
    steps = [step("mac", idle, platforms=MAC), step("early", idle), step("late", idle)]
    results = list(run_steps(steps, trial, clock=lambda: next(times)))

    assert outcomes(results) == [("mac", "skipped"), ("early", "passed"), ("late", "skipped")]
    assert "macOS" in results[0].text
    assert "mlxctl selftest late" in results[2].text


def test_a_step_that_waits_beyond_its_limit_fails(tmp_path: Path) -> None:
    def wait(trial: Trial) -> None:
        trial.until(lambda: False)

    (result,) = run_steps([step("never", wait, limit_s=0.01)], Trial(tmp_path, Answering(), "linux"))

    assert (result.outcome, "in time" in result.text) == ("failed", True)


def test_a_command_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 600 & echo $! $$ > {pids}.new; mv {pids}.new {pids}; wait"

    class Late(TimedMachine):
        """Its time is over as soon as both processes exist."""

        @property
        def deadline(self) -> float:  # type: ignore[override]
            wait_until(pids.exists)
            return time.monotonic()

    with pytest.raises(StepTimeout, match="in time"):
        Late().run(("/bin/sh", "-c", script))

    for pid in map(int, pids.read_text().split()):
        wait_until(lambda pid=pid: not is_running(pid))


def test_a_mac_step_asks_its_injected_machine_and_is_judged_by_its_answers(tmp_path: Path) -> None:
    machine = Answering(sysctl="0\n", pmset=" hibernatemode 3\n sleep                1\n")
    trial = Trial(tmp_path, machine, "darwin")
    (result,) = run_steps([next(each for each in STEPS if each.gather is doctor)], trial)

    assert machine.asked == ["/usr/sbin/sysctl -n iogpu.wired_limit_mb", "/usr/bin/pmset -g"]
    assert result.outcome == "passed"
    # What is not needed is not kept.
    assert result.evidence.text("pmset").split() == ["sleep", "1"]


def test_an_agent_that_fails_is_removed_and_never_has_the_users_label(tmp_path: Path) -> None:
    class Refusing(Answering):
        def run(self, argv: tuple[str, ...]) -> tuple[int, str]:
            super().run(argv)
            return (5, "Bootstrap failed: 5: Input/output error") if "bootstrap" in argv else (0, "")

    machine = Refusing()
    (result,) = run_steps([step("launchd", launch_agent)], Trial(tmp_path, machine, "darwin"))

    assert result.outcome == "failed"
    assert "Bootstrap failed" in result.text
    words = [command for command in machine.asked if command.startswith("launchctl")]
    assert words[-2].startswith("launchctl bootout gui/")
    assert all("dev.mlxd.selftest" in command for command in words)
    assert not list(tmp_path.rglob("*.plist"))
    assert not (tmp_path / "agent" / "current").is_symlink()


class PlayedLaunchd(RealMachine):
    """A launchd of one job: it starts the job again if it failed, as `KeepAlive` asks."""

    def __init__(self) -> None:
        self.job: dict[str, Any] = {}
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, argv: tuple[str, ...]) -> tuple[int, str]:
        if argv[0] != "launchctl":
            return super().run(argv)
        match argv[1]:
            case "bootstrap":
                self.job = plistlib.loads(Path(argv[3]).read_bytes())
                self._start()
            case "enable":
                pass
            case _ if self.process is None:
                return 113, "Could not find service"
            case "bootout":
                self.process.terminate()
                self.process.wait(patient(DEADLINE_S))
                self.process = None
            case "kill":
                self.process.send_signal(signal.Signals[argv[2]])
            case "kickstart":
                self._start()
            case "print" if self.process.poll() == 0:
                return 0, "\tstate = not running\n"
            case "print":
                if self.process.poll() is not None:
                    self._start()
                return 0, f"\tstate = running\n\tpid = {self.process.pid}\n"
            case _:
                pass
        return 0, ""

    def _start(self) -> None:
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(
            self.job["ProgramArguments"],
            env=self.job["EnvironmentVariables"],
            stdout=quiet,
            stderr=quiet,
            start_new_session=True,
        )


@refuses_connections
def test_an_agent_under_a_played_launchd_keeps_its_worker_and_leaves_nothing() -> None:
    launchd = next(each for each in STEPS if each.gather is launch_agent)
    with short_home() as root:
        (result,) = run_steps(
            [structs.replace(launchd, limit_s=patient(launchd.limit_s))], Trial(root, PlayedLaunchd(), "darwin")
        )
        assert result.outcome == "passed", result
        assert not list(root.rglob("*.plist"))


def test_a_report_has_neither_the_users_paths_nor_the_trials(tmp_path: Path) -> None:
    home, root = Path("/Users/me"), Path("/tmp/mlxd-abc")
    text = "a|b /Users/me/env/bin/python3 /Users/meta /private/tmp/mlxd-abc/home /tmp/mlxd-abc"
    report = report_of([StepResult("launchd", "failed", text, 1.0)], "darwin")

    shown = markdown(report, (home, root))

    assert r"| launchd | failed | a\|b ~/env/bin/python3 /Users/meta TRIAL/home TRIAL | 1.0 |" in shown
    assert without_paths(shown, (home, root)) == shown
    assert json.loads(shown.partition("```json\n")[2].partition("```")[0])["results"][0]["name"] == "launchd"
    assert all(row.subject in shown for row in HAND)
    assert (report.is_good, report.summary) == (False, f"0 passed, 1 failed, 0 skipped, {len(HAND)} need you")


def test_the_demo_for_two_ranks_is_the_demo_with_heads_of_zeros(tmp_path: Path) -> None:
    folder = write_divisible_demo(tmp_path / "ring")

    config = json.loads((folder / "config.json").read_bytes())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (8, 4)
    plain, padded = (tensors(path / "model.safetensors") for path in (find("demo"), folder))
    assert plain.keys() == padded.keys()
    for name, tensor in padded.items():
        rows, columns = plain[name].shape[0], plain[name].shape[-1]
        same = tensor[:rows, :columns] if tensor.ndim == 2 else tensor
        assert mx.array_equal(same, plain[name])
        assert tensor.ndim == 1 or mx.sum(mx.abs(tensor)).item() == mx.sum(mx.abs(plain[name])).item()


def test_cheap_steps_pass_on_this_machine_which_is_left_as_it_was(tmp_path: Path) -> None:
    with short_home() as home:
        report = home / "report.md"
        steps = ("socket-paths", "footprint", "boot-id", "peer", "page", "adoption", "memory-returned")
        done = ctl(home, "selftest", *steps, "--json", "--report", str(report))

        results = {each["name"]: each for each in json.loads(done.stdout)["results"]}
        assert {name: each["outcome"] for name, each in results.items()} == dict.fromkeys(steps, "passed"), done.stdout
        assert done.returncode == 0
        assert "7 passed, 0 failed, 0 skipped" in report.read_text()
        assert str(Path.home()) not in report.read_text()
        # The home of the user has no daemon, log or state of it.
        assert sorted(path.name for path in home.iterdir()) == ["report.md", "run"]
    evidence = {each["name"]: each["text"] for each in results["adoption"]["evidence"]["texts"]}
    assert not is_running(int(evidence["worker after"]))


@refuses_connections
def test_a_trial_leaves_no_folder_and_no_worker() -> None:
    with trial(RealMachine()) as running:
        root, pid = running.root, running.loaded().pid
        assert (root / "home").is_dir()

    assert not root.exists()
    wait_until(lambda: not is_running(pid))


def test_a_step_that_does_not_exist_and_a_report_that_cannot_be_written_are_errors_at_once(tmp_path: Path) -> None:
    unknown = ctl(tmp_path, "selftest", "footprnt")
    unwritable = ctl(tmp_path, "selftest", "boot-id", "--report", str(tmp_path / "none" / "report.md"))

    assert (unknown.returncode, unwritable.returncode) == (1, 1)
    assert "there is no step 'footprnt'; there are socket-paths, footprint" in unknown.stderr
    assert "cannot be written" in unwritable.stderr


def test_the_home_of_this_process_is_its_own_again_after_a_trial(tmp_path: Path) -> None:
    before = os.environ.get("MLXD_HOME")
    with at_home(tmp_path):
        assert os.environ["MLXD_HOME"] == str(tmp_path)
    assert os.environ.get("MLXD_HOME") == before
    assert worker_pids(tmp_path) == []

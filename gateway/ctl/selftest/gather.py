"""Steps of the self-test: each function acts on the trial and notes its observations."""

import json
import os
import pwd
import re
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import httpx2
import psutil

from gateway.command_failed import CommandFailed
from gateway.control_types import CommandDone, UiCode
from gateway.ctl import client, offline
from gateway.ctl.chat_verbs import running_daemon
from gateway.ctl.selftest import verdicts
from gateway.ctl.selftest.trial import Trial, at_home
from gateway.service import launchd
from gateway.service.description import Scope, Service
from gateway.service.installer import Installation, Owner, carry_out, launcher
from gateway.state_dir import admin_socket
from gateway.workers.power import LINGER_S
from protocol.sockets import IPC_PATH_MAX

SYSCTL: Final = ("/usr/sbin/sysctl", "-n")
# Label of the agent that the self-test installs; the user's has another.
AGENT_LABEL: Final = "dev.mlxd.selftest"
AGENT_CONFIG: Final = '[server]\nport = 0\n[models.demo]\npath = "demo"\n'

Gather = Callable[[Trial], None]

# Longer than `DISK_MIN_TOKENS`, below which prefixes stay in memory.
_LONG_PROMPT: Final = "The lighthouse keeper counted ships, and wrote a line about each of them. " * 60
# A few thousand tokens short of the demo model's context.
_WATCHDOG_PROMPT: Final = _LONG_PROMPT * 22
_TOGETHER: Final = 4
_FOOTPRINTS: Final = 15


def socket_paths(trial: Trial) -> None:
    """Start a daemon in the home with the longest path that its sockets allow, and one in a longer home."""
    longest = IPC_PATH_MAX - len("/") - len(str(admin_socket(Path())))
    for name, length in (("longest", longest), ("too long", longest + 1)):
        home = trial.root / ("h" * (length - len(str(trial.root)) - 1))
        home.mkdir(mode=0o700)
        (home / "mlxd.toml").write_text('[server]\nport = 0\n[models.demo]\npath = "demo"\n')
        with at_home(home):
            try:
                with running_daemon(lambda _: None):
                    trial.note(name, f"{len(str(home))} characters: mlxd {client.status().version} answers")
            except CommandFailed as failed:
                trial.note(name, f"{len(str(home))} characters, exit status {failed.status}: {failed}")


def footprint(trial: Trial) -> None:
    """Compare the gateway's figure of an idle worker, and the worker's own, with the system's tool. The three are of
    different moments, so they are taken again until they agree.
    """
    trial.loaded()
    trial.ask("A short story:", 8)
    for _ in range(_FOOTPRINTS):
        _note_footprints(trial)
        if verdicts.footprint(trial.evidence).outcome == "passed":
            return
        trial.until(lambda: False, 1.0)


def _note_footprints(trial: Trial) -> None:
    model = trial.model()
    if trial.platform == "darwin":
        trial.command("/usr/bin/footprint", "-f", "bytes", str(model.pid), keep=lines_of("Footprint:"))
    else:
        trial.command("/bin/cat", f"/proc/{model.pid}/smaps_rollup", name="smaps_rollup")
    trial.note("gateway", model.footprint_bytes)
    trial.note("worker", trial.metrics('mlxd_worker_memory_bytes{kind="phys_footprint",model="demo"}').split()[-1])


def overhead(trial: Trial) -> None:
    """Note the footprint of a worker that has just loaded, and the size of its weights."""
    trial.unload("demo")
    model = trial.loaded()
    trial.note("footprint", model.footprint_bytes)
    trial.note("weights", model.weights_bytes)


def memory_budget(trial: Trial) -> None:
    trial.command(*SYSCTL, "iogpu.wired_limit_mb", name="iogpu.wired_limit_mb")
    trial.command(*SYSCTL, "hw.memsize", name="hw.memsize")
    trial.daemon()
    memory = client.status().memory
    trial.note("budget", memory.budget_bytes if memory is not None else "none")


def wired_limit(trial: Trial) -> None:
    memory_budget(trial)
    trial.loaded()
    trial.ask("A short story:", 8)
    trial.until(lambda: 'kind="wired_limit",model="demo"} 0.0' not in trial.metrics("mlxd_worker_memory_bytes"), 10)
    trial.note("metrics", "\n".join(_containing(trial.metrics("mlxd_worker_memory_bytes"), 'kind="wired_limit"')))
    trial.note("log", "\n".join(trial.log_lines("wired limit:")))


def doctor(trial: Trial) -> None:
    trial.command(*SYSCTL, "iogpu.wired_limit_mb", name="iogpu.wired_limit_mb")
    trial.command("/usr/bin/pmset", "-g", keep=lines_of(" sleep "))


def boot_identifier(trial: Trial) -> None:
    if trial.platform == "darwin":
        trial.command(*SYSCTL, "kern.bootsessionuuid", name="boot id")
        trial.command(*SYSCTL, "kern.bootsessionuuid", name="again")
    else:
        trial.command("/bin/cat", "/proc/sys/kernel/random/boot_id", name="boot id")
        trial.command("/bin/cat", "/proc/sys/kernel/random/boot_id", name="again")


def peer_credentials(trial: Trial) -> None:
    trial.loaded()
    trial.note("caller", json.dumps({"uid": os.getuid(), "pid": os.getpid()}))
    trial.mlxctl("logs", "--audit", "--json", "-n", "1", "demo")


def open_page(trial: Trial) -> None:
    """Log in to the page: by the browser that `open` starts on a Mac, else by a request."""
    trial.daemon()
    link = client.post("/v1/ui/code", {}, UiCode)
    page = httpx2.get(link.url.partition("#")[0], timeout=trial.left_s, trust_env=False, follow_redirects=True)
    trial.note("page", f"{page.status_code} {page.headers.get('content-type', '')}, {len(page.content)} bytes")
    if trial.platform == "darwin":
        status, output = trial.machine.run(("/usr/bin/open", link.url))
        trial.note("open", f"exit status {status} {output.replace(link.url, 'URL')}")
    else:
        origin = link.url.partition("/ui")[0]
        httpx2.post(
            f"{origin}/ui/api/session",
            json={"code": link.code},
            headers={"origin": origin},
            timeout=trial.left_s,
            trust_env=False,
        )
    trial.until(lambda: "ui.login" in _audit(trial), 20)
    trial.note("audit", "\n".join(_containing(_audit(trial), "ui.login")))


def desktop(trial: Trial) -> None:
    """Run the tools that tell whether a person uses the Mac."""
    ioreg = ("/usr/sbin/ioreg", "-r", "-d", "1")
    trial.command(*ioreg, "-c", "IOHIDSystem", name="IOHIDSystem", keep=lines_of("HIDIdleTime"))
    trial.command(*ioreg, "-n", "IODisplayWrangler", name="IODisplayWrangler", keep=lines_of("CurrentPowerState"))
    trial.command("/usr/bin/pmset", "-g", "batt", name="pmset -g batt", keep=lines_of("drawing from"))
    trial.command("/usr/bin/pmset", "-g", "therm", name="pmset -g therm")


def awake(trial: Trial) -> None:
    """Note the daemon's sleep assertion after a request, when it is over, and after `kill -9` of the daemon."""
    for name, ended in (("after linger", ""), ("after kill", "kill")):
        trial.loaded()
        trial.ask("A short story:", 64)
        trial.until(lambda: bool(_caffeinate(trial)), 5)
        pids = _caffeinate(trial)
        trial.note(f"caffeinate {name}", " ".join(map(str, pids)) or "none")
        _note_assertions(trial, f"held {name}", pids)
        if ended:
            trial.end_daemon(signal.SIGKILL)
        trial.until(lambda pids=pids: not any(map(offline.is_running, pids)), 5 if ended else LINGER_S + 10)
        _note_assertions(trial, f"released {name}", pids)


def exit_watch(trial: Trial) -> None:
    pid = trial.loaded().pid
    before = _killed_workers(trial)
    trial.note("killed at", time.time())
    os.kill(pid, signal.SIGKILL)
    trial.until(lambda: len(_killed_workers(trial)) > len(before), 20)
    trial.note("log", "\n".join(_killed_workers(trial)[len(before) :]))


def idle_sigterm(trial: Trial) -> None:
    pid = trial.loaded().pid
    begin = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    is_gone = trial.until(lambda: not offline.is_running(pid), 20)
    trial.note("seconds", f"{time.monotonic() - begin:.2f}" if is_gone else "it still runs")


def adoption(trial: Trial) -> None:
    """Kill the daemon, and note which worker the next one has."""
    trial.note("worker before", trial.loaded().pid)
    trial.note("state before", _state_file(trial))
    trial.end_daemon(signal.SIGKILL)
    trial.loaded()
    trial.note("worker after", trial.model().pid)
    trial.note("state after", _state_file(trial))


def disk_cache(trial: Trial) -> None:
    """Ask the same twice, with another daemon and another worker in between."""
    for name in ("before", "after"):
        trial.loaded()
        answer = trial.ask(_LONG_PROMPT, 16)
        trial.note(f"answer {name}", answer["choices"][0]["text"])
        details = answer["usage"].get("prompt_tokens_details") or {}
        trial.note(f"cached {name}", details.get("cached_tokens", 0))
        trial.end_daemon(signal.SIGTERM)


def memory_returned(trial: Trial) -> None:
    trial.loaded()
    # The ratio is that of the footprint which the gateway has measured before the end.
    trial.until(lambda: trial.model().footprint_bytes > 0, 20)
    trial.note("footprint", trial.model().footprint_bytes)
    trial.unload("demo")
    trial.until(lambda: bool(trial.metrics("mlxd_model_memory_returned_ratio")), 20)
    trial.note("ratio", (trial.metrics('mlxd_model_memory_returned_ratio{model="demo"}').split() or ["none"])[-1])


def quantized_kv(trial: Trial) -> None:
    trial.loaded("quantized")
    trial.note("log", "\n".join(trial.log_lines("KV is kept in", "is dequantized for each step")))
    trial.note("answer", trial.ask("A short story:", 16, "quantized")["choices"][0]["text"])
    trial.unload("quantized")


def timing_profile(trial: Trial) -> None:
    """Let a worker store its timing profile, and start the next one with it."""
    trial.loaded()
    trial.ask("A short story:", 200)
    trial.unload("demo")
    profiles = sorted((trial.home / "state" / "timings").glob("demo-*.json"))
    trial.note("profile", profiles[-1].read_text()[:600] if profiles else "none")
    for name in ("machdep.cpu.brand_string", "kern.osversion"):
        trial.command(*SYSCTL, name, name=name)
    trial.loaded()
    trial.note("log", "\n".join(trial.log_lines("is not used")))


def watchdog(trial: Trial) -> None:
    """Process a prompt that fills most of the demo model's context."""
    trial.loaded()
    usage = trial.ask(_WATCHDOG_PROMPT, 4)["usage"]
    trial.note("prompt tokens", usage["prompt_tokens"])
    trial.note("log", "\n".join(trial.log_lines("ImpactingInteractivity", "ended:")[-3:]))


def launch_agent(trial: Trial) -> None:
    """Install a launch agent with a label of its own, kill its daemon, restart it, and remove it."""
    user = pwd.getpwuid(os.getuid())
    home = trial.root / "agent"
    installation = Installation(home)
    service = Service(
        program=launcher(home),
        home=home,
        user=user.pw_name,
        uid=user.pw_uid,
        # The property list is not among the user's.
        user_home=trial.root / "user",
        scope=Scope.USER,
        label=AGENT_LABEL,
    )
    home.mkdir(mode=0o700)
    (home / "mlxd.toml").write_text(AGENT_CONFIG)
    link = installation.link(Path(sys.prefix), Owner(str(home), user.pw_name))
    try:
        with at_home(home):
            carry_out([*link, *launchd.install(service)], trial.machine)
            workers = [_agent_worker(trial, service, "print", 0)]
            first = launchd.facts(trial.evidence.text("print")).pid
            trial.command("/bin/ps", "-o", "command=", "-p", str(first), name="ps")
            os.kill(first, signal.SIGKILL)
            workers.append(_agent_worker(trial, service, "print after kill", first))
            second = launchd.facts(trial.evidence.text("print after kill")).pid
            carry_out(launchd.restart(service), trial.machine)
            workers.append(_agent_worker(trial, service, "print after restart", second))
            trial.note("workers", " ".join(map(str, workers)))
    finally:
        # What was installed is removed even if the step's time is over.
        trial.extend(service.stop_s)
        carry_out([*launchd.uninstall(service), *installation.unlink()], trial.machine)
    trial.note("print after uninstall", trial.machine.run(launchd.status_command(service))[1])
    left = [path.name for path in (launchd.path(service), home / "current") if path.is_symlink() or path.exists()]
    left += [f"process {pid}" for pid in {*workers} if offline.is_running(pid)]
    trial.note("left", ", ".join(left) or "nothing")


def ranks(trial: Trial) -> None:
    """Ask a group of two ranks alone and together, then stop one of its ranks."""
    trial.unload("demo")
    status = trial.loaded("ranks")
    prompts = [f"Story number {number}:" for number in range(_TOGETHER)]

    def answer(prompt: str) -> str:
        return trial.ask(prompt, 12, "ranks")["choices"][0]["text"]

    alone = [answer(prompt) for prompt in prompts]
    with ThreadPoolExecutor(_TOGETHER) as threads:
        together = list(threads.map(answer, prompts))
    trial.note("alone", json.dumps(alone))
    trial.note("together", json.dumps(together))
    pids = [rank.pid for rank in status.group.ranks] if status.group is not None else []
    trial.note("ranks", " ".join(map(str, pids)))
    begin = time.monotonic()
    os.kill(pids[-1], signal.SIGSTOP)
    is_ended = trial.until(lambda: not any(map(offline.is_running, pids)), 30)
    trial.note("ended after", f"{time.monotonic() - begin:.1f} s" if is_ended else "it still runs")
    trial.unload("ranks")


def tokens_of(path: str) -> Gather:
    """Return a step's function that verifies one model in a process of its own."""

    def verify(trial: Trial) -> None:
        trial.mlxctl("verify", path, "--tokens", "8", "--json")

    return verify


def lines_of(word: str) -> Callable[[str], str]:
    """Return a function that keeps the lines of an output that contain a word: others are not for a report."""
    return lambda output: "\n".join(_containing(output, word))


def _containing(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if word in line]


def _audit(trial: Trial) -> str:
    try:
        return (trial.home / "logs" / "audit.log").read_text()
    except FileNotFoundError:
        return ""


def _caffeinate(trial: Trial) -> list[int]:
    daemon = psutil.Process(trial.daemon().pid)
    return [child.pid for child in daemon.children() if child.name() == "caffeinate"]


def _note_assertions(trial: Trial, name: str, pids: list[int]) -> None:
    # The other lines name programs of the user.
    ours = re.compile(rf"\bpid ({'|'.join(map(str, pids)) or 'none'})\(")
    trial.command(
        *("/usr/bin/pmset", "-g", "assertions"),
        name=name,
        keep=lambda output: "\n".join(line for line in output.splitlines() if ours.search(line)) or "no line of it",
    )


def _killed_workers(trial: Trial) -> list[str]:
    return [line for line in trial.log_lines("worker demo#") if " ended: " in line and "SIGKILL" in line]


def _state_file(trial: Trial) -> str:
    state = json.loads((trial.home / "run" / "workers" / "demo.json").read_bytes())
    return json.dumps({key: state[key] for key in ("pid", "epoch", "start_ticks")})


def _agent_worker(trial: Trial, service: Service, name: str, before: int) -> int:
    """Wait for a daemon of the agent other than `before`, note launchd's output, and return the model's worker."""

    def is_new() -> bool:
        pid = launchd.facts(trial.machine.run(launchd.status_command(service))[1]).pid
        daemon = offline.daemon()
        return pid not in (0, before) and daemon is not None and daemon.pid == pid

    trial.until(is_new)
    trial.command(*launchd.status_command(service), name=name, keep=_of_launchd)
    client.post("/v1/models/load", {"model": "demo"}, CommandDone)
    return trial.model().pid


def _of_launchd(output: str) -> str:
    return "\n".join(line for line in output.splitlines() if re.match(r"\s*(state|pid|last exit code|path) = ", line))

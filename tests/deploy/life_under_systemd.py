"""An operator's actions on the service under systemd, step by step, with results. Inside of systemd_box.sh only."""

import json
import os
import pwd
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

HOME = Path("/home/mlxd/.mlxd")
UNIT = Path("/etc/systemd/system/mlxd.service")
URL = "http://127.0.0.1:8484"
DEADLINE_S = 90.0
IN_THE_BOX = Path("/run/mlxd-box")


def main() -> None:
    """Every step; the first that is not as it should be ends it."""
    # It makes users and changes modes: never outside of the box.
    if not IN_THE_BOX.exists():
        sys.exit("life_under_systemd.py runs inside of systemd_box.sh only")
    prepare()
    install()
    worker, daemon = serve_and_find()
    worker, daemon = survive_a_kill(worker, daemon)
    restart_with_models(worker, daemon)
    stop_and_start(only_worker())
    uninstall()


def prepare() -> None:
    # The environment's python may lie below /root, where the service's user could not look.
    for folder in (Path(sys.base_prefix), *Path(sys.base_prefix).parents, *Path(sys.prefix).parents):
        folder.chmod(folder.stat().st_mode | 0o055)
    run("useradd", "--system", "--create-home", "mlxd")
    HOME.mkdir()
    (HOME / "mlxd.toml").write_text('[models.demo]\naliases = ["default"]\n')
    os.chown(HOME, pwd.getpwnam("mlxd").pw_uid, -1)
    os.environ["MLXD_HOME"] = str(HOME)


def install() -> None:
    run(*ctl("service", "install", "--system", "--run-as", "mlxd"))
    assert run("systemctl", "is-enabled", "mlxd").strip() == "enabled"
    wait_for(lambda: status() is not None, "the daemon answers")
    say("installed and enabled", f"pid {main_pid()}, as {owner(main_pid())}")


def serve_and_find() -> tuple[int, int]:
    ask()
    worker = only_worker()
    assert owner(worker) == owner(main_pid()) == "mlxd"
    say("answers", f"worker {worker} of daemon {main_pid()}")
    return worker, main_pid()


def survive_a_kill(worker: int, daemon: int) -> tuple[int, int]:
    os.kill(daemon, signal.SIGKILL)
    began = time.monotonic()
    wait_for(lambda: main_pid() not in (0, daemon) and status() is not None, "systemd starts another daemon")
    wait_for(lambda: only_worker(default=0) == worker, "it adopts the worker")
    ask()
    assert only_worker() == worker
    say("kill -9 of the daemon", f"{daemon} -> {main_pid()} in {time.monotonic() - began:.1f} s, worker still {worker}")
    return worker, main_pid()


def restart_with_models(worker: int, daemon: int) -> None:
    run(*ctl("service", "restart", "--system"))
    wait_for(lambda: main_pid() not in (0, daemon) and status() is not None, "the next daemon answers")
    wait_for(lambda: only_worker(default=0) == worker, "it adopts the worker")
    ask()
    say("service restart", f"{daemon} -> {main_pid()}, worker still {worker}")


def stop_and_start(worker: int) -> None:
    run(*ctl("service", "stop", "--system"))
    assert main_pid() == 0
    assert not Path(f"/proc/{worker}").exists(), "a stop ends the workers"
    assert "inactive" in run(*ctl("service", "status", "--system"), expect=3)
    run(*ctl("service", "start", "--system"))
    wait_for(lambda: status() is not None, "the daemon answers")
    ask()
    say("stop, start", f"worker {worker} has ended, now {only_worker()}")


def uninstall() -> None:
    run(*ctl("service", "uninstall", "--system"))
    assert not UNIT.exists()
    # The tests' own interpreter is the only other one here.
    left = run("sh", "-c", "ps -u mlxd -o args= || true")
    assert left.strip() == "", left
    say("uninstalled", "no unit, no process; the home is still there" if HOME.exists() else "the home is gone")
    assert HOME.exists()


def ctl(*words: str) -> list[str]:
    return [sys.executable, "-P", "-c", "from gateway.ctl import main; main()", *words]


def run(*argv: str, expect: int = 0) -> str:
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=150, check=False)
    if done.returncode != expect:
        journal = "\n".join(path.read_text()[-3000:] for path in HOME.glob("logs/*.log"))
        sys.exit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout}\n{journal}")
    return done.stdout


def status() -> dict[str, object] | None:
    done = subprocess.run(ctl("status", "--json"), capture_output=True, text=True, timeout=60, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else None


def only_worker(default: int | None = None) -> int:
    found = status()
    models = found["models"] if found else []
    assert isinstance(models, list)
    pids = [model["pid"] for model in models if model["pid"] and model["state"] == "ready"]
    if len(pids) != 1 and default is not None:
        return default
    assert len(pids) == 1, found
    return pids[0]


def main_pid() -> int:
    return int(run("systemctl", "show", "--property=MainPID", "--value", "mlxd"))


def owner(pid: int) -> str:
    return pwd.getpwuid(Path(f"/proc/{pid}").stat().st_uid).pw_name


def ask() -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    request = urllib.request.Request(
        f"{URL}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        assert json.load(response)["usage"]["completion_tokens"] > 0


def wait_for(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not is_so():
        if time.monotonic() > end:
            run("systemctl", "status", "--no-pager", "mlxd")
            sys.exit(f"not within {DEADLINE_S:.0f} s: {what}")
        time.sleep(0.1)


def say(step: str, seen: str) -> None:
    print(f"{step}: {seen}", flush=True)


if __name__ == "__main__":
    main()

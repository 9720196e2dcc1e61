"""A daemon process of its own, in a home of its own."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Self

import httpx2
import psutil

from tests.support.scale import patient

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20


class DaemonProcess:
    """Starts `module` in `home` and finds its port in its log. Kills it and its workers at the end."""

    def __init__(
        self,
        home: Path,
        *args: str,
        module: str = "tests.support.scripted_daemon",
        files: int | None = None,
        code: Path = ROOT,
        program: Path | None = None,
    ) -> None:
        """With `files` it and its workers may have so many open files, and no more. `code` may be another version's.

        `program` is an installed one, which is started outside of any checkout.
        """
        self.home = home
        self.log = home / "stderr"
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [program, *args] if program else [sys.executable, "-m", module, *args],
                cwd=home if program else code,
                env=os.environ | {"MLXD_HOME": str(home)} | ({} if program else {"PYTHONPATH": str(code)}),
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=partial(resource.setrlimit, resource.RLIMIT_NOFILE, (files, files)) if files else None,
            )

    def __enter__(self) -> Self:
        self.url = self._wait_for_url()
        self.client = httpx2.Client(base_url=self.url, timeout=patient(DEADLINE_S))
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        workers = self.worker_pids()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in workers:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)

    def complete(self, prompt: str = "hi", model: str = "a", max_tokens: int = 5) -> httpx2.Response:
        return self.client.post("/v1/completions", json={"model": model, "prompt": prompt, "max_tokens": max_tokens})

    def worker_pids(self) -> list[int]:
        """From the state files: what a next daemon would find."""
        pids: list[int] = []
        for path in (self.home / "run" / "workers").glob("*.json"):
            with suppress(FileNotFoundError):  # its worker has just ended
                pids.append(json.loads(path.read_bytes())["pid"])
        return pids

    def kill(self) -> None:
        """SIGKILL: nothing is said to anybody."""
        self.process.kill()
        self.process.wait()

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        return self.process.wait(patient(deadline_s))

    def new_log(self) -> str:
        return self.log.read_bytes()[self._log_start :].decode(errors="replace")

    def _wait_for_url(self) -> str:
        end = time.monotonic() + patient(DEADLINE_S)
        while time.monotonic() < end and self.process.poll() is None:
            if found := re.search(r"mlxd serves .* on (https?://[^\"\s]+)", self.new_log()):
                return found[1]
            time.sleep(0.02)
        self.process.kill()
        self.process.wait()
        raise AssertionError(f"the daemon did not start:\n{self.new_log()}")


def is_running(pid: int) -> bool:
    """An orphan that nobody has reaped yet does not run."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def refuse_journals(home: Path) -> None:
    """Let the folder of journals of background responses be a file, so that no journal can be written."""
    (home / "state").mkdir(mode=0o700, exist_ok=True)
    (home / "state" / "background").touch()


def write_config(home: Path, models: Sequence[str] = ("a", "b"), *, server: str = "", model: str = "") -> None:
    tables = "".join(f'[models.{name}]\npath = "demo"\n{model}\n' for name in models)
    (home / "mlxd.toml").write_text(f"[server]\nport = 0\n{server}\n{tables}")


def stream_text(lines: Sequence[str]) -> str:
    """The text of a completions stream, from its `data:` lines."""
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for event in events if "choices" in event for choice in event["choices"])

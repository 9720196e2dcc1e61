"""Trial of a self-test: a home, a daemon and a deadline of its own. Nothing of it is left at the end.

The demo model with attention heads that two ranks can divide.

The demo has three KV heads. A fourth one of zeros, with its queries, adds nothing to any output: `o_proj` multiplies
it by zeros.
"""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self

import httpx2

from gateway.command_failed import CommandFailed
from gateway.control_types import CommandDone, DaemonStatus, ModelStatus
from gateway.ctl import client, offline
from gateway.ctl.chat_verbs import running_daemon
from gateway.ctl.selftest.verdicts import EvidenceText, StepEvidence
from gateway.model_files.metadata import find
from gateway.service.installer import InstallMachine, RealMachine
from gateway.state_dir import default_home, log_path, run_dir
from gateway.workers.supervisor.registry import Registry

_WEIGHTS: Final = "model.safetensors"
_HEAD_COUNTS: Final = ("num_attention_heads", "num_key_value_heads")
_HEADER_LENGTH: Final = struct.Struct("<Q")


def write_divisible_demo(folder: Path) -> Path:
    """Write the model into a new folder, and return the folder."""
    source = find("demo")
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(source / name, folder / name)
    config = json.loads((source / "config.json").read_bytes())
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    added = {"q_proj": group * config["head_dim"], "k_proj": config["head_dim"], "v_proj": config["head_dim"]}
    more = dict(zip(_HEAD_COUNTS, (config[_HEAD_COUNTS[0]] + group, config[_HEAD_COUNTS[1]] + 1), strict=True))
    (folder / "config.json").write_text(json.dumps(config | more))
    (folder / _WEIGHTS).write_bytes(_padded((source / _WEIGHTS).read_bytes(), added))
    return folder


def _padded(weights: bytes, added: dict[str, int]) -> bytes:
    """Add rows of zeros to the projections that are named, and as many columns as `q_proj` gets rows to `o_proj`."""
    (length,) = _HEADER_LENGTH.unpack_from(weights)
    start = _HEADER_LENGTH.size + length
    header: dict[str, Any] = json.loads(weights[_HEADER_LENGTH.size : start])
    metadata = header.pop("__metadata__", {})
    parts: list[bytes] = []
    end = 0
    for name, tensor in header.items():
        first, last = tensor["data_offsets"]
        data = weights[start + first : start + last]
        projection = name.split(".")[-2]
        if rows := added.get(projection, 0):
            data += bytes(rows * len(data) // tensor["shape"][0])
            tensor["shape"][0] += rows
        elif projection == "o_proj":
            data = _widened(data, tensor["shape"], added["q_proj"])
            tensor["shape"][1] += added["q_proj"]
        tensor["data_offsets"] = [end, end + len(data)]
        end += len(data)
        parts.append(data)
    text = json.dumps({"__metadata__": metadata} | header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([_HEADER_LENGTH.pack(len(text)), text, *parts])


def _widened(data: bytes, shape: list[int], columns: int) -> bytes:
    rows = shape[0]
    width = len(data) // rows
    zeros = bytes(width // shape[1] * columns)
    return b"".join(data[row * width : (row + 1) * width] + zeros for row in range(rows))


MLXCTL: Final = (sys.executable, "-P", "-c", "from gateway.ctl import main; main()")
POLL_S: Final = 0.05
# One observation has at most this length in a report.
TEXT_MAX: Final = 4000
_CONFIG: Final = """\
[server]
port = 0
log_level = "debug"
[models.demo]
path = "demo"
sampling = {{ temperature = 0.0 }}
[models.quantized]
path = "demo"
kv_bits = 8
[models.ranks]
path = {ring}
group = {{ nodes = ["local", "local"], parallel = "tensor", backend = "ring" }}
"""


class StepTimeout(CommandFailed):
    """A step has taken longer than its limit."""


class TimedMachine(RealMachine):
    """The machine that mlxctl runs on. A command that runs at `deadline` is killed with its children."""

    deadline: float = float("inf")

    def run(self, argv: tuple[str, ...]) -> tuple[int, str]:
        """Run a command, and return its exit status and output. Raises `StepTimeout`."""
        with subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        ) as process:
            try:
                left_s = self.deadline - time.monotonic()
                output, _ = process.communicate(timeout=max(0.0, left_s) if left_s != float("inf") else None)
            except subprocess.TimeoutExpired:
                raise StepTimeout(f"{' '.join(argv[-4:])}: it did not end in time") from None
            finally:
                if process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, output.decode(errors="replace")


class Trial:
    """Home and daemon that the steps share, and the evidence of the running step. Owned by the runner."""

    def __init__(self, root: Path, machine: InstallMachine, platform: str = sys.platform) -> None:
        self.root = root
        self.home = root / "home"
        self.machine = machine
        self.platform = platform
        self._texts: list[EvidenceText] = []
        self._deadline = float("inf")
        self._daemons = ExitStack()

    def __enter__(self) -> Self:
        self.home.mkdir(mode=0o700)
        ring = write_divisible_demo(self.root / "ring")
        (self.home / "mlxd.toml").write_text(_CONFIG.format(ring=json.dumps(str(ring))))
        return self

    def __exit__(self, *_: object) -> None:
        self.begin(float("inf"))
        self._daemons.close()
        for home in (self.home, self.root / "agent"):
            for pid in worker_pids(home):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def begin(self, limit_s: float) -> None:
        """Begin a step: no evidence yet, and a new deadline."""
        self._texts = []
        self.extend(limit_s)

    def extend(self, limit_s: float) -> None:
        """Set the deadline anew, as for the removal of what a step has installed."""
        self._deadline = time.monotonic() + limit_s
        if isinstance(self.machine, TimedMachine):
            self.machine.deadline = self._deadline

    @property
    def left_s(self) -> float:
        """Seconds until the step's deadline. Raises `StepTimeout` after it."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise StepTimeout("the step did not end in time")
        return left_s

    @property
    def evidence(self) -> StepEvidence:
        return StepEvidence(tuple(self._texts))

    def note(self, name: str, text: object) -> None:
        """Add an observation to the step's evidence."""
        self._texts.append(EvidenceText(name, str(text)[-TEXT_MAX:]))

    def command(self, *argv: str, name: str = "", keep: Callable[[str], str] = str) -> str:
        """Run a command and note its output, or the part of it that `keep` returns, by the command's name."""
        status, output = self.machine.run(argv)
        self.note(name or Path(argv[0]).name, keep(output) if status == 0 else f"exit status {status}: {keep(output)}")
        return output

    def mlxctl(self, *words: str) -> str:
        """Run a verb of mlxctl and note its output."""
        return self.command(*MLXCTL, *words, name=f"mlxctl {' '.join(words)}")

    def until(self, is_true: Callable[[], bool], within_s: float = float("inf")) -> bool:
        """Wait until something is true, and return whether it is. Raises `StepTimeout` at the step's deadline."""
        end = time.monotonic() + within_s
        while not is_true():
            if time.monotonic() > end:
                return False
            time.sleep(min(POLL_S, self.left_s))
        return True

    def daemon(self) -> DaemonStatus:
        """Return the status of the trial's daemon, which is started if it does not run."""
        status = offline.daemon()
        if status is None:
            self._daemons.enter_context(running_daemon(lambda _: None))
            status = client.status()
        return status

    def loaded(self, name: str = "demo") -> ModelStatus:
        """Return the status of a model of the trial's daemon, which is loaded if it is not."""
        self.daemon()
        client.post("/v1/models/load", {"model": name}, CommandDone)
        return self.model(name)

    def model(self, name: str = "demo") -> ModelStatus:
        models = {model.name: model for model in client.status().models}
        return models[name]

    def unload(self, name: str) -> None:
        self.daemon()
        client.post("/v1/models/unload", {"model": name}, CommandDone)

    def end_daemon(self, number: signal.Signals) -> None:
        """Send a signal to the daemon, and wait until its process has ended."""
        pid = self.daemon().pid
        os.kill(pid, number)
        self.until(lambda: not offline.is_running(pid))

    def ask(self, prompt: str, max_tokens: int, model: str = "demo") -> dict[str, Any]:
        """Return the answer of a text completion."""
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        response = httpx2.post(f"{self.daemon().url}/v1/completions", json=body, timeout=self.left_s, trust_env=False)
        if response.status_code != 200:
            raise CommandFailed(f"the request ended with {response.status_code}: {response.text[:200]}")
        return response.json()

    def metrics(self, prefix: str) -> str:
        """Return the lines of /metrics that begin with a prefix."""
        text = httpx2.get(f"{self.daemon().url}/metrics", timeout=self.left_s, trust_env=False).text
        return "\n".join(line for line in text.splitlines() if line.startswith(prefix))

    def log_lines(self, *words: str) -> list[str]:
        """Return the lines of the home's log that contain one of the words."""
        try:
            lines = log_path(default_home()).read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        return [line for line in lines if any(word in line for word in words)]


@contextmanager
def trial(machine: InstallMachine, platform: str = sys.platform) -> Generator[Trial, None, None]:
    """Make a trial in a temporary folder, which is this process's MLXD_HOME for as long as the trial lasts."""
    # Paths of sockets must be short, and macOS's own temporary folders are deep.
    with tempfile.TemporaryDirectory(prefix="mlxd-", dir="/tmp") as folder:
        root = Path(folder)
        with at_home(root / "home"), Trial(root, machine, platform) as running:
            yield running


@contextmanager
def at_home(home: Path) -> Generator[None, None, None]:
    """Use another home in this process and in those that it starts."""
    before = os.environ.get("MLXD_HOME")
    os.environ["MLXD_HOME"] = str(home)
    try:
        yield
    finally:
        if before is None:
            del os.environ["MLXD_HOME"]
        else:
            os.environ["MLXD_HOME"] = before


def worker_pids(home: Path) -> list[int]:
    """Return the workers, ranks included, that a daemon of this home has left and that still run."""
    if not run_dir(home).is_dir():
        return []
    survivors = Registry(run_dir(home)).survivors()
    return [process.pid for survivor in survivors for process in (survivor.process, *survivor.ranks)]

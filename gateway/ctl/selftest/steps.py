"""Steps of the self-test, and the rows of docs/macos.md that need a person. `python -m tests.docs.macos_page` writes
that page from them.
"""

from collections.abc import Callable
from typing import Final, Literal

from msgspec import Struct

from gateway.ctl.selftest import gather, verdicts
from gateway.ctl.selftest.trial import Trial
from gateway.ctl.selftest.verdicts import StepEvidence, StepVerdict

Platform = Literal["darwin", "linux"]
BOTH: Final[tuple[Platform, ...]] = ("darwin", "linux")
MAC: Final[tuple[Platform, ...]] = ("darwin",)
TOKENS: Final = "tokens"


class SelftestStep(Struct, frozen=True):
    """One row of docs/macos.md that runs. `gather` observes and `judge` decides.

    `subject` and `where` are the row's columns, `shows` says what a passed step has shown. A step fails if it takes
    longer than `limit_s`.
    """

    name: str
    subject: str
    where: str
    shows: str
    platforms: tuple[Platform, ...]
    gather: Callable[[Trial], None]
    judge: Callable[[StepEvidence], StepVerdict]
    limit_s: float = 60.0


class HandRow(Struct, frozen=True):
    """One row of docs/macos.md that needs a person, root or other hardware. `command` begins it, if one does."""

    subject: str
    where: str
    shows: str
    command: str = ""


def token_step(name: str, path: str) -> SelftestStep:
    """Return the step that verifies one model."""
    return SelftestStep(
        name=f"{TOKENS}:{name}",
        subject="token equality",
        where="`worker/tools/verify`",
        shows="`mlxctl verify`, for the demo and each downloaded or configured model that fits: the same tokens alone, "
        "batched, in chunks, cached, preempted, resumed and with drafts. Metal kernels round by batch shape: a near "
        "tie between two tokens may sometimes change",
        platforms=BOTH,
        gather=gather.tokens_of(path),
        judge=verdicts.tokens,
        limit_s=240.0,
    )


# In the order in which they run: first those that leave the daemon and its worker as they are.
STEPS: Final[tuple[SelftestStep, ...]] = (
    SelftestStep(
        "socket-paths",
        "socket path limit of 103 bytes",
        "`protocol/sockets.py`",
        "a daemon runs in an `MLXD_HOME` of 88 characters (92 on Linux); one more is refused with a clear message",
        BOTH,
        gather.socket_paths,
        verdicts.socket_paths,
    ),
    SelftestStep(
        "footprint",
        "physical footprint by `proc_pid_rusage`",
        "`worker/model/memory.py`, and of other processes `gateway/workers/supervisor/child.py`",
        "both figures equal the output of `footprint PID` (on Linux, of `smaps_rollup`)",
        BOTH,
        gather.footprint,
        verdicts.footprint,
    ),
    SelftestStep(
        "overhead",
        "Metal's own memory in a worker",
        "`OVERHEAD_BYTES` in `gateway/model_files/known_times.py`",
        "the footprint of a worker that has just loaded, less its weights, is under 128 MiB",
        MAC,
        gather.overhead,
        verdicts.overhead,
    ),
    SelftestStep(
        "memory-budget",
        "the memory budget",
        "`gateway/workers/memory/host.py`",
        "`mlxctl status` shows `iogpu.wired_limit_mb`, or three quarters of the RAM",
        MAC,
        gather.memory_budget,
        verdicts.memory_budget,
    ),
    SelftestStep(
        "wired-limit",
        "wired limit",
        "`worker/model/memory.py`",
        "the log at `debug` has the limit that was set; the sum over workers stays below `iogpu.wired_limit_mb`",
        MAC,
        gather.wired_limit,
        verdicts.wired_limit,
    ),
    SelftestStep(
        "doctor",
        "the wired limit and sleep settings of `mlxctl doctor`",
        "`gateway/ctl/doctor/machine_facts.py`, `gateway/ctl/doctor/checks.py`",
        "it reads the output of `sysctl -n iogpu.wired_limit_mb` and `pmset -g`",
        MAC,
        gather.doctor,
        verdicts.doctor,
    ),
    SelftestStep(
        "boot-id",
        "the boot identifier, for journals of background responses",
        "`boot_id` in `gateway/disk_and_clock.py`",
        "`sysctl -n kern.bootsessionuuid` prints one value",
        BOTH,
        gather.boot_identifier,
        verdicts.boot_identifier,
    ),
    SelftestStep(
        "peer",
        "peer of the unix socket by `LOCAL_PEERCRED` and `LOCAL_PEERPID`",
        "`gateway/control/commands.py`",
        "after a load, `mlxctl logs --audit` has the caller's `uid` and `pid`",
        BOTH,
        gather.peer_credentials,
        verdicts.peer_credentials,
    ),
    SelftestStep(
        "page",
        "the page, by `open`",
        "`gateway/ctl/ui.py`, `gateway/web/session.py`",
        "`open` starts a browser that logs in with the link within 20 s (on Linux, a request does)",
        BOTH,
        gather.open_page,
        verdicts.open_page,
    ),
    SelftestStep(
        "desktop",
        "whether the Mac is in use",
        "`gateway/workers/power.py`",
        "`ioreg -c IOHIDSystem`, `pmset -g batt` and `pmset -g therm` print what is parsed; whether "
        "`IODisplayWrangler` exists on Apple silicon (without it, the display counts as on)",
        MAC,
        gather.desktop,
        verdicts.desktop,
    ),
    SelftestStep(
        "awake",
        "staying awake",
        "`gateway/workers/power.py`",
        "`pmset -g assertions` shows the daemon's `caffeinate` after a request, and no longer 30 s later; nor after "
        "`kill -9` of the daemon",
        MAC,
        gather.awake,
        verdicts.awake,
        120.0,
    ),
    SelftestStep(
        "exit-watch",
        "worker exit by kqueue",
        "`gateway/workers/supervisor/child.py`",
        "the gateway notices a `kill -9` of a worker within 500 ms (100 are expected; without the event it takes "
        "seconds)",
        BOTH,
        gather.exit_watch,
        verdicts.exit_watch,
    ),
    SelftestStep(
        "sigterm",
        "SIGTERM while idle",
        "`worker/engine/inbox.py` waits in `SimpleQueue.get`",
        "the worker exits within 5 s (one is expected)",
        BOTH,
        gather.idle_sigterm,
        verdicts.idle_sigterm,
    ),
    SelftestStep(
        "adoption",
        "a process's start time since the boot by `proc_pid_rusage`",
        "`gateway/workers/supervisor/child.py` (`start_ticks`)",
        "after `kill -9` of the daemon the next one adopts the worker, and `run/workers/*.json` has the same start",
        BOTH,
        gather.adoption,
        verdicts.adoption,
        90.0,
    ),
    SelftestStep(
        "disk-cache",
        "prefixes on disk over a restart",
        "`worker/prefix_cache/disk.py`",
        "another daemon and worker read the prompt's KV from disk, and answer the same",
        BOTH,
        gather.disk_cache,
        verdicts.disk_cache,
        120.0,
    ),
    SelftestStep(
        "memory-returned",
        "memory that returns to the system",
        "`gateway/workers/memory/host.py`",
        "`mlxd_model_memory_returned_ratio` is 1 after an unload",
        BOTH,
        gather.memory_returned,
        verdicts.memory_returned,
    ),
    SelftestStep(
        "quantized-kv",
        "attention over quantized KV",
        "`worker/engine/load_checks.py`",
        "with `kv_bits = 8` the log has no line `is dequantized for each step` (Metal has kernels for quantized KV, "
        "correct since MLX 0.32)",
        MAC,
        gather.quantized_kv,
        verdicts.quantized_kv,
    ),
    SelftestStep(
        "timing-profile",
        "the machine in the key of timing profiles",
        "`worker/engine/scheduling/timing_profile_file.py`",
        "`state/wisdom/*.json` names chip, `N GPU cores` and `macOS BUILD`; a second start of the worker begins with "
        "those times (no `is not used` in the log)",
        MAC,
        gather.timing_profile,
        verdicts.timing_profile,
    ),
    SelftestStep(
        "watchdog",
        "Metal's watchdog",
        "`WATCHDOG` in `worker/engine/scheduling/pacing.py`: a chunk has at most 512 · 65,536 / context tokens",
        "the demo processes a prompt of most of its context without `ImpactingInteractivity`",
        MAC,
        gather.watchdog,
        verdicts.watchdog,
        90.0,
    ),
    SelftestStep(
        "launchd",
        "`launchctl`, the property list, the output of `launchctl print`, and the launcher",
        "`gateway/service/launchd.py`, `launcher` in `gateway/service/installer.py`",
        "an agent `dev.mlxd.selftest` is installed and `print` shows its pid; `ps` shows the `bin/python3` of the "
        "linked environment; `kill -9` of the gateway and `restart` keep the worker; `uninstall` leaves nothing",
        MAC,
        gather.launch_agent,
        verdicts.launch_agent,
        150.0,
    ),
    SelftestStep(
        "ranks",
        "groups with a ring on Metal",
        "`worker/group`; run on Linux's CPU, and with NCCL on CUDA",
        '`group = { nodes = ["local", "local"] }` answers the same alone and together; `kill -STOP` of a rank ends the '
        "group within 10 s, and no rank is left",
        BOTH,
        gather.ranks,
        verdicts.ranks,
        150.0,
    ),
    token_step("demo", "demo"),
)
HAND: Final[tuple[HandRow, ...]] = (
    HandRow(
        "a process's start time since the boot by `proc_pid_rusage`",
        "`gateway/workers/supervisor/child.py` (`start_ticks`)",
        "the number in `run/workers/*.json` does not change when the clock is set, and the next gateway "
        "adopts the worker (`kill -9` of the daemon, `date` an hour ahead; the clock is set back by `sudo"
        " sntp -sS time.apple.com`)",
        "sudo date $(date -v+1H +%m%d%H%M%y)",
    ),
    HandRow(
        "a share that shrinks while requests run",
        "`worker/model/memory.py`: `MemoryShare.enforce` waits for the step and lowers the wired limit last",
        'while a second model loads, `mlxd_worker_memory_bytes{kind="wired_limit"}` falls within seconds '
        'and `kind="active"` stays below it; after the second model is unloaded, running streams have '
        "their former speed",
    ),
    HandRow(
        "free buffers between small chunks",
        "`worker/model/memory.py` limits them to an eighth of the share",
        'stall figures of `benchmarks` during a long prompt; `kind="cache"` stays below an eighth of the share',
    ),
    HandRow(
        "a row that leaves a batch",
        "`worker/kv/batched.py`: `keep` waits for launched work, because Metal writes in place only where"
        " no running operation reads the array",
        "with 16 streams of unequal lengths, no step takes several times the median when one of them ends",
    ),
    HandRow(
        "no memory for a step",
        "`worker/errors.py` has Metal's error texts from its source",
        "lower `sysctl iogpu.wired_limit_mb` under a loaded model: the log has a warning, "
        "`mlxd_worker_allocation_failures_total` counts it, streams continue; the process stays usable "
        "after an `Insufficient Memory` of the GPU (`iogpu.wired_limit_mb=0` is the system's own limit)",
        "sudo sysctl iogpu.wired_limit_mb=2048",
    ),
    HandRow(
        "evaluation above the memory limit",
        "MLX waits after each operation while `active` is above `limit`",
        "the alert `MlxdWorkerOverLimit` stays silent under full load",
    ),
    HandRow(
        "memory that returns to the system",
        "`gateway/workers/memory/host.py`",
        "after `kill -9` of a large worker `mlxd_model_memory_returned_ratio` shows the part that stays wired",
    ),
    HandRow(
        "groups with a ring on Metal",
        "`worker/group`; run on Linux's CPU, and with NCCL on CUDA",
        '`mlxctl verify MODEL` of a model of your own with `group = { nodes = ["local", "local"] }`',
    ),
    HandRow(
        "groups with JACCL",
        "`protocol/collectives.py` makes its environment; nothing of it was run",
        '`backend = "jaccl"` on cabled Macs with macOS 26.2: `mlxctl verify`; a pulled cable and `kill '
        "-9` of a rank end the group (JACCL notices neither), and the next start connects. "
        "`MLX_METAL_FAST_SYNCH` stays unset",
    ),
    HandRow(
        "steps of a group under Metal's watchdog of about 5 s",
        "a collective waits inside a command buffer",
        "long prompts together with streams on two Macs of unequal speed: no `ImpactingInteractivity`",
    ),
    HandRow(
        "attention over quantized KV",
        "`worker/engine/load_checks.py`",
        "`mlxctl verify` of a model with `kv_bits = 8`, and its speed",
        "python -m benchmarks.kv_bits qwen3-8b --dtype bfloat16 --what bytes,steps,chunks",
    ),
    HandRow(
        "accept queue",
        "`kern.ipc.somaxconn` is 128 by default",
        "raise it for bursts of more than 128 simultaneous connects",
        "sudo sysctl kern.ipc.somaxconn=1024",
    ),
    HandRow(
        "a LaunchDaemon",
        "`gateway/service/launchd.py`",
        "it starts at once and at the next boot, `status` shows its pid, `kill -9` of the gateway keeps the "
        "workers, `restart` keeps models, `stop` frees the memory, `uninstall` leaves nothing",
        "sudo mlxctl service install --system --run-as USER",
    ),
    HandRow(
        "another version",
        "`gateway/service/installer.py`, `launchd.restart`",
        "after `mlxctl service install` of another environment and `service restart`, the new version "
        "runs and the workers keep their pids",
        "mlxctl service install && mlxctl service restart",
    ),
    HandRow(
        "the Homebrew formula",
        "`deploy/homebrew`",
        "`brew install --build-from-source`, `brew test mlxd`, `brew style`, `brew services start mlxd`",
        "brew install --build-from-source mlxd",
    ),
    HandRow(
        "Metal in the system domain",
        "LaunchDaemon with its own user",
        "decode speed, and the time of a load from disk, equal those of `mlxctl serve` in a terminal "
        "(`ProcessType` is Interactive)",
        "sudo mlxctl service install --system --run-as USER",
    ),
    HandRow(
        "wired limit at boot",
        "`mlxctl service wired-limit`",
        "`sysctl iogpu.wired_limit_mb` prints the value at once and after a reboot",
        "sudo mlxctl service wired-limit",
    ),
    HandRow(
        "set-up with the Mac's own Python",
        "`deploy/setup.sh`, tested with a real 3.9 and a real uv that may not download",
        "`make serve` on a Mac that has only the Command Line Tools: it installs uv into `.cache`, uv "
        "installs a Python, and mlxd serves",
        "make serve",
    ),
    HandRow(
        "the menu bar",
        "`deploy/swiftbar/mlxd.10s.py`, run with a real daemon and Python 3.9, not in SwiftBar",
        "copied into SwiftBar's plugin folder: the menu shows the models; *Load*, *Unload* and *Open the "
        "page* work; `MLXCTL` is not needed after `mlxctl service install`",
    ),
    HandRow(
        "Metal's watchdog",
        "`WATCHDOG` in `worker/engine/scheduling/pacing.py`: a chunk has at most 512 · 65,536 / context tokens",
        "a prompt of 128k tokens on a model with `head_dim` 128 is processed without "
        "`ImpactingInteractivity`; `mlxctl top` beside it shows chunks of 256",
        "mlxctl top",
    ),
    HandRow(
        "whether the Mac is in use",
        "`gateway/workers/power.py`: `ioreg -c IOHIDSystem`, `ioreg -n "
        "IODisplayWrangler`, `pmset -g batt`, `pmset -g therm`",
        "`mlxd_pace_duty` is 0.8 within 6 s of an input, 1 a minute after the last input, 0.6 on battery",
    ),
    HandRow(
        "duty cycle",
        "`worker/engine/scheduling/pacing.py`",
        "with `desktop = true` scrolling stays smooth while a long prompt is processed; `sudo "
        "powermetrics --samplers gpu_power` shows the GPU idle for a fifth of the time; tokens a second "
        "fall by about as much",
        "sudo powermetrics --samplers gpu_power",
    ),
    HandRow(
        "free buffers by calibration",
        "`buffer_bytes` of `worker/tools/calibrate.py`",
        "`mlxctl calibrate MODEL` twice: the same choice; the speed of streams is no worse with it",
        "mlxctl calibrate MODEL",
    ),
    HandRow(
        "the boot identifier, for journals of background responses",
        "`boot_id` in `gateway/disk_and_clock.py`",
        "the value stays until the next boot; a response continues at its next event after `kill -9` of "
        "the daemon, and after an orderly reboot",
        "sysctl -n kern.bootsessionuuid",
    ),
    HandRow(
        "the page in Safari",
        "`gateway/web/page`, run in Chromium 156 only",
        "chat, dashboard, formulas and themes work; a conversation is there after a restart of Safari; "
        "*File → Add to Dock* opens it as an application with its icon",
        "mlxctl ui",
    ),
    HandRow(
        "groups over several Macs",
        "`gateway/workers/supervisor/ranks.py`, run over a real sshd of Linux on the loopback",
        "two Macs with a cable and `ips` of its /30 in the host file, Remote Login on: the model answers,"
        " `kill -9` of the rank on the second Mac is a pause, `kill -9` of `ssh` here ends that rank; "
        "Local Network Privacy does not block ssh when mlxd is a LaunchDaemon",
    ),
    HandRow(
        "keeping idle models warm",
        "`worker/engine/scheduling/pacing.py`",
        'a request 10 s after the last one has its first token 0.3 to 1 s sooner with `keep_warm = "5m"`; no beats '
        "35 s after `pmset -g batt` says *Battery Power*",
        "sudo powermetrics --samplers gpu_power",
    ),
    HandRow(
        "JACCL's environment",
        "`protocol/collectives.py`, compared with the one of `mlx.launch`",
        '`backend = "jaccl"` with `rdma` from a file of `mlx.distributed_config`: both ranks start; three'
        " Macs form a mesh, four in a circle a ring",
        "mlx.distributed_config --output hosts.json",
    ),
)

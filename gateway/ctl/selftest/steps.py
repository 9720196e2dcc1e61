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
        shows="`mlxctl verify` of the demo and each model here that fits: the same tokens alone, batched, in chunks, "
        "cached, preempted, resumed and with drafts; a near tie may change",
        platforms=BOTH,
        gather=gather.tokens_of(path),
        judge=verdicts.tokens,
        limit_s=240.0,
    )


# In the order in which they run: first those that leave the daemon and its worker as they are.
STEPS: Final[tuple[SelftestStep, ...]] = (
    SelftestStep(
        "socket-paths",
        "socket paths of at most 103 bytes",
        "`protocol/sockets.py`",
        "a daemon runs in an `MLXD_HOME` of 88 characters (92 on Linux), and refuses one more clearly",
        BOTH,
        gather.socket_paths,
        verdicts.socket_paths,
    ),
    SelftestStep(
        "footprint",
        "memory by `proc_pid_rusage`",
        "`worker/model/memory.py`, `gateway/workers/supervisor/child.py`",
        "both figures equal the output of `footprint PID` (on Linux `smaps_rollup`)",
        BOTH,
        gather.footprint,
        verdicts.footprint,
    ),
    SelftestStep(
        "overhead",
        "Metal's own memory",
        "`OVERHEAD_BYTES`, `gateway/model_files/known_times.py`",
        "a worker that has just loaded has under 128 MiB more than its weights",
        MAC,
        gather.overhead,
        verdicts.overhead,
    ),
    SelftestStep(
        "memory-budget",
        "memory budget",
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
        "the log at `debug` has the limit; the sum of all workers is below `iogpu.wired_limit_mb`",
        MAC,
        gather.wired_limit,
        verdicts.wired_limit,
    ),
    SelftestStep(
        "doctor",
        "`mlxctl doctor`",
        "`gateway/ctl/doctor/machine_facts.py`, `gateway/ctl/doctor/checks.py`",
        "it reads `sysctl -n iogpu.wired_limit_mb` and `pmset -g`",
        MAC,
        gather.doctor,
        verdicts.doctor,
    ),
    SelftestStep(
        "boot-id",
        "boot identifier",
        "`boot_id`, `gateway/disk_and_clock.py`",
        "`sysctl -n kern.bootsessionuuid` prints one value",
        BOTH,
        gather.boot_identifier,
        verdicts.boot_identifier,
    ),
    SelftestStep(
        "peer",
        "peer of the unix socket",
        "`gateway/control/commands.py`",
        "after a load, `mlxctl logs --audit` has the caller's `uid` and `pid`",
        BOTH,
        gather.peer_credentials,
        verdicts.peer_credentials,
    ),
    SelftestStep(
        "page",
        "the page",
        "`gateway/ctl/ui.py`, `gateway/web/session.py`",
        "`open` starts a browser that logs in within 20 s (on Linux, a request does)",
        BOTH,
        gather.open_page,
        verdicts.open_page,
    ),
    SelftestStep(
        "desktop",
        "whether the Mac is in use",
        "`gateway/workers/power.py`",
        "`ioreg -c IOHIDSystem`, `pmset -g batt` and `pmset -g therm` can be parsed; without `IODisplayWrangler` "
        "the display counts as on",
        MAC,
        gather.desktop,
        verdicts.desktop,
    ),
    SelftestStep(
        "awake",
        "staying awake",
        "`gateway/workers/power.py`",
        "`pmset -g assertions` shows the daemon's `caffeinate` after a request, but not 30 s later or after `kill"
        " -9` of the daemon",
        MAC,
        gather.awake,
        verdicts.awake,
        120.0,
    ),
    SelftestStep(
        "exit-watch",
        "exit of a worker by kqueue",
        "`gateway/workers/supervisor/child.py`",
        "the gateway notices `kill -9` of a worker within 500 ms",
        BOTH,
        gather.exit_watch,
        verdicts.exit_watch,
    ),
    SelftestStep(
        "sigterm",
        "SIGTERM while idle",
        "`worker/engine/inbox.py`",
        "the worker exits within 5 s",
        BOTH,
        gather.idle_sigterm,
        verdicts.idle_sigterm,
    ),
    SelftestStep(
        "adoption",
        "start time by `proc_pid_rusage`",
        "`start_ticks`, `gateway/workers/supervisor/child.py`",
        "after `kill -9` of the daemon the next one adopts the worker; `run/workers/*.json` has the same start",
        BOTH,
        gather.adoption,
        verdicts.adoption,
        90.0,
    ),
    SelftestStep(
        "disk-cache",
        "prefixes on disk",
        "`worker/prefix_cache/disk.py`",
        "another daemon and worker read the prompt's KV from disk and answer the same",
        BOTH,
        gather.disk_cache,
        verdicts.disk_cache,
        120.0,
    ),
    SelftestStep(
        "memory-returned",
        "memory returned",
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
        "with `kv_bits = 8` the log has no line `is dequantized for each step`",
        MAC,
        gather.quantized_kv,
        verdicts.quantized_kv,
    ),
    SelftestStep(
        "timing-profile",
        "machine of timing profiles",
        "`worker/engine/scheduling/timing_profile_file.py`",
        "`state/timings/*.json` names chip, `N GPU cores` and `macOS BUILD`; a second start uses it (no `is not "
        "used` in the log)",
        MAC,
        gather.timing_profile,
        verdicts.timing_profile,
    ),
    SelftestStep(
        "watchdog",
        "Metal's watchdog",
        "`WATCHDOG`, `worker/engine/scheduling/pacing.py`",
        "the demo processes a prompt of most of its context without `ImpactingInteractivity`",
        MAC,
        gather.watchdog,
        verdicts.watchdog,
        90.0,
    ),
    SelftestStep(
        "launchd",
        "launchd",
        "`gateway/service/launchd.py`, `gateway/service/installer.py`",
        "an agent `dev.mlxd.selftest` is installed and `launchctl print` shows its pid; `ps` shows the "
        "`bin/python3` of the linked environment; `kill -9` of the gateway and `restart` keep the worker; "
        "`uninstall` leaves nothing",
        MAC,
        gather.launch_agent,
        verdicts.launch_agent,
        150.0,
    ),
    SelftestStep(
        "ranks",
        "groups with a ring",
        "`worker/group`",
        '`group = { nodes = ["local", "local"] }` answers the same alone and together; `kill -STOP` of a rank '
        "ends the group within 10 s and leaves no rank",
        BOTH,
        gather.ranks,
        verdicts.ranks,
        150.0,
    ),
    token_step("demo", "demo"),
)
HAND: Final[tuple[HandRow, ...]] = (
    HandRow(
        "start time by `proc_pid_rusage`",
        "`gateway/workers/supervisor/child.py`",
        "with the clock an hour ahead, after `kill -9` of the daemon the number in `run/workers/*.json` is the "
        "same and the next daemon adopts the worker. `sudo sntp -sS time.apple.com` sets the clock back",
        "sudo date $(date -v+1H +%m%d%H%M%y)",
    ),
    HandRow(
        "a share that shrinks",
        "`worker/model/memory.py`",
        'while a second model loads, `mlxd_worker_memory_bytes{kind="wired_limit"}` falls within seconds and '
        '`kind="active"` stays below it; after it is unloaded, streams have their former speed',
    ),
    HandRow(
        "free buffers",
        "`worker/model/memory.py`",
        'during a long prompt `kind="cache"` stays below an eighth of the share; see the stalls in `benchmarks`',
    ),
    HandRow(
        "a row that leaves a batch",
        "`keep`, `worker/kv/batched.py`",
        "with 16 streams of unequal lengths, no step takes several times the median when one ends",
    ),
    HandRow(
        "no memory for a step",
        "`worker/errors.py`",
        "with a loaded model the log warns, `mlxd_worker_allocation_failures_total` counts, streams continue, "
        "also after `Insufficient Memory` of the GPU. `iogpu.wired_limit_mb=0` restores the limit",
        "sudo sysctl iogpu.wired_limit_mb=2048",
    ),
    HandRow(
        "memory above its limit",
        "MLX",
        "the alert `MlxdWorkerOverLimit` stays silent under full load",
    ),
    HandRow(
        "memory returned",
        "`gateway/workers/memory/host.py`",
        "after `kill -9` of a large worker `mlxd_model_memory_returned_ratio` shows what stays wired",
    ),
    HandRow(
        "groups with a ring",
        "`worker/group`",
        '`mlxctl verify MODEL` with `group = { nodes = ["local", "local"] }`',
    ),
    HandRow(
        "groups with JACCL",
        "`protocol/collectives.py`",
        '`backend = "jaccl"` on cabled Macs with macOS 26.2: `mlxctl verify`; a pulled cable and `kill -9` of a '
        "rank end the group, and the next start connects. `MLX_METAL_FAST_SYNCH` stays unset",
    ),
    HandRow(
        "groups under Metal's watchdog",
        "`worker/group`",
        "long prompts beside streams on two Macs of unequal speed: no `ImpactingInteractivity`",
    ),
    HandRow(
        "attention over quantized KV",
        "`worker/engine/load_checks.py`",
        "`mlxctl verify` of a model with `kv_bits = 8`, and its speed",
        "python -m benchmarks.kv_bits qwen3-8b --dtype bfloat16 --what bytes,steps,chunks",
    ),
    HandRow(
        "accept queue",
        "`kern.ipc.somaxconn`, 128 by default",
        "raise it for bursts of more than 128 connects",
        "sudo sysctl kern.ipc.somaxconn=1024",
    ),
    HandRow(
        "a LaunchDaemon",
        "`gateway/service/launchd.py`",
        "it starts at once and at boot; `status` shows its pid; `kill -9` of the gateway keeps workers, `restart`"
        " keeps models, `stop` frees the memory, `uninstall` leaves nothing",
        "sudo mlxctl service install --system --run-as USER",
    ),
    HandRow(
        "another version",
        "`gateway/service/installer.py`",
        "after the commands in another environment the new version runs and the workers keep their pids",
        "mlxctl service install && mlxctl service restart",
    ),
    HandRow(
        "the Homebrew formula",
        "`deploy/homebrew`",
        "also `brew test mlxd`, `brew style`, `brew services start mlxd`",
        "brew install --build-from-source mlxd",
    ),
    HandRow(
        "Metal in a LaunchDaemon",
        "`gateway/service/launchd.py`",
        "decode speed and load time equal those of `mlxctl serve` in a terminal",
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
        "`deploy/setup.sh`",
        "with only the Command Line Tools, uv goes into `.cache` and installs a Python, and mlxd serves",
        "make serve",
    ),
    HandRow(
        "the menu bar",
        "`deploy/swiftbar/mlxd.10s.py`",
        "in SwiftBar's plugin folder: the menu shows models; *Load*, *Unload* and *Open the page* work, without "
        "`MLXCTL` after `mlxctl service install`",
    ),
    HandRow(
        "Metal's watchdog",
        "`WATCHDOG`, `worker/engine/scheduling/pacing.py`",
        "a prompt of 128k tokens with `head_dim` 128: no `ImpactingInteractivity`, chunks of 256",
        "mlxctl top",
    ),
    HandRow(
        "whether the Mac is in use",
        "`gateway/workers/power.py`",
        "`mlxd_gpu_duty_ratio` is 0.8 within 6 s of an input, 1 after a minute without, 0.6 on battery",
    ),
    HandRow(
        "duty cycle",
        "`worker/engine/scheduling/pacing.py`",
        "with `desktop = true` scrolling stays smooth during a long prompt; the GPU is idle for a fifth of the time; "
        "tokens a second fall by as much",
        "sudo powermetrics --samplers gpu_power",
    ),
    HandRow(
        "calibration",
        "`buffer_bytes`, `worker/tools/calibrate.py`",
        "twice the same choice; streams are no slower with it",
        "mlxctl calibrate MODEL",
    ),
    HandRow(
        "boot identifier",
        "`boot_id`, `gateway/disk_and_clock.py`",
        "it stays until the next boot; a background response continues after `kill -9` of the daemon and after a "
        "reboot",
        "sysctl -n kern.bootsessionuuid",
    ),
    HandRow(
        "the page in Safari",
        "`gateway/web/page`, run in Chromium only",
        "chat, dashboard, formulas, themes; a conversation survives a restart; *File → Add to Dock* makes an "
        "application with its icon",
        "mlxctl ui",
    ),
    HandRow(
        "groups over several Macs",
        "`gateway/workers/supervisor/ranks.py`",
        "a cable, `ips` of its /30 in the host file, Remote Login on: the model answers; `kill -9` of the second "
        "rank is a pause; `kill -9` of `ssh` ends that rank; Local Network Privacy does not block a LaunchDaemon",
    ),
    HandRow(
        "keeping models warm",
        "`worker/engine/scheduling/pacing.py`",
        'with `keep_warm = "5m"` 10 s after a request, the first token comes 0.3 to 1 s sooner; no beats 35 s after '
        "`pmset -g batt` says *Battery Power*",
        "sudo powermetrics --samplers gpu_power",
    ),
    HandRow(
        "JACCL's environment",
        "`protocol/collectives.py`",
        "with `rdma` of this file both ranks start; three Macs form a mesh, four in a circle a ring",
        "mlx.distributed_config --output hosts.json",
    ),
)

"""Evidence of the self-test's steps, and the verdicts on it: pure functions of the outputs of commands."""

import json
import re
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, Literal

import msgspec
from msgspec import DecodeError, Struct

from gateway.ctl.doctor import checks
from gateway.model_files.known_times import OVERHEAD_BYTES
from gateway.service import launchd
from gateway.workers import power
from protocol.verify_output import VerifyCheck

MIB: Final = 1 << 20
GIB: Final = 1 << 30
# Figures of a footprint that are taken at different moments may differ by the larger of these.
FOOTPRINT_PART: Final = 0.05
FOOTPRINT_BYTES: Final = 8 * MIB
# A gateway whose exit event does not come notices the missing heartbeats seconds later.
NOTICE_S: Final = 0.5
# A worker that is not woken does not exit at all.
SIGTERM_S: Final = 5.0
RETURNED_PART: Final = 0.98
LOST_RANK_S: Final = 10.0
# `mlxctl verify` refuses a model with these words if its weights exceed the free memory.
NO_ROOM: Final = "the model is loaded once more for this"
WATCHDOG_TOKENS: Final = 24_000
_UNITS: Final = {"B": 1, "KB": 1 << 10, "MB": MIB, "GB": GIB}

Outcome = Literal["passed", "failed", "skipped"]

_verify_check = msgspec.json.Decoder(VerifyCheck)


class EvidenceText(Struct, frozen=True):
    """Output of a command, or another observation. `name` says of what."""

    name: str
    text: str


class StepEvidence(Struct, frozen=True):
    """Observations of a step in the order in which they were made."""

    texts: tuple[EvidenceText, ...] = ()

    def text(self, name: str) -> str:
        """Return the last observation of that name; empty if there is none."""
        return next((each.text for each in reversed(self.texts) if each.name == name), "")

    def number(self, name: str) -> float:
        """Return the first number of an observation; -1 if it has none."""
        match = re.search(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", self.text(name))
        return float(match[0]) if match else -1.0


class StepVerdict(Struct, frozen=True):
    """Verdict on the evidence of a step, with the measured values or the reason."""

    outcome: Outcome
    text: str


def judged(*checks: tuple[bool, str] | tuple[bool, str, str]) -> StepVerdict:
    """Return the verdict of several checks: `passed` with their texts, or `failed` with the last texts of those that
    are false.
    """
    wrong = [check[-1] for check in checks if not check[0]]
    return StepVerdict("failed" if wrong else "passed", "; ".join(wrong or [check[1] for check in checks]))


def socket_paths(evidence: StepEvidence) -> StepVerdict:
    longest, refused = evidence.text("longest"), evidence.text("too long")
    return judged(
        (" answers" in longest, longest or "no daemon was started"),
        ("exit status 73" in refused and "shorter folder" in refused, refused or "the longer path was not tried"),
    )


def footprint(evidence: StepEvidence) -> StepVerdict:
    tool = evidence.text("footprint")
    measured = _footprint_bytes(tool) if tool else _anonymous_bytes(evidence.text("smaps_rollup"))
    figures = [evidence.number("gateway"), evidence.number("worker")]
    texts = [f"{who}: {size / MIB:.1f} MiB" for who, size in zip(("the gateway", "the worker"), figures, strict=True)]
    near = max(FOOTPRINT_PART * measured, FOOTPRINT_BYTES)
    return judged(
        (measured > 0, f"the system's tool: {measured / MIB:.1f} MiB"),
        *((abs(size - measured) <= near, text) for size, text in zip(figures, texts, strict=True)),
    )


def overhead(evidence: StepEvidence) -> StepVerdict:
    size, weights = evidence.number("footprint"), evidence.number("weights")
    beside = size - weights
    text = f"{beside / MIB:.0f} MiB beside the weights, {OVERHEAD_BYTES / MIB:.0f} are reckoned with"
    return judged(
        (size > 0 < weights, "both sizes are known", "the sizes are not known"), (beside < OVERHEAD_BYTES, text)
    )


def memory_budget(evidence: StepEvidence) -> StepVerdict:
    budget, ram = evidence.number("budget"), evidence.number("hw.memsize")
    limit = max(0.0, evidence.number("iogpu.wired_limit_mb")) * MIB
    wanted = limit or 0.75 * ram
    text = f"{budget / GIB:.2f} GiB; the GPU may wire {wanted / GIB:.2f} of {ram / GIB:.0f} GiB"
    # The system's own reserve may make it less.
    return judged((ram > 0, f"{ram / GIB:.0f} GiB of RAM"), (0.5 * wanted < budget <= wanted + MIB, text))


def wired_limit(evidence: StepEvidence) -> StepVerdict:
    ram, limit = evidence.number("hw.memsize"), max(0.0, evidence.number("iogpu.wired_limit_mb")) * MIB
    most = limit or ram
    wired = sum(float(line.split()[-1]) for line in evidence.text("metrics").splitlines())
    return judged(
        (wired > 0, f"the workers may wire {wired / GIB:.2f} GiB"),
        (wired <= most, f"the machine's limit is {most / GIB:.2f} GiB"),
        ("wired limit:" in evidence.text("log"), "the log names it", "the log does not name the limit that was set"),
    )


def doctor(evidence: StepEvidence) -> StepVerdict:
    """Both outputs must be readable for `mlxctl doctor`; what they say is the machine's affair."""
    limit = checks.wired_limit(evidence.text("iogpu.wired_limit_mb"), 1 << 50)
    sleep = checks.sleep(evidence.text("pmset"))
    return judged(
        *((each.level != "skip", f"{each.name}: {each.text}") for each in (limit, sleep)),
    )


def boot_identifier(evidence: StepEvidence) -> StepVerdict:
    first, again = evidence.text("boot id").strip(), evidence.text("again").strip()
    return judged(
        (
            bool(re.fullmatch(r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}", first)),
            "it is one UUID",
            f"it is no UUID: {first}",
        ),
        (first == again, "the same twice", "it is not the same twice"),
    )


def peer_credentials(evidence: StepEvidence) -> StepVerdict:
    caller, entry = _record(evidence.text("caller")), _record(_last_output(evidence, "mlxctl logs"))
    pairs = [(key, entry.get(key), caller.get(key)) for key in ("uid", "pid")]
    return judged(
        (entry.get("action") == "model.load", "the audit log has the load", "the audit log does not have the load"),
        *((own is not None and found == own, f"{key} {found}, the caller's is {own}") for key, found, own in pairs),
    )


def open_page(evidence: StepEvidence) -> StepVerdict:
    page, opened = evidence.text("page"), evidence.text("open")
    return judged(
        (page.startswith("200 text/html"), f"the page: {page}"),
        (opened in ("", "exit status 0") or opened.startswith("exit status 0 "), f"open: {opened or 'a request'}"),
        ("ui.login" in evidence.text("audit"), "the link logged in" if evidence.text("audit") else "nobody logged in"),
    )


def desktop(evidence: StepEvidence) -> StepVerdict:
    idle, display = evidence.text("IOHIDSystem"), evidence.text("IODisplayWrangler")
    battery, thermal = evidence.text("pmset -g batt"), evidence.text("pmset -g therm")
    return judged(
        (
            '"HIDIdleTime" = ' in idle,
            f"{power.idle_of(idle):.0f} s since the newest input",
            "no HIDIdleTime",
        ),
        (" Power'" in battery, battery.strip() or "pmset names no source of power"),
        (not thermal.startswith("exit status"), f"thermal state {power.thermal_of(thermal)}", thermal),
        (True, "IODisplayWrangler exists" if "CurrentPowerState" in display else "there is no IODisplayWrangler"),
    )


def awake(evidence: StepEvidence) -> StepVerdict:
    """`pmset -g assertions` names our caffeinate while the daemon is busy, and not afterwards."""
    parts: list[tuple[bool, str]] = []
    for name in ("after linger", "after kill"):
        pid = evidence.text(f"caffeinate {name}")
        held, released = evidence.text(f"held {name}"), evidence.text(f"released {name}")
        is_held = pid.isdecimal() and f"pid {pid}(caffeinate)" in held and "PreventUserIdleSystemSleep" in held
        is_released = bool(released) and "(caffeinate)" not in released and "exit status" not in released
        parts.append((is_held, f"caffeinate {pid or 'none'} holds it"))
        parts.append((is_released, f"released {name}" if is_released else f"not released {name}: {released}"))
    return judged(*parts)


def exit_watch(evidence: StepEvidence) -> StepVerdict:
    killed, line = evidence.number("killed at"), _record(evidence.text("log"))
    if "time" not in line:
        return StepVerdict("failed", "the log has no end of the worker")
    delay_s = datetime.fromisoformat(line["time"]).timestamp() - killed
    # Times of the log are in whole milliseconds.
    return judged((-0.002 < delay_s <= NOTICE_S, f"noticed after {max(0.0, delay_s) * 1000:.0f} ms"))


def idle_sigterm(evidence: StepEvidence) -> StepVerdict:
    text, seconds = evidence.text("seconds"), evidence.number("seconds")
    return judged((0 <= seconds <= SIGTERM_S, f"ended after {seconds:.2f} s" if seconds >= 0 else text or "not known"))


def adoption(evidence: StepEvidence) -> StepVerdict:
    before, after = evidence.text("worker before"), evidence.text("worker after")
    first, second = _record(evidence.text("state before")), _record(evidence.text("state after"))
    ticks = first.get("start_ticks", 0)
    return judged(
        (before == after != "", f"worker {before} is now {after or 'none'}"),
        (
            bool(ticks) and ticks == second.get("start_ticks"),
            f"its start is {ticks} ticks after the boot",
            f"its start: {first} and then {second}",
        ),
    )


def disk_cache(evidence: StepEvidence) -> StepVerdict:
    before, after = evidence.text("answer before"), evidence.text("answer after")
    cached = evidence.number("cached after")
    return judged(
        (cached > 0, f"{max(0, cached):.0f} prompt tokens were read from disk"),
        (before == after != "", "the same answer" if before == after else "another answer"),
    )


def memory_returned(evidence: StepEvidence) -> StepVerdict:
    ratio = evidence.number("ratio")
    return judged((ratio >= RETURNED_PART, f"{ratio:.3f} of it" if ratio >= 0 else "the ratio is not known"))


def quantized_kv(evidence: StepEvidence) -> StepVerdict:
    log = evidence.text("log")
    return judged(
        ("KV is kept in 8 bits" in log, "KV is kept in 8 bits", "the log does not say that KV is kept in 8 bits"),
        ("is dequantized for each step" not in log, "steps read its codes", log),
        (evidence.text("answer") != "", "and the model answers", "the model does not answer"),
    )


def timing_profile(evidence: StepEvidence) -> StepVerdict:
    profile = evidence.text("profile")
    chip, build = (evidence.text(name).strip() for name in ("machdep.cpu.brand_string", "kern.osversion"))
    return judged(
        (bool(chip) and chip in profile, f"it names the chip {chip}", f"it does not name the chip {chip}: {profile}"),
        (bool(build) and f"macOS {build}" in profile, f"it names macOS {build}", f"it does not name macOS {build}"),
        (
            bool(re.search(r"\d+ GPU cores", profile)),
            "it names the GPU's cores",
            "it does not name the number of the GPU's cores",
        ),
        (evidence.text("log") == "", evidence.text("log") or "the next worker uses it"),
    )


def watchdog(evidence: StepEvidence) -> StepVerdict:
    tokens, log = evidence.number("prompt tokens"), evidence.text("log")
    return judged(
        (tokens > WATCHDOG_TOKENS, f"a prompt of {max(0, tokens):.0f} tokens"),
        ("ImpactingInteractivity" not in log, "no ImpactingInteractivity", log),
    )


def launch_agent(evidence: StepEvidence) -> StepVerdict:
    installed, restarted = (launchd.facts(evidence.text(name)) for name in ("print", "print after restart"))
    killed, workers = launchd.facts(evidence.text("print after kill")), evidence.text("workers").split()
    left, gone = evidence.text("left"), evidence.text("print after uninstall")
    program = evidence.text("ps")
    pids = [installed.pid, killed.pid, restarted.pid]
    return judged(
        (installed.state == "running" and installed.pid > 0, f"installed: {installed.state}, pid {installed.pid}"),
        (bool(re.search(r"/bin/python3? -P -m gateway\.main --launchd", program)), f"it runs {program.strip()}"),
        (0 not in pids and len(set(pids)) == 3, f"pids of the daemon: {', '.join(map(str, pids))}"),
        (len(workers) == 3 and len(set(workers)) == 1, f"the worker before, after kill, restart: {' '.join(workers)}"),
        (bool(gone) and not launchd.facts(gone).is_installed, "launchd knows it no more", "launchd still knows it"),
        (left == "nothing", f"left: {left or 'not known'}"),
    )


def ranks(evidence: StepEvidence) -> StepVerdict:
    alone, together = evidence.text("alone"), evidence.text("together")
    ended = evidence.text("ended after")
    is_ended = ended.endswith(" s") and evidence.number("ended after") <= LOST_RANK_S
    return judged(
        (len(evidence.text("ranks").split()) == 2, f"ranks {evidence.text('ranks') or 'none'}"),
        (alone == together != "", "the same tokens alone and together" if alone == together else "other tokens"),
        (is_ended, f"with a stopped rank, the group ended after {ended or 'no time known'}"),
    )


def tokens(evidence: StepEvidence) -> StepVerdict:
    """Judge the lines of `mlxctl verify --json`."""
    checks: list[VerifyCheck] = []
    output = _last_output(evidence, "mlxctl verify")
    for line in output.splitlines():
        with suppress(DecodeError):
            checks.append(_verify_check.decode(line))
    last = output.strip().rpartition("\n")[2]
    if NO_ROOM in output:
        return StepVerdict("skipped", last)
    wrong = [f"{check.name} differs or proves nothing" for check in checks if not check.is_good]
    if wrong or output.startswith("exit status") or not checks:
        return StepVerdict("failed", "; ".join(wrong) or last or "nothing was verified")
    return judged(*((check.is_good, check.name) for check in checks if not check.is_skipped))


def _footprint_bytes(output: str) -> float:
    """Parse `Footprint: 123456 B` of `footprint -f bytes`, or a size with a larger unit."""
    match = re.search(r"Footprint:\s*([\d.]+)\s*([KMG]?B)\b", output)
    return float(match[1]) * _UNITS[match[2]] if match else 0.0


def _anonymous_bytes(smaps_rollup: str) -> float:
    return 1024.0 * sum(int(size) for size in re.findall(r"^Anonymous:\s+(\d+) kB", smaps_rollup, re.MULTILINE))


def _last_output(evidence: StepEvidence, command: str) -> str:
    """Return the last output of a verb of mlxctl with any arguments."""
    return next((each.text for each in reversed(evidence.texts) if each.name.startswith(command)), "")


def _record(text: str) -> dict[str, Any]:
    """Parse the last line that is a JSON object; empty if there is none."""
    for line in reversed(text.splitlines()):
        with suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict):
                return value  # pyright: ignore[reportUnknownVariableType] - JSON has no types
    return {}

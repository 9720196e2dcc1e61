"""Report of a self-test, as markdown with the same as JSON at its end. It has no paths of the user."""

import platform
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import psutil
from msgspec import Struct

from gateway.ctl.doctor.machine_facts import DISTRIBUTIONS, run_command, version_of_distribution
from gateway.ctl.selftest.steps import HAND, HandRow
from gateway.ctl.selftest.verdicts import Outcome, StepEvidence

_CHIP: Final = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
# What may follow the name of a path's last part.
_BORDER: Final = r"(?![\w.-])"


class StepResult(Struct, frozen=True):
    """Result of one step, with its evidence. A skipped step has none."""

    name: str
    outcome: Outcome
    text: str
    seconds: float = 0.0
    evidence: StepEvidence = StepEvidence()


class SelftestReport(Struct, frozen=True):
    """Result of a self-test on one machine. `needs_you` are the rows that no program can run."""

    machine: tuple[str, ...]
    results: tuple[StepResult, ...]
    needs_you: tuple[HandRow, ...] = ()

    @property
    def is_good(self) -> bool:
        return all(result.outcome != "failed" for result in self.results)

    @property
    def summary(self) -> str:
        counts = Counter(result.outcome for result in self.results)
        parts = [f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped")]
        return ", ".join([*parts, *([f"{len(self.needs_you)} need you"] if self.needs_you else [])])


def report_of(results: Sequence[StepResult], system: str = sys.platform) -> SelftestReport:
    """Return the report of this machine."""
    return SelftestReport(tuple(_machine(system)), tuple(results), HAND if system == "darwin" else ())


def markdown(report: SelftestReport, private: Sequence[Path]) -> str:
    """Render a report. `private` are folders that are replaced: the home of the user, and the trial's."""
    lines = ["# mlxctl selftest", "", report.summary, "", *(f"- {fact}" for fact in report.machine), ""]
    lines += ["| step | result | what was seen | seconds |", "|---|---|---|---|"]
    for each in report.results:
        lines.append(f"| {each.name} | {each.outcome} | {_cell(each.text)} | {each.seconds:.1f} |")
    if report.needs_you:
        lines += ["", "## Needs you", "", "| what | check | begin with |", "|---|---|---|"]
        lines += [
            f"| {row.subject} | {row.shows} | {f'`{row.command}`' * bool(row.command)} |" for row in report.needs_you
        ]
    lines += [
        "",
        "<details><summary>JSON, with the outputs of the commands</summary>",
        "",
        "```json",
        as_json(report, private),
        "```",
    ]
    return without_paths("\n".join([*lines, "", "</details>", ""]), private)


def as_json(report: SelftestReport, private: Sequence[Path]) -> str:
    """Render a report as JSON. `private` are the folders that `without_paths` replaces."""
    return without_paths(msgspec.json.format(msgspec.json.encode(report), indent=1).decode(), private)


def without_paths(text: str, folders: Sequence[Path]) -> str:
    """Replace the first folder by `~` and the others by `TRIAL`, wherever they are a whole path or begin one."""
    for name, folder in [("TRIAL", folder) for folder in folders[1:]] + [("~", folder) for folder in folders[:1]]:
        # macOS's /tmp is a link to /private/tmp.
        for path in (f"/private{folder}", str(folder)):
            text = re.sub(re.escape(path) + _BORDER, name, text)
    return text


def _machine(system: str) -> list[str]:
    versions = [f"{name} {version_of_distribution(name) or 'missing'}" for name in DISTRIBUTIONS[:3]]
    name = f"macOS {platform.mac_ver()[0]}" if system == "darwin" else f"Linux {platform.release()}"
    chip = (run_command(_CHIP) or "").strip() if system == "darwin" else ""
    facts = [", ".join(versions), f"Python {platform.python_version()}", f"{name} {platform.machine()} {chip}".strip()]
    return [*facts, f"{psutil.virtual_memory().total / 1024**3:.0f} GiB"]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", r"\|").split())

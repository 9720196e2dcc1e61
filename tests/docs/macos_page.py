"""docs/macos.md from the steps of the self-test: `python -m tests.docs.macos_page` writes it."""

from collections.abc import Iterable

from gateway.ctl.selftest.steps import BOTH, HAND, STEPS
from tests.support.daemon import ROOT

PAGE = ROOT / "docs" / "macos.md"
TOP = """\
# What was never run on a Mac

mlxd is developed and tested on Linux with MLX's CPU build, and was measured on an NVIDIA GPU with MLX's CUDA build.
Code for macOS is in small functions. **None of the rows below was run on macOS.** The first table is a program:

```
mlxctl selftest --report selftest.md
```

It takes up to ten minutes, and leaves the machine as it was: it has a home and a daemon of its own in `/tmp`, and a
launchd label of its own, whose property list is not in `~/Library`. (launchd keeps the name `dev.mlxd.selftest` in
its list of enabled services.) Each result is passed, failed or skipped, with what was seen; the exit status is 1 if a
step failed. The report has the outputs of the commands, without the home's path, to attach to an issue. `mlxctl
selftest STEP...` runs some steps again; the steps of Linux run there too.

This page is written by `python -m tests.docs.macos_page` from `gateway/ctl/selftest/steps.py`. The forms of the
commands' outputs are those of their documentation, and launchd was played by a test; a report of a real Mac may show
others.

## Steps of `mlxctl selftest`
"""
MIDDLE = """
## By hand

These rows need a person, root, another machine or a large model. On a Mac, `mlxctl selftest` lists them at its end.
"""


def page() -> str:
    steps = [
        (f"`{step.name}`", step.subject, step.where, step.shows, "yes" if step.platforms == BOTH else "")
        for step in STEPS
    ]
    rows = [(row.subject, row.where, row.shows, row.command and f"`{row.command}`") for row in HAND]
    return "\n".join(
        [
            TOP,
            *_table(("step", "what", "where", "passed means", "on Linux"), steps),
            MIDDLE,
            *_table(("what", "where", "what to check", "begin with"), rows),
            "",
        ]
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [head, ("---",) * len(head), *rows]
    return [f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |") for cells in lines]


if __name__ == "__main__":
    PAGE.write_text(page())

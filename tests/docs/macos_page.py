"""docs/macos.md from the steps of the self-test: `python -m tests.docs.macos_page` writes it."""

from collections.abc import Iterable

from gateway.ctl.selftest.steps import BOTH, HAND, STEPS
from tests.support.daemon import ROOT

PAGE = ROOT / "docs" / "macos.md"
TOP = """\
# What was never run on a Mac

For everyone who runs mlxd on a Mac. mlxd was developed and tested on Linux, with MLX's CPU build and on an NVIDIA
GPU. **None of the rows below was run on macOS.** Commands are parsed as their documentation describes their output,
which may differ on a real Mac.

## Example

Run all steps on a Mac and write a report that can be attached to an issue:

```shell
mlxctl selftest --report selftest.md
```

This takes up to ten minutes. It uses a home and a daemon of its own in `/tmp` and the launchd label
`dev.mlxd.selftest`, whose name launchd keeps in its list of enabled services. Each step has passed, failed or was
skipped; the exit status is 1 if a step failed. The report has the commands' outputs without the path of the home.
`mlxctl selftest STEP...` runs some steps.

## Steps of `mlxctl selftest`

Steps with † also run on Linux.
"""
MIDDLE = """
## By hand

These rows need a person, root, another machine or a large model. On a Mac, `mlxctl selftest` lists them at its end.
"""
END = """
`python -m tests.docs.macos_page` writes this page from `gateway/ctl/selftest/steps.py`.
"""


def page() -> str:
    steps = [
        (f"`{step.name}`{'†' * (step.platforms == BOTH)}", f"{step.subject} ({step.where})", step.shows)
        for step in STEPS
    ]
    rows = [
        (f"{row.subject} ({row.where})", row.shows + (f" (`{row.command}`)" if row.command else "")) for row in HAND
    ]
    return "\n".join(
        [
            TOP,
            *_table(("step", "of", "passed means"), steps),
            MIDDLE,
            *_table(("of", "what to check (first command)"), rows),
            END,
        ]
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [head, ("---",) * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


if __name__ == "__main__":
    PAGE.write_text(page())

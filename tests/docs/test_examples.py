"""The examples of the pages: each is run as a reader runs it, and prints what its page shows."""

import os
import re
import shutil
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

from tests.support.ctl import install
from tests.support.daemon import ROOT, DaemonProcess
from tests.support.pool import short_home
from tests.support.scale import patient

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ADDRESS = "http://127.0.0.1:8484"
# Their examples change what other requests to the same daemon get, such as the first API key.
OWN_DAEMON = {"keys.md"}
TIMEOUT_S = 60
# An error in the form of any API, without white space.
ERROR = re.compile(r'"error":(\{|"[^"])')
# Pages that explain, list results or are followed step by step.
WITHOUT_EXAMPLE = {
    *("architecture.md", "combinations.md", "conformance.md", "glossary.md", "macos.md", "real-weights.md"),
    *("release.md", "simulation.md", "threat-model.md", "tutorial.md"),
}


@dataclass(frozen=True, slots=True)
class Example:
    """The first block of shell below a page's heading `## Example`, and the output shown below it.

    A block of language `sh` is run. One of language `shell` needs what a test does not have, such as another machine.
    """

    page: str
    language: str
    script: str
    output: str | None

    @classmethod
    def of(cls, page: Path) -> Self | None:
        section = re.search(r"^## Example\n(.*?)(?=^## |\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
        block = r"^```(sh|shell)\n(.*?)^```$(?:\s*^```(?:text|json)\n(.*?)^```$)?"
        if section and (parts := re.search(block, section[1], re.MULTILINE | re.DOTALL)):
            return cls(page.name, *parts.groups())
        return None


EXAMPLES = [example for page in PAGES if (example := Example.of(page)) and example.language == "sh"]


@contextmanager
def serving() -> Generator[DaemonProcess]:
    """A daemon with the embedded models and no others."""
    with short_home() as home, pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HUB_CACHE", str(home / "hub"))
        environment.setenv("HF_HUB_OFFLINE", "1")
        (home / "mlxd.toml").write_text("[server]\nport = 0\n")
        with DaemonProcess(home, module="gateway.main") as daemon:
            yield daemon


@pytest.fixture(scope="module")
def common() -> Iterator[DaemonProcess]:
    with serving() as daemon:
        yield daemon


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("bash")), reason="there is no curl or no bash")
@pytest.mark.parametrize("example", [pytest.param(each, id=each.page) for each in EXAMPLES])
def test_an_example_succeeds_and_prints_what_its_page_shows(
    example: Example, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if example.page in OWN_DAEMON:
        with serving() as daemon:
            done = run(example.script, daemon, tmp_path)
    else:
        done = run(example.script, request.getfixturevalue("common"), tmp_path)

    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert not ERROR.search(without_spaces(done.stdout)), printed
    if example.output is not None:
        wanted = ".*".join(map(re.escape, without_spaces(example.output).split("…")))
        assert re.fullmatch(wanted, without_spaces(done.stdout)), printed


def test_each_page_has_an_example() -> None:
    missing = {page.name for page in PAGES[1:] if Example.of(page) is None} - WITHOUT_EXAMPLE

    assert missing == set()


def without_spaces(text: str) -> str:
    """The text without white space, so that a page may break the lines of JSON."""
    return re.sub(r"\s", "", text)


def run(script: str, daemon: DaemonProcess, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the script in a new folder, which is its home too."""
    (work := folder / "work").mkdir()
    install(folder / "bin")
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script.replace(ADDRESS, daemon.url)],
        cwd=work,
        env=os.environ
        | {"MLXD_HOME": str(daemon.home), "HOME": str(work), "NO_COLOR": "1"}
        | {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=patient(TIMEOUT_S),
    )

"""`mlxctl` as tests run it: each command in a process of its own, forked from one that has imported the verbs."""

import multiprocessing
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.support.scale import patient

COMMAND: Final = (sys.executable, "-P", "-c", "from gateway.ctl import main; main()")
TIMEOUT_S: Final = 60
# The server of the standard library: it has one thread, so what it forks is sound.
_SERVER: Final = multiprocessing.get_context("forkserver")
# Modules that read the environment as they are imported, as huggingface_hub does, must not be among them.
_SERVER.set_forkserver_preload(
    [
        *("gateway.ctl.cli", "gateway.ctl.tables", "gateway.ctl.client", "gateway.config.load"),
        *("gateway.workers.memory.host", "httpx2", "rich.markdown", "typer.rich_utils"),
        # What typer, httpx2 and huggingface_hub import at their first use.
        *("pydantic.type_adapter", "pydantic.types", "certifi", "httpcore2"),
        *("asyncio", "filelock", "tqdm.auto", "yaml"),
    ]
)


def environment(home: Path) -> dict[str, str]:
    return os.environ | {"MLXD_HOME": str(home), "NO_COLOR": "1", "COLUMNS": "200"}


def ctl(home: Path, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command's exit status and what it printed."""
    with tempfile.TemporaryDirectory(prefix="ctl-") as folder:
        files = [str(Path(folder, name)) for name in ("stdin", "stdout", "stderr")]
        for file, text in zip(files, (stdin or "", "", ""), strict=True):
            Path(file).write_text(text)
        process = _SERVER.Process(target=_run, args=(words, environment(home), files))
        process.start()
        process.join(patient(TIMEOUT_S))
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutError(f"mlxctl {' '.join(words)}: {Path(files[2]).read_text()}")
        status = process.exitcode
        process.close()
        return subprocess.CompletedProcess(words, status, *(Path(file).read_text() for file in files[1:]))


def started(home: Path, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """The same with an interpreter of its own, as a shell starts it: for the start itself."""
    command = [*COMMAND, *words]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(home), timeout=patient(TIMEOUT_S), input=stdin or ""
    )


def install(folder: Path, **commands: str) -> None:
    """Make programs in `folder`: `mlxctl`, `python3`, and one for each of `commands`, which are arguments to Python."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, arguments in ({"mlxctl": shlex.join(COMMAND[1:]), "python3": ""} | commands).items():
        file = folder / name
        file.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
        file.chmod(0o755)


def _run(words: tuple[str, ...], environ: Mapping[str, str], files: list[str]) -> None:
    from gateway.ctl import main

    os.environ.clear()
    os.environ.update(environ)
    # multiprocessing has put another stdin in place of the one of descriptor 0.
    for descriptor, file in enumerate(files):
        opened = os.open(file, os.O_RDWR | os.O_APPEND if descriptor else os.O_RDONLY)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    sys.argv = ["-c", *words]
    main()

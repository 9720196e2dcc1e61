"""`mlxctl setup`: installs libraries for media and audio into mlxctl's environment."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from gateway.command_failed import CommandFailed

TIMEOUT_S: Final = 1800.0
app = typer.Typer(no_args_is_help=True)


@app.callback()
def setup() -> None:
    """Install what is optional: vision, audio."""


def _verb(part: str, library: str, advice: str, help: str) -> None:
    def command(
        find: Annotated[str, typer.Option("--from", help="A folder of wheels to install from, instead of PyPI.")] = "",
        show: Annotated[bool, typer.Option("--print", help="Print the command, and run nothing.")] = False,
    ) -> None:
        _install(part, library, advice, find, show=show)

    app.command(part, help=help)(command)


_verb(
    "vision",
    "mlx-vlm",
    "Restart vision models that are loaded: mlxctl restart MODEL",
    """Install mlx-vlm, with which vision models take images, video and audio: one version, by its hash, alone.

    Its own dependencies are 660 MB of which nothing is used here; they are left out. Loaded models take media once
    they are restarted.

    Example: mlxctl setup vision
    """,
)
_verb(
    "audio",
    "mlx-audio",
    "Models of audio are loaded when they are asked for.",
    """Install mlx-audio, with which models hear and speak, and what of its dependencies is used: each by its hash.

    Hearing needs mlx-audio alone; speech needs scipy (110 MB), and files other than WAV need PyAV.

    Example: mlxctl setup audio
    """,
)


def _install(part: str, library: str, advice: str, find: str, *, show: bool) -> None:
    """Install the libraries that a folder of the worker pins. Raises `CommandFailed`."""
    command = command_of(sys.executable, shutil.which("uv"), find, part)
    if show:
        typer.echo(" ".join(command))
        return
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise CommandFailed(f"{command[0]} cannot be run: {error}") from None
    if done.returncode:
        raise CommandFailed(f"{library} was not installed:\n{done.stderr.strip()}")
    typer.echo(f"{library} is installed. {advice}")


def command_of(python: str, uv: str | None, find: str, part: str = "vision") -> list[str]:
    """Build the install command. It uses uv if uv is installed, because an environment made by uv has no pip."""
    has_pip = importlib.util.find_spec("pip") is not None
    if uv is not None:
        command = [uv, "pip", "install", "--quiet", "--python", python]
    elif has_pip:
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    else:
        raise CommandFailed(f"neither uv nor pip is there to install into {Path(python).parent.parent}")
    places = ["--no-index", "--find-links", find] if find else []
    return [*command, "--no-deps", "--require-hashes", *places, "-r", str(requirements(part))]


def requirements(part: str = "vision") -> Path:
    """Return the file that pins the libraries of a part, in the worker's package. Raises `CommandFailed`."""
    spec = importlib.util.find_spec("worker")
    if spec is None or spec.origin is None:
        raise CommandFailed("the worker's package is not installed: install mlxd again")
    return Path(spec.origin).parent / part / "requirements.txt"

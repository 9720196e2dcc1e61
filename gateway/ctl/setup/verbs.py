"""`mlxctl setup vision`: mlx-vlm, the encoders of images, video and audio, into the environment of this mlxctl."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from gateway.failed import Failed

TIMEOUT_S: Final = 1800.0
app = typer.Typer(no_args_is_help=True)


@app.callback()
def setup() -> None:
    """Install what is optional: vision."""


@app.command()
def vision(
    find: Annotated[str, typer.Option("--from", help="A folder of wheels to install from, instead of PyPI.")] = "",
    show: Annotated[bool, typer.Option("--print", help="Print the command, and run nothing.")] = False,
) -> None:
    """Install mlx-vlm, with which vision models take images, video and audio: one version, by its hash, alone.

    Its own dependencies are 660 MB of which nothing is used here; they are left out. Loaded models take media once
    they are restarted.

    Example: mlxctl setup vision
    """
    command = command_of(sys.executable, shutil.which("uv"), find)
    if show:
        typer.echo(" ".join(command))
        return
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise Failed(f"{command[0]} cannot be run: {error}") from None
    if done.returncode:
        raise Failed(f"mlx-vlm was not installed:\n{done.stderr.strip()}")
    typer.echo("mlx-vlm is installed. Restart vision models that are loaded: mlxctl restart MODEL")


def command_of(python: str, uv: str | None, find: str) -> list[str]:
    """The command of pip, or of uv where that is installed: an environment that uv made has no pip."""
    has_pip = importlib.util.find_spec("pip") is not None
    if uv is not None:
        command = [uv, "pip", "install", "--quiet", "--python", python]
    elif has_pip:
        command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    else:
        raise Failed(f"neither uv nor pip is there to install into {Path(python).parent.parent}")
    places = ["--no-index", "--find-links", find] if find else []
    return [*command, "--no-deps", "--require-hashes", *places, "-r", str(requirements())]


def requirements() -> Path:
    """The file that pins mlx-vlm, in the worker's package. Raises `Failed`."""
    spec = importlib.util.find_spec("worker")
    if spec is None or spec.origin is None:
        raise Failed("the worker's package is not installed: install mlxd again")
    return Path(spec.origin).parent / "vision" / "requirements.txt"

"""`mlxctl repack`: rewrites a model so that its experts can stay on disk."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from gateway.ctl.complete import model_argument
from gateway.ctl.model_verbs.offline import model_of, read_config
from gateway.ctl.printing import Json, print_result
from gateway.failed import CommandFailed


def repack(
    model: Annotated[str, model_argument("A model's name or alias, a folder, or a repository.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write. [default: repacked/MODEL in mlxd's home]", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Write a model with experts in a form whose experts can stay on disk. Needs as much disk as the model has.

    The model itself is left as it is. Serve the new folder with `experts = "disk"`.

    Example: mlxctl repack mlx-community/Qwen3-30B-A3B-4bit
    """
    config = read_config()
    found = model_of(config, model)
    target = (out or config.home / "repacked" / found.name.replace("/", "--")).expanduser().absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "worker.tools.repack", found.path, str(target)]
    if found.trust_remote_code:
        command.append("--trust-remote-code")
    # Repacking needs MLX, which mlxctl does not import, so the worker's tool does it.
    if subprocess.run(command, check=False, stdout=sys.stderr if json else None).returncode:
        raise CommandFailed(f"{model} was not repacked")
    name = found.name.rpartition("/")[2]
    text = f'Serve it with:\n\n[models."{name}-disk"]\npath = "{target}"\nexperts = "disk"'
    print_result({"path": str(target)}, text, json)

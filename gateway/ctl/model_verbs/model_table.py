"""A model's table added to mlxd.toml, with the file's other lines and comments unchanged."""

import json
from collections.abc import Callable, Collection
from pathlib import Path

from gateway.config.settings import ConfigError
from gateway.ctl.model_verbs.offline import read_config
from gateway.failed import CommandFailed
from gateway.model_files.hub import split


def add(config_path: str, path: str, agree: Callable[[str], None]) -> str:
    """Append `[models.NAME]` for a path and return the name. The old file is kept as `.bak`. Raises `CommandFailed`.

    `agree` is called before anything is written, and raises to prevent it.
    """
    file = Path(config_path)
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    name = _free_name(path, read_config(file if file.exists() else None).models)
    # Every JSON string is a valid TOML string.
    table = f"[models.{json.dumps(name)}]\npath = {json.dumps(path)}\n"
    agree(f"{file} names the models that are served. Add {name} to it?")
    kept = file.with_name(f"{file.name}.bak")
    try:
        kept.write_text(before, encoding="utf-8")
        kept.chmod(0o600)
        with file.open("a", encoding="utf-8") as out:
            out.write(("" if not before or before.endswith("\n") else "\n") + ("\n" if before else "") + table)
        read_config(file)
    except ConfigError as error:
        file.write_text(before, encoding="utf-8")
        raise CommandFailed(f"{file} would be invalid with {name} ({error}); it is as it was") from None
    except OSError as error:
        raise CommandFailed(f"{file} cannot be written: {error.strerror}") from None
    return name


def _free_name(path: str, taken: Collection[str]) -> str:
    """Return the path's last part in lower case, numbered if another model has that name."""
    base = split(path)[0].rstrip("/").rpartition("/")[2].lower()
    name, number = base, 2
    while name in taken:
        name, number = f"{base}-{number}", number + 1
    return name

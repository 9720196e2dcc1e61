"""Merge of settings into a configuration file. The file keeps its other content, and its comments if it has any.

Atomic write of an edit to a client's configuration file, with a backup of the old text, and its undoing.
"""

import hashlib
import io
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import tomlkit
from msgspec import Struct
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from tomlkit.exceptions import TOMLKitError

from gateway.command_failed import CommandFailed

# YAML values are never wrapped.
_WIDTH: Final = 4096
_INDENT: Final = 2


class FileFormat(StrEnum):
    """Formats of configuration files; `ENV` is lines of NAME=value."""

    JSON = "json"
    TOML = "toml"
    YAML = "yaml"
    ENV = "env"


class NotEditable(Exception):
    """The file's content does not suit its format; the message tells the file's owner the reason."""


class ConfigEdit(Struct, frozen=True):
    """Edit of one file. Mappings are merged at any depth; other values are replaced.

    A list item is merged into the item with the same `item_key`, or appended. An entry of `defaults` is set only if the
    file lacks its key. `has_key` means that the content includes an API key, so only the owner may read the file.
    """

    path: str
    form: FileFormat
    content: dict[str, Any] | list[dict[str, Any]]
    defaults: dict[str, Any] = {}
    item_key: str = ""
    has_key: bool = False

    def fragment(self) -> str:
        """Return the text that the edit makes of an empty file."""
        return self.merged("")

    def merged(self, text: str) -> str:
        """Apply the edit to a file's text and return the result; equal to `text` if nothing changes. Raises
        `NotEditable`.
        """
        match self.form:
            case FileFormat.JSON:
                return self._json(text)
            case FileFormat.TOML:
                return self._toml(text)
            case FileFormat.YAML:
                return self._yaml(text)
            case FileFormat.ENV:
                return self._env(text)

    def _json(self, text: str) -> str:
        try:
            data: Any = json.loads(text) if text.strip() else self._empty()
        except ValueError as error:
            raise NotEditable(f"it is no plain JSON ({error}); comments would be lost") from None
        return self._changed(data, text, lambda: json.dumps(data, indent=_indent(text), ensure_ascii=False) + "\n")

    def _toml(self, text: str) -> str:
        try:
            document = tomlkit.parse(text)
        except TOMLKitError as error:
            raise NotEditable(f"it is no valid TOML ({error})") from None
        return self._changed(document, text, lambda: tomlkit.dumps(document))

    def _yaml(self, text: str) -> str:
        yaml = YAML()
        yaml.preserve_quotes = True
        yaml.width = _WIDTH
        step, offset = _yaml_indents(text)
        if offset is None:
            offset = 0 if isinstance(self.content, list) else _INDENT
        yaml.indent(mapping=step, sequence=offset + _INDENT, offset=offset)
        try:
            data = yaml.load(text)
        except (YAMLError, ValueError) as error:
            raise NotEditable(f"it is no valid YAML ({str(error).splitlines()[0]})") from None
        data = self._empty() if data is None else data

        def dump() -> str:
            out = io.StringIO()
            yaml.dump(data, out)
            return out.getvalue()

        return self._changed(data, text, dump)

    def _env(self, text: str) -> str:
        assert isinstance(self.content, dict)
        # Only newlines end lines of such a file, but `splitlines` also splits at seven other characters.
        lines = text.removesuffix("\n").split("\n") if text else []
        for name, value in self.content.items():
            wanted = f"{name}={value}"
            if "\n" in wanted or "\r" in wanted:
                raise NotEditable(f"the value of {name} has more than one line")
            places = [at for at, line in enumerate(lines) if re.match(rf"\s*(?:export\s+)?{re.escape(name)}\s*=", line)]
            if not places:
                lines.append(wanted)
            for at in places:
                lines[at] = wanted
        return "".join(f"{line}\n" for line in lines)

    def _empty(self) -> Any:
        return [] if isinstance(self.content, list) else {}

    def _changed(self, data: Any, text: str, dump: Any) -> str:
        """Merge the edit into `data`; return `dump()` if anything has changed, else `text`. Raises `NotEditable`."""
        if not isinstance(data, list if isinstance(self.content, list) else dict):
            raise NotEditable("it holds something else at its top")
        is_changed = False
        if isinstance(data, dict):
            for name, value in self.defaults.items():
                if name not in data:
                    data[name] = value
                    is_changed = True
        is_changed |= _merge(data, self.content, self.item_key)
        return dump() if is_changed else text


def _merge(data: Any, content: Any, item_key: str) -> bool:
    """Merge `content` into `data` in place. Returns whether anything has changed. Raises `NotEditable`."""
    if isinstance(content, list):
        changes = [_put(data, item, item_key) for item in content]
    else:
        changes = [_set(data, name, value, item_key) for name, value in content.items()]
    return any(changes)


def _set(data: Any, name: str, value: Any, item_key: str) -> bool:
    old = data.get(name)
    is_like = (isinstance(value, dict) and isinstance(old, Mapping)) or (
        _is_items(value, item_key) and isinstance(old, list)
    )
    if is_like:
        return _merge(old, value, item_key)
    if old == value:
        return False
    if old is not None and (isinstance(value, dict) or _is_items(value, item_key)):
        raise NotEditable(f"its {name!r} is no {'object' if isinstance(value, dict) else 'list'}")
    data[name] = value
    return True


def _put(data: Any, item: dict[str, Any], item_key: str) -> bool:
    """Merge `item` into the list item with the same key, or append it. Returns whether anything has changed."""
    for own in data:
        if isinstance(own, Mapping) and own.get(item_key) == item[item_key]:  # type: ignore[reportUnknownMemberType]
            return _merge(own, item, item_key)
    data.append(item)
    return True


def _is_items(value: Any, item_key: str) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) and item_key in item for item in value)  # type: ignore[reportUnknownVariableType]


def _indent(text: str) -> int | str:
    """Detect the indentation of a JSON file, so that only changed lines differ."""
    first = re.search(r"\n([ \t]+)\S", text)
    return first[1] if first else _INDENT


def _yaml_indents(text: str) -> tuple[int, int | None]:
    """Detect the indentation of keys and of list dashes in a YAML file; the second is None if it has no list."""
    step = offset = None
    last = 0
    for line in text.splitlines():
        content = line.lstrip(" ")
        if not content or content.startswith("#"):
            continue
        depth = len(line) - len(content)
        if content.startswith("- "):
            offset = depth - last if offset is None and depth >= last else offset
            # The keys of a list item are indented further than its dash.
            depth += _INDENT
        elif depth > last and step is None:
            step = depth - last
        last = depth
    return step or _INDENT, offset


_OWNERS: Final = 0o700


class WrittenFile(Struct, frozen=True):
    """Result of a write. `backup` is empty if the file is new; `is_unchanged` means that nothing was written.

    The other fields are what `undo` needs: the file's permissions before, a digest of what was written, and the folders
    that were made for it, the innermost first.
    """

    path: str
    backup: str
    is_unchanged: bool
    mode: int = 0
    digest: str = ""
    folders: tuple[str, ...] = ()


class ChangedSince(Exception):
    """A file is not restored, because it is not what mlxd has written; the message tells its owner what it was."""


def write(edit: ConfigEdit) -> WrittenFile:
    """Merge an edit into its file. If this fails, raises `CommandFailed`, and the file stays as it was."""
    return rewrite(Path(edit.path), edit.merged, is_private=edit.has_key)


def rewrite(file: Path, change: Callable[[str], str], *, is_private: bool = False) -> WrittenFile:
    """Replace a file's text by what `change` returns for it; `is_private` removes other users' permissions.

    If this fails, raises `CommandFailed`, and the file stays as it was.
    """
    # A symbolic link is followed, because it may point into a folder of dot files, and only its target is replaced.
    path = file.expanduser().resolve()
    try:
        kept = path.read_bytes() if path.exists() else None
        # A carriage return alone does not end a line.
        before = (kept or b"").decode().replace("\r\n", "\n")
        after = change(before)
        mode = 0 if kept is None else stat.S_IMODE(path.stat().st_mode)
        if after == before:
            if is_private and kept is not None:
                path.chmod(mode & _OWNERS)
                _check_private(path)
            return WrittenFile(str(path), "", True)
        data = after.encode()
        folders = _make_folders(path.parent)
        backup = "" if kept is None else _keep(path, kept)
        _replace(path, data, 0o600 if kept is None else mode & (_OWNERS if is_private else 0o777), is_private)
    except NotEditable as error:
        raise CommandFailed(f"{path} was not changed: {error}") from None
    except UnicodeError as error:
        raise CommandFailed(f"{path} was not changed: it is no UTF-8 text ({error})") from None
    except OSError as error:
        raise CommandFailed(f"{path} was not changed: {error.strerror or error}") from None
    return WrittenFile(str(path), backup, False, mode, _digest(data), folders)


def undo(written: WrittenFile) -> None:
    """Make a file what it was before a write, or remove it if it was new. Raises `ChangedSince` if it has been changed
    after the write, `CommandFailed` if it cannot be restored.
    """
    path, backup = Path(written.path), Path(written.backup)
    try:
        if not path.exists() and not written.backup:
            return
        kept = f"; what it was before is in {backup}" if written.backup else "; it was made by mlxctl connect"
        if not path.exists() or _digest(path.read_bytes()) != written.digest:
            raise ChangedSince(f"{path} was changed after mlxctl connect had written it, and stays as it is{kept}")
        if written.backup:
            _replace(path, backup.read_bytes(), written.mode)
            backup.unlink()
        else:
            path.unlink()
            for folder in written.folders:
                with suppress(OSError):  # It may hold other files now.
                    os.rmdir(folder)
    except OSError as error:
        raise CommandFailed(f"{path} was not restored: {error.strerror or error}") from None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _make_folders(folder: Path) -> tuple[str, ...]:
    """Make a folder and those above it; return those that were missing, the innermost first."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return tuple(map(str, missing))


def _keep(path: Path, data: bytes) -> str:
    """Back up the old text in a file with the time in its name. Only its owner may read it, because the text may
    include keys.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    backup = path.with_name(f"{path.name}.before-mlxd-{stamp}")
    number = 1
    while backup.exists():
        number += 1
        backup = path.with_name(f"{path.name}.before-mlxd-{stamp}-{number}")
    with os.fdopen(os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(data)
    return str(backup)


def _replace(path: Path, data: bytes, mode: int, is_private: bool = False) -> None:
    """Write a file with these permissions; nobody can read it before it has them."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(data)
        os.chmod(name, mode)
        if is_private:
            _check_private(Path(name))
        os.replace(name, path)
    except (OSError, NotEditable):
        os.unlink(name)
        raise


def _check_private(path: Path) -> None:
    """Check that only its owner may read a file with a key: some file systems keep no permissions. Raises
    `NotEditable`.
    """
    if path.stat().st_mode & 0o077:
        raise NotEditable("a key would be in it, and its file system lets other users read it")

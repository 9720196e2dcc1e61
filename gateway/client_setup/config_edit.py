"""Merge of settings into a configuration file. The file keeps its other content, and its comments if it has any."""

import io
import json
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

import tomlkit
from msgspec import Struct
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from tomlkit.exceptions import TOMLKitError

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

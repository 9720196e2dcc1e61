"""Names of tools as models write them: with a namespace, an index, another case, or dashes for underscores."""

import re
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

# Prefixes that models put before any name. The separator after the first may be missing: Kimi K2 writes
# `functionsshell5` when a client has removed the dots from the ids of earlier calls (sglang#21377).
_PREFIX: Final = re.compile(r"functions(?:__|[.:/_\-])?|(?:function|tools?|default_api)(?:__|[.:/_\-])")
_NAMESPACE: Final = re.compile(r"[.:/]|__")
_INDEX: Final = re.compile(r"(?<=\w)[.:_\-]?[0-9]+$")
# The tools of MCP servers are declared as `mcp__server__name`.
_SERVER: Final = re.compile(r"mcp__(?=.+__)")
# Maximum number of namespaces of a name; each leaves another candidate.
_NAMESPACES_MAX: Final = 8


class _BareName(NamedTuple):
    """Rest of a written name, and which parts were removed from it."""

    name: str
    lost_namespace: bool
    lost_index: bool


def declared_name(written: str, declared: Collection[str]) -> str:
    """Return the declared name that `written` stands for: itself, or the only one that fits without decoration.

    Decoration is a namespace, a trailing index, the case, and dashes for underscores. If no declared name fits, or
    several do, `written` is returned: clients refuse an unknown tool, but would run a wrong one.
    """
    if written in declared:
        return written
    forms = list(_forms(written))
    for spell in (str, _plain):
        spelled = {spell(form.name): form for form in reversed(forms)}
        fits = {
            name: spelled[each]
            for name in declared
            for each in (spell(_SERVER.sub("", name)), spell(name))
            if each in spelled
        }
        if fits:
            name, form = next(iter(fits.items()))
            return name if len(fits) == 1 and not _tells_apart(form, name, declared) else written
    return written


def _forms(written: str) -> Iterator[_BareName]:
    """Yield what may remain of a written name, the least changed first."""
    prefix = _PREFIX.match(written)
    rest = written[prefix.end() :] if prefix else written
    names = [(written, False), (rest, False), *((tail, True) for tail in _tails(rest))]
    yield from (_BareName(name, lost_namespace, False) for name, lost_namespace in names)
    yield from (_BareName(_INDEX.sub("", name), lost_namespace, True) for name, lost_namespace in names)


def _tails(name: str) -> Iterator[str]:
    for match, _ in zip(_NAMESPACE.finditer(name), range(_NAMESPACES_MAX), strict=False):
        yield name[match.end() :]


def _plain(name: str) -> str:
    """Return the spelling that the variants of a name share."""
    return _NAMESPACE.sub(":", name).replace("-", "_").casefold()


def _tells_apart(form: _BareName, name: str, declared: Collection[str]) -> bool:
    """Return whether declared tools differ from `name` only in what `form` has lost, which therefore has a meaning."""
    others = [other for other in declared if other != name]
    return (form.lost_index and any(_INDEX.sub("", other) == name for other in others)) or (
        form.lost_namespace and any(name in _tails(other) for other in others)
    )

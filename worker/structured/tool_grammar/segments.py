"""Regular expressions of text as a sequence of segments, each of which begins with `<` and holds no other one.

They need no complement of an expression: llguidance explores complements when it compiles a grammar, which takes too
long where several are combined.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

from worker.structured.tool_grammar.lark import escape

REST: Final = "[^<]*"
# Characters that are no part of a key in a tag.
_NO_KEY: Final = r"<>\s\x1c-\x1f\x22'=\/"


def beginning(words: Iterable[str], rest: str = REST) -> str:
    """Return the regex of text that begins with one of the `words`; "" if there are none."""
    options = "|".join(sorted(set(map(escape, words))))
    return f"({options}){rest}" if options else ""


def not_beginning(words: Collection[str]) -> str:
    """Return the regex of the rest of a segment that begins with none of the `words`."""
    return _other(words, "<", REST, is_whole=False)


def other_key(keys: Collection[str]) -> str:
    """Return the regex of a key that is none of the `keys`, and not empty."""
    return _other({*keys, ""}, _NO_KEY, f"[^{_NO_KEY}]*", is_whole=True)


def _other(words: Collection[str], excluded: str, rest: str, *, is_whole: bool) -> str:
    """Return the regex of text without the `excluded` characters that begins with none of the `words`, or with
    `is_whole` is none of them.
    """
    firsts = sorted({word[0] for word in words if word})
    options = [f"[^{excluded}{''.join(map(escape, firsts))}]{rest}"]
    for first in firsts:
        further = [word[1:] for word in words if word.startswith(first)]
        if is_whole or "" not in further:
            options.append(escape(first) + _other(further, excluded, rest, is_whole=is_whole))
    return f"({'|'.join(options)})" + ("" if "" in words else "?")


def joined(edges: Mapping[tuple[str, str], str], start: str, final: str, name: Callable[[str], str]) -> str:
    """Return the expression of all paths from `start` to `final` in an automaton, whose edges have expressions.

    `name` defines an expression and returns its name, so that each is written once.
    """
    left = dict(edges)
    inner = {state for edge in left for state in edge} - {start, final}
    for state in sorted(inner):
        loop = name(f"({left.pop((state, state))})*") if (state, state) in left else ""
        into = {edge[0]: left.pop(edge) for edge in list(left) if edge[1] == state}
        out = {edge[1]: left.pop(edge) for edge in list(left) if edge[0] == state}
        after = {target: name(f"{loop} {name(rest)}") for target, rest in out.items()}
        for source, before in into.items():
            for target, rest in after.items():
                known = left.get((source, target))
                path = f"{name(before)} {rest}"
                left[source, target] = f"{known} | {path}" if known else path
    return left.get((start, final), "")

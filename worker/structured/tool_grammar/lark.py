"""Writer of Lark text for llguidance: literal text, text up to a marker, and named rules."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from worker.output.parsers.schema import Schema
from worker.structured.tool_grammar.schemas import ToolSchema

# Whitespace of Python's `\s`.
BLANK: Final = r"[\s\x1c-\x1f]"
_PUNCTUATION: Final = frozenset("\\.+*?()|[]{}^$#&-~/")


class MarkupTokens:
    """Spelling of markup in one model's vocabulary: a grammar must name control tokens by their ids.

    `specials` are these control tokens. `tokens` are further ones that may be markup, which text can spell. A token in
    `eos_ids` ends the answer, so no grammar contains it.
    """

    def __init__(
        self,
        vocabulary: Collection[str],
        specials: Mapping[str, int],
        eos_ids: Collection[int],
        tokens: Collection[str] = (),
    ) -> None:
        self._vocabulary = vocabulary
        self._tokens = frozenset(tokens)
        self._specials = specials
        self._eos_ids = frozenset(eos_ids)
        self.controls = sorted({*specials.values(), *eos_ids})
        words = sorted(specials, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, words)) or r"(?!)")

    def pieces(self, text: str) -> list[str | int]:
        """Split markup into plain text and ids of control tokens, up to the first token that ends the answer."""
        pieces: list[str | int] = []
        at = 0
        for hit in self._split.finditer(text):
            if hit.start() > at:
                pieces.append(text[at : hit.start()])
            token = self._specials[hit[0]]
            if token in self._eos_ids:
                return pieces
            pieces.append(token)
            at = hit.end()
        return [*pieces, text[at:]] if at < len(text) else pieces

    def is_plain(self, text: str) -> bool:
        """Return whether ordinary tokens alone can spell the text."""
        return not self._split.search(text)

    def has_token(self, text: str) -> bool:
        """Return whether the text contains a token of the vocabulary that may be markup."""
        return not self.is_plain(text) or any(token in text for token in self._tokens)

    def known(self, options: Sequence[str]) -> str:
        """Return the first spelling that is a token of the vocabulary, else the first spelling; "" if there is none."""
        return next((option for option in options if self.has(option)), options[0] if options else "")

    def has(self, text: str) -> bool:
        """Return whether the text is a token of the vocabulary, or begins with a control token."""
        return text in self._vocabulary or self._split.match(text) is not None


class Lark:
    """Grammar under construction. Expressions are strings; equal rules share a name."""

    def __init__(self, marks: MarkupTokens) -> None:
        self.marks = marks
        # Names of tools whose schemas are only partly enforced by the grammar.
        self.unheld: set[str] = set()
        self._rules: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def text(self, text: str) -> str:
        """Return an expression for exactly this text."""
        return " ".join(
            f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece, ensure_ascii=False)
            for piece in self.marks.pieces(text)
        )

    def until(self, end: str, banned: Sequence[str] = (), *, body: str = r"(?s:.*)", first: Sequence[str] = ()) -> str:
        """Return an expression for text that matches `body` without `end` and the `banned` texts, followed by `end`.

        The text does not begin with one of the texts in `first`, after whitespace.
        """
        return self.before(end, self.without(body, (end, *banned), first))

    def before(self, end: str, plain: str) -> str:
        """Return an expression for text of the terminal's expression `plain`, followed by `end`."""
        pieces = self.marks.pieces(end)
        if not pieces or isinstance(pieces[0], int):
            # llguidance does not allow empty lexemes.
            some = self.terminal(f"{plain} & /(?s:.+)/")
            return f"({some})? {self.text(end)}"
        head, rest = self.terminal(f"({plain}) {self.text(pieces[0])}"), end[len(pieces[0]) :]
        return f"{head} {self.text(rest)}" if rest else head

    def parameters(self, tool: ToolSchema) -> Schema:
        """Return a tool's parameters to write one by one; conditions on several parameters are ignored."""
        if not tool.is_plain:
            self.unheld.add(tool.name)
        return tool.properties

    def ordinary(self) -> str:
        """Return an expression for any tokens except control tokens; unlike `until`, it may end within a character."""
        ids = self.marks.controls
        starts = [at for at, before in zip(ids, [None, *ids[:-1]], strict=True) if before != at - 1]
        ends = [at for at, after in zip(ids, [*ids[1:], None], strict=True) if after != at + 1]
        ranges = (f"{start}-{end}" if end > start else str(start) for start, end in zip(starts, ends, strict=True))
        return f"(<[^{','.join(ranges)}]>)*"

    def without(self, body: str, banned: Sequence[str], first: Sequence[str] = ()) -> str:
        """Return a terminal's expression for text that matches the regex, contains none of the `banned` texts and does
        not begin with one of the texts in `first`, after whitespace.
        """
        words = sorted({escape(word) for word in banned if word and self.marks.is_plain(word)})
        starts = sorted({escape(word) for word in first if word and self.marks.is_plain(word)})
        banned_texts = [f".*({'|'.join(words)})"] if words else []
        banned_texts += [f"{BLANK}*({'|'.join(starts)})"] if starts else []
        return f"/{body}/" + (f" & ~/(?s:({'|'.join(banned_texts)}).*)/" if banned_texts else "")

    def rule(self, body: str) -> str:
        return self._named(body, "r")

    def terminal(self, body: str) -> str:
        return self._named(body, "T")

    def reserve(self) -> str:
        """Return the name of a rule that is defined later, so that it can refer to itself."""
        name = f"r{len(self._rules)}"
        self._rules[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        self._rules[name] = body

    def source(self, start: str) -> str:
        return "\n".join([f"start: {start}", *(f"{name}: {body}" for name, body in self._rules.items())])

    def _named(self, body: str, prefix: str) -> str:
        key = prefix + body
        if key not in self._names:
            self._names[key] = f"{prefix}{len(self._rules)}"
            self._rules[self._names[key]] = body
        return self._names[key]


def escape(text: str) -> str:
    """Return a regex for exactly this text, for use between slashes."""
    return "".join("\\n" if char == "\n" else "\\" + char if char in _PUNCTUATION else char for char in text)


def either(options: Sequence[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"

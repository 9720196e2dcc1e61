"""Patterns in which `*` stands for any text. They are used for aliases of models and for the models of a key."""


class Pattern:
    """A pattern. Matching takes time linear in the name's length, so no pattern can make a request slow."""

    __slots__ = ("_pieces", "specificity", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._pieces = text.split("*")
        # The pattern with the longest literal prefix is the most specific, then the one with the most literal text.
        self.specificity = (len(self._pieces[0]), sum(map(len, self._pieces)))

    def matches(self, name: str) -> bool:
        """Whether `name` equals the pattern with some text in place of each `*`."""
        if len(self._pieces) == 1:
            return name == self.text
        first, *middle, last = self._pieces
        end = len(name) - len(last)
        if end < len(first) or not name.startswith(first) or not name.endswith(last):
            return False
        start = len(first)
        for piece in middle:
            at = name.find(piece, start, end)
            if at < 0:
                return False
            start = at + len(piece)
        return True

"""Place of a row in the tree of prefixes, and the tokens that came next there before."""

from collections.abc import Sequence

from worker.prefix_cache.radix_tree import RadixNode


class PrefixCursor:
    """Place of a row in the tree. Reads tokens alone, each in constant time; owned by the engine thread.

    Edges may be cut and evicted meanwhile: a node keeps its tokens, and knows what is above it.
    """

    __slots__ = ("_at", "_node")

    def __init__(self, node: RadixNode, at: int) -> None:
        """`at` is the number of the row's tokens; the last of them is in `node`."""
        self._node = node
        self._at = at

    def advance(self, tokens: Sequence[int]) -> bool:
        """Go on by these tokens of the row; False where they are not in the tree, and the branch has ended."""
        for token in tokens:
            node = self._edge()
            if self._at == node.end:
                child = node.children.get(token)
                if child is None:
                    return False
                node = child
            elif node.tokens[self._at - node.begin] != token:
                return False
            self._node = node
            self._at += 1
        return True

    def ahead(self, most: int) -> list[int]:
        """At most so many tokens that come next, along the newest edges, up to a medium."""
        node, at, ahead = self._edge(), self._at, list[int]()
        while len(ahead) < most:
            if at == node.end:
                if not node.children:
                    break
                node = next(reversed(node.children.values()))
            tokens = node.tokens[at - node.begin :][: most - len(ahead)].tolist()
            medium = next((index for index, token in enumerate(tokens) if token < 0), None)
            if medium is not None:
                return ahead + tokens[:medium]
            ahead += tokens
            at += len(tokens)
        return ahead

    def _edge(self) -> RadixNode:
        """The edge in which the row's last token is: the one that it was found in may have been cut."""
        node = self._node
        while self._at <= node.begin and node.parent is not None:
            node = node.parent
        return node

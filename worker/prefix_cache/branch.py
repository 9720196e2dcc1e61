"""Cursor of a row in the prefix tree. Drafts are taken from the tokens that followed the same text in earlier
sequences."""

from collections.abc import Sequence

from worker.prefix_cache.radix_tree import RadixNode


class PrefixCursor:
    """Position of a row in the prefix tree. The cursor reads only tokens, each in constant time. Owned by the engine
    thread.

    Edges may be split or evicted while the cursor holds a node, because the node keeps its tokens and its parent.
    """

    __slots__ = ("_at", "_node")

    def __init__(self, node: RadixNode, at: int) -> None:
        """`at` is the number of the row's tokens. The last of them is in `node`."""
        self._node = node
        self._at = at

    def advance(self, tokens: Sequence[int]) -> bool:
        """Move over these tokens of the row. Returns False if they are not in the tree."""
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

    def next_tokens(self, most: int) -> list[int]:
        """Return at most `most` tokens that follow the row's position along the newest edges, up to a medium."""
        node, at, following = self._edge(), self._at, list[int]()
        while len(following) < most:
            if at == node.end:
                if not node.children:
                    break
                node = next(reversed(node.children.values()))
            tokens = node.tokens[at - node.begin :][: most - len(following)].tolist()
            medium = next((index for index, token in enumerate(tokens) if token < 0), None)
            if medium is not None:
                return following + tokens[:medium]
            following += tokens
            at += len(tokens)
        return following

    def _edge(self) -> RadixNode:
        """Return the edge of the row's last token, which may have been split off `_node`."""
        node = self._node
        while self._at <= node.begin and node.parent is not None:
            node = node.parent
        return node

"""Checks of a prefix cache's accounts and invariants."""
# pyright: reportPrivateUsage=false

from worker.prefix_cache.cache_and_eviction import PrefixCache
from worker.prefix_cache.radix_tree import RadixNode, Tree


def check_cache(cache: PrefixCache) -> None:
    """Raise AssertionError if the accounts of a cache are wrong."""
    check_tree(cache._tree)
    assert cache.nbytes <= cache.budget
    assert cache.arrays <= cache._max_arrays


def check_tree(tree: Tree) -> None:
    """Raise AssertionError if the accounts of a tree are wrong."""
    nodes = list(tree._nodes())
    for node in nodes:
        for first, child in node.children.items():
            assert child.parent is node
            assert first == int(child.tokens[0])
            assert child.begin == node.end
    nodes = [node for node in nodes if node.parent is not None]
    assert all(node.is_held or node.extent is not None for node in nodes)
    held = [node for node in nodes if node.is_held]
    age = {node: at for at, node in enumerate(tree._recency)}
    assert set(held) == set(age)
    for node in held:
        assert node.parent is not None
        assert node.parent.parent is None or age[node.parent] > age[node], "the oldest node is a leaf"
        assert node.nbytes == tree.span_bytes(len(node.tokens), node.span or [], node.state) + node.tokens.nbytes
        assert node.state is None or tree.covers(node), "a checkpoint has its windows"
        is_useful = node.state is not None or _has_held_children(node)
        assert is_useful or not tree.layout.needs_checkpoints, "every held path ends in a checkpoint"
    assert tree.nbytes == sum(node.nbytes for node in held)
    assert tree.arrays == sum(node.arrays for node in held)
    assert all(root.children for root in tree._roots.values()), "an empty tree is removed"


def _has_held_children(node: RadixNode) -> bool:
    return any(child.is_held for child in node.children.values())

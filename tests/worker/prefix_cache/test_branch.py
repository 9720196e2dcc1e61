"""Branches of the tree of prefixes: they are read on while edges are cut and evicted."""

from pathlib import Path
from typing import Any

import numpy as np

from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, spec
from tests.worker.structured.test_drafted_rows import Free
from worker.prefix_cache.cache_and_eviction import PrefixCursor
from worker.prefix_cache.radix_tree import EMPTY, RadixNode
from worker.speculation.policy import Speculator
from worker.speculation.text_sources import DraftSource


def below(parent: RadixNode, *tokens: int) -> RadixNode:
    node = RadixNode(np.array(tokens, dtype=np.int32), parent.end + len(tokens), parent)
    parent.children[tokens[0]] = node
    return node


def test_a_branch_goes_on_for_as_long_as_the_row_goes_the_same_way() -> None:
    root = RadixNode(EMPTY, 0, None)
    trunk = below(root, 1, 2, 3, 4, 5)
    below(trunk, 6, 7)
    below(trunk, 8, 9, -5, 10)
    branch = PrefixCursor(trunk, 3)

    assert branch.next_tokens(1) == [4]
    assert branch.next_tokens(10) == [4, 5, 8, 9], "the newest edge, up to a medium"
    assert branch.advance([4, 5])
    assert branch.next_tokens(3) == [8, 9]
    assert branch.advance([6])
    assert branch.next_tokens(3) == [7]
    assert not branch.advance([9])
    end = PrefixCursor(trunk, 5)
    assert not end.advance([11])


def test_an_edge_that_is_cut_or_evicted_meanwhile_is_read_on() -> None:
    root = RadixNode(EMPTY, 0, None)
    whole = below(root, 1, 2, 3, 4, 5, 6)
    branches = [PrefixCursor(whole, at) for at in (2, 3, 4)]
    upper = RadixNode(whole.tokens[:3].copy(), 3, root)
    root.children[1] = upper
    whole.tokens, whole.parent = whole.tokens[3:].copy(), upper
    upper.children[4] = whole
    below(upper, 9, 8)

    assert [branch.next_tokens(9) for branch in branches] == [[3, 9, 8], [9, 8], [5, 6]]
    assert branches[1].advance([4, 5])
    assert branches[1].next_tokens(9) == [6]
    del root.children[1]
    assert branches[0].advance([3, 4])
    assert branches[0].next_tokens(9) == [5, 6]


def test_the_same_request_again_is_drafted_from_its_answer_and_one_of_another_salt_is_not(model_folder: Any) -> None:
    drafter = Speculator()
    drafter.costs = Free()
    folder: Path = model_folder("qwen3")

    def request(rid: int, salt: str) -> Generate:
        prompt = TokensPrompt(tuple(20 + (7 * at * at) % 400 for at in range(70)))
        return Generate(rid, prompt, Sampling(temperature=0.8, seed=3, ignore_eos=True), 24, cache_salt=salt)

    def accepted() -> int:
        return drafter.counts[DraftSource.TREE].accepted

    with EngineHarness(spec(folder, cache_bytes=1 << 26), drafter=drafter) as engine:
        first = engine.run([request(1, "ours")])[0]
        assert accepted() == 0
        other = engine.run([request(2, "theirs")])[0]
        assert accepted() == 0
        again = engine.run([request(3, "ours")])[0]
        assert accepted() >= 15
    assert first.ids == other.ids == again.ids

"""Events of a prefix cache: what they say is held is what the cache has, in the form that vLLM publishes."""

import random
import socket
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import zmq

from tests.support.caches import filled, layout
from tests.support.scale import patient
from worker.prefix_cache import kv_events
from worker.prefix_cache.cache_and_eviction import PrefixCache
from worker.prefix_cache.kv_events import (
    BLOCK,
    END_SEQUENCE,
    AllBlocksCleared,
    BlockEventLog,
    BlockRemoved,
    BlockStored,
    CannotPublish,
    Event,
    KvPublisher,
)
from worker.prefix_cache.radix_tree import Tokens, adapter_number, adapter_salt, salt_key

Block = tuple[int | None, tuple[int, ...]]


class Router:
    """An index of blocks as one that listens keeps it: by the block before, and the tokens."""

    def __init__(self) -> None:
        self.hashes: dict[Block, set[int]] = {}
        self.blocks: dict[int, Block] = {}

    def hear(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case BlockStored(hashes, above, ids):
                    assert len(ids) == BLOCK * len(hashes)
                    for at, each in enumerate(hashes):
                        assert each not in self.blocks, "told twice"
                        assert above is None or above in self.blocks, "its parent is unknown"
                        block = above, tuple(ids[at * BLOCK : (at + 1) * BLOCK])
                        self.blocks[each], above = block, each
                        self.hashes.setdefault(block, set()).add(each)
                case BlockRemoved(hashes):
                    for each in hashes:
                        self.hashes[self.blocks.pop(each)].discard(each)
                case AllBlocksCleared():
                    self.hashes, self.blocks = {}, {}

    def known(self, tokens: Sequence[int]) -> int:
        """Leading blocks of a prompt that some salt has."""
        ends: set[int | None] = {None}
        count = 0
        while ends and (count + 1) * BLOCK <= len(tokens):
            ids = tuple(tokens[count * BLOCK : (count + 1) * BLOCK])
            ends = {each for above in ends for each in self.hashes.get((above, ids), set())}
            count += bool(ends)
        return count


@pytest.mark.parametrize("budget", [1 << 30, 60_000])
def test_a_router_knows_of_each_prompt_the_blocks_that_the_cache_has(budget: int) -> None:
    rng, router = random.Random(budget), Router()
    cache = PrefixCache(layout("plain"), budget, journal=BlockEventLog(router.hear))
    beginnings = [[rng.randrange(50) for _ in range(rng.randrange(20, 300))] for _ in range(3)]
    prompts: list[list[int]] = []
    for _ in range(40):
        prompt = [*rng.choice(beginnings), *(rng.randrange(50) for _ in range(rng.randrange(200)))]
        prompts.append(prompt)
        cache.store(np.array(prompt, dtype=np.int32), filled("plain", prompt))
        if rng.random() < 0.5:
            other = rng.choice(prompts)
            cache.fetch(np.array(other, dtype=np.int32))
        cache.publish_events()
        for each in prompts:
            assert router.known(each) == cache.longest(np.array(each, dtype=np.int32)) // BLOCK
    assert (cache.counts.prefix_evictions > 0) == (budget < 1 << 30)
    cache.clear()
    cache.publish_events()
    assert router.blocks == {}


def test_blocks_of_two_salts_are_two() -> None:
    router, prompt = Router(), list(range(BLOCK))
    cache = PrefixCache(layout("plain"), 1 << 30, journal=BlockEventLog(router.hear))
    for salt in ("a", "b"):
        cache.store(np.array(prompt, dtype=np.int32), filled("plain", prompt), salt)
    cache.publish_events()
    assert len(router.blocks) == 2


def test_blocks_of_an_adapter_are_told_as_its_own_and_no_client_can_name_one() -> None:
    heard: list[Event] = []
    cache = PrefixCache(layout("plain"), 1 << 30, journal=BlockEventLog(heard.extend))
    prompt = list(range(2 * BLOCK))
    digests = ["00" * 32, "ff" * 32]
    salts = ["", "key\0lora:00", *(adapter_salt(digest) + end for digest in digests for end in ("", "key"))]
    for salt in salts:
        # In two pieces, of which the second is told with its own event.
        for end in (BLOCK, 2 * BLOCK):
            cache.store(np.array(prompt[:end], dtype=np.int32), filled("plain", prompt[:end]), salt)
            cache.publish_events()
    told = [event.lora_id for event in heard if isinstance(event, BlockStored)]
    first, last = (adapter_number(salt_key(salt)) for salt in (salts[2], salts[4]))
    assert told == [None] * 4 + [first] * 4 + [last] * 4
    assert first is not None
    assert last is not None
    assert 0 < first < last < 2**31


def test_a_prompt_that_is_stored_in_pieces_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(above: bytes, tokens: Tokens) -> list[int]:
        hashes = hash_blocks(above, tokens)
        hashed.extend(hashes)
        return hashes

    hash_blocks = kv_events.hash_blocks
    monkeypatch.setattr(kv_events, "hash_blocks", counted)
    router, prompt = Router(), [at % 50 for at in range(1000)]
    cache = PrefixCache(layout("plain"), 1 << 30, journal=BlockEventLog(router.hear))
    for end in range(10, 1001, 10):
        cache.store(np.array(prompt[:end], dtype=np.int32), filled("plain", prompt[:end]))
    cache.publish_events()
    assert router.known(prompt) == len(router.blocks) == len(hashed) == 1000 // BLOCK
    cache.clear()
    cache.publish_events()
    assert len(hashed) == 1000 // BLOCK, "what is let go of is known"


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def test_events_are_published_in_order_and_replayed_to_those_who_missed_them() -> None:
    endpoint, replay = free_address(), free_address()
    publisher = KvPublisher(endpoint, replay, "kv@demo")
    context = zmq.Context()
    subscriber, asker = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    try:
        subscriber.subscribe(b"kv@")
        subscriber.connect(endpoint)
        asker.connect(replay)
        stored = BlockStored([7], None, list(range(BLOCK)), BLOCK, None, "GPU")
        sent: list[Sequence[Event]] = [[AllBlocksCleared()], [stored], [BlockRemoved([7], "GPU")]]
        for events in sent:
            publisher.put(events)
        asker.send(b"junk")
        replayed: list[tuple[int, object]] = []
        while len(replayed) < 2:  # the thread may not have published all when it is asked first
            replayed.clear()
            asker.send((1).to_bytes(8))
            while True:
                assert asker.poll(patient(10) * 1000)
                _, sequence, batch = asker.recv_multipart()
                if sequence == END_SEQUENCE:
                    break
                replayed.append((int.from_bytes(sequence), msgspec.msgpack.decode(batch)[1]))
        assert replayed == [
            (1, [["BlockStored", [7], None, list(range(BLOCK)), BLOCK, None, "GPU"]]),
            (2, [["BlockRemoved", [7], "GPU"]]),
        ]
        last, got = 0, b""
        while last < 3:  # subscriptions take their time; one that took none has the first ones too
            publisher.put([AllBlocksCleared()])
            if subscriber.poll(50):
                topic, sequence, got = subscriber.recv_multipart()
                assert topic == b"kv@demo"
                last = int.from_bytes(sequence)
        assert msgspec.msgpack.decode(got)[1] == [["AllBlocksCleared"]]
    finally:
        publisher.close()
        context.destroy(linger=0)


def test_batches_for_replays_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_REPLAY_BYTES", 3000)
    endpoint, replay = free_address(), free_address()
    publisher = KvPublisher(endpoint, replay)
    context = zmq.Context()
    asker = context.socket(zmq.DEALER)
    try:
        asker.connect(replay)
        for at in range(10):
            publisher.put([BlockStored([at], None, [1000] * 300, 64, None, "GPU")])
        kept: list[int] = []
        while not kept or kept[-1] != 9:
            kept.clear()
            asker.send(bytes(8))
            while True:
                assert asker.poll(patient(10) * 1000)
                _, sequence, _ = asker.recv_multipart()
                if sequence == END_SEQUENCE:
                    break
                kept.append(int.from_bytes(sequence))
        assert kept == [7, 8, 9]
    finally:
        publisher.close()
        context.destroy(linger=0)


def test_an_address_that_cannot_be_listened_on_is_said() -> None:
    with pytest.raises(CannotPublish, match=r"kv_events: tcp://203\.0\.113\.1:5557"):
        KvPublisher("tcp://203.0.113.1:5557")

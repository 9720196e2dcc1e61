"""Base64 of media in captured bodies."""

import base64
import hashlib
import json
import random
import re
import time
from itertools import pairwise

import pytest

from gateway.http.capture import RUN_MIN, MediaDigests
from tests.support.scale import patient

DATA = random.Random(1).randbytes(5000)


def filtered(body: bytes, cuts: list[int]) -> bytes:
    media = MediaDigests()
    edges = [0, *sorted(cuts), len(body)]
    kept = b"".join(media.feed(body[begin:end]) for begin, end in pairwise(edges))
    return kept + media.finish()


@pytest.mark.parametrize("seed", range(20))
def test_an_image_is_its_digest_however_the_body_comes(seed: int) -> None:
    image = "data:image/png;base64," + base64.b64encode(DATA[seed:]).decode()
    body = json.dumps({"model": "m", "a": image, "text": "hello", "b": image}).encode()
    chance = random.Random(seed)
    cuts = [chance.randrange(len(body)) for _ in range(chance.randrange(30))]
    digest = hashlib.blake2b(DATA[seed:], digest_size=32).hexdigest()
    told = f"data:image/png;base64,[{len(DATA) - seed} bytes of base64 not kept, blake2b-256 {digest}]"

    assert json.loads(filtered(body, cuts)) == {"model": "m", "a": told, "text": "hello", "b": told}


def test_short_runs_and_text_stay_as_they_are() -> None:
    body = json.dumps({"text": "word " * 1000, "key": "A" * (RUN_MIN - 1)}).encode()

    assert filtered(body, [10, 500, 5100]) == body
    assert filtered(body[:-2], []) == body[:-2]


def test_a_run_that_is_no_base64_is_left_out_without_a_digest() -> None:
    kept = filtered(b'"' + b"A=" * RUN_MIN + b'"', [700])

    assert b"not kept" in kept
    assert len(kept) < 200


@pytest.mark.parametrize("seed", range(20))
def test_random_bodies_keep_all_that_is_no_long_run(seed: int) -> None:
    chance = random.Random(seed)
    runs = (
        b"A" * chance.choice([0, 1, 50, RUN_MIN - 1, RUN_MIN, 3000]) + chance.choice([b"", b"=", b' ", '])
        for _ in range(60)
    )
    body = b"".join(runs)
    cuts = [chance.randrange(len(body)) for _ in range(chance.randrange(30))]
    expected = re.sub(rb"[A=]{%d,}" % RUN_MIN, b"(left out)", body)

    assert re.sub(rb"\[\d+ bytes of base64 not kept[^]]*\]", b"(left out)", filtered(body, cuts)) == expected


def test_a_run_that_ends_just_before_its_piece_takes_little_time() -> None:
    body = (b"A" * 65_532 + b" ") * 20
    began = time.perf_counter()

    kept = filtered(body, list(range(65_533, len(body), 65_533)))
    assert time.perf_counter() - began < patient(10)
    assert kept.count(b"[49149 bytes of base64 not kept") == 20

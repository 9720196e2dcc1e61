"""Base64 of media in captured bodies."""

import base64
import hashlib
import json
import random
from itertools import pairwise

import pytest

from gateway.http.media_digests import RUN_MIN, MediaDigests

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

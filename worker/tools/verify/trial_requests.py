"""Requests of a verification: short and long, greedy and sampled, with pictures, and with adapters."""

import hashlib
import io
import math
import random
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace
from PIL import Image

from protocol.prompts import ChatPrompt, Media, TextPrompt, TokensPrompt
from protocol.to_worker import Generate, Sampling
from worker.model.loader import LoadedModel
from worker.model.lora.adapters import adapters_of
from worker.sparse.selected_tokens import BLOCK_TOKENS

PARTS: Final = (0.02, 0.15, 0.5, 1.0)
SHARED_PART: Final = 0.375
# Number of rows in the crowd. They outgrow the estimate of admission, so that one row is preempted if memory is short.
CROWD: Final = 3
# Number of prompt tokens of each row.
CROWD_PROMPT: Final = 240
# Number of output tokens that are given, so that the generated tokens cross the limit.
CROWD_GIVEN: Final = 250
CROWD_OUTPUT: Final = 290
# Number of sparse prompts, each of which keeps eight of its ten blocks.
SPARSE_ROWS: Final = 3
SPARSE_PROMPT: Final = 10 * BLOCK_TOKENS
SPARSE_KEEP: Final = 0.8
SPARSE_OUTPUT: Final = 12
# Number of pixels per side of a square in a picture.
SQUARE_PIXELS: Final = 24
WORDS: Final = (
    "time", "people", "water", "light", "house", "river", "stone", "music", "paper", "green", "small", "early", "under",
    "after", "between", "never", "always", "because",
)  # fmt: skip


def text_requests(tokens: int, words: int, max_context: int) -> list[Generate]:
    """Return greedy and seeded requests, short and long, half of them with a common beginning."""
    rng = random.Random(0)
    shared = math.ceil(SHARED_PART * words)
    common = rng.choices(WORDS, k=shared)
    requests: list[Generate] = []
    for part in PARTS:
        for is_sampled in (False, True):
            own = rng.choices(WORDS, k=min(math.ceil(part * words), max_context // 8))
            text = " ".join([*common, *own] if is_sampled and max_context > 8 * shared else own)
            sampling = Sampling(temperature=0.0, ignore_eos=True)
            if is_sampled:
                sampling = Sampling(temperature=0.8, top_p=0.95, seed=rng.getrandbits(62), ignore_eos=True)
            requests.append(Generate(len(requests) + 1, TextPrompt(text), sampling, max_tokens=tokens, top_logprobs=2))
    return requests


def adapter_requests(loaded: LoadedModel, requests: Sequence[Generate]) -> list[Generate]:
    """Return the first two requests, greedy and sampled, for each adapter that is served."""
    adapters = adapters_of(loaded.model)
    names = [info.name for info in adapters.infos if info.failure is None] if adapters is not None else []
    pairs = [(name, request) for name in names for request in requests[:2]]
    first = len(requests) + 1
    return [replace(request, rid=first + at, adapter=name) for at, (name, request) in enumerate(pairs)]


def picture_requests(rid: int, tokens: int) -> list[Generate]:
    """Return four requests with pictures: two pictures with the same text, the first picture with another text, and
    both pictures in one message."""
    first, second = picture(1), picture(2, 8, 4)
    made: list[Generate] = []
    for media, question in (((first,), 0), ((second,), 0), ((first,), 1), ((first, second), 2)):
        shown = [{"type": "image", "media": at} for at in range(len(media))]
        content = [*shown, {"type": "text", "text": " ".join(WORDS[question : question + 6])}]
        prompt = ChatPrompt([{"role": "user", "content": content}], media=media)
        is_sampled = len(made) % 2 == 1
        sampling = Sampling(temperature=0.8 if is_sampled else 0.0, top_p=0.95, seed=rid, ignore_eos=True)
        made.append(Generate(rid + len(made), prompt, sampling, max_tokens=tokens, top_logprobs=2))
    return made


def sparse_requests(vocab_size: int) -> list[Generate]:
    """Return prompts of which sparse prefill skips two blocks."""
    rng = random.Random(2)
    prompts = [tuple(rng.randrange(vocab_size) for _ in range(SPARSE_PROMPT)) for _ in range(SPARSE_ROWS)]
    return [
        replace(_request(rid, prompt, SPARSE_OUTPUT), sparse_keep=SPARSE_KEEP) for rid, prompt in enumerate(prompts, 1)
    ]


def crowd_requests(vocab_size: int) -> list[Generate]:
    """Return rows of which one must be preempted if memory is short."""
    requests: list[Generate] = []
    for rid in range(1, CROWD + 1):
        ids = tuple((20 + rid * 31 + at * 7) % vocab_size for at in range(CROWD_PROMPT + CROWD_GIVEN))
        request = _request(rid, ids[:CROWD_PROMPT], CROWD_OUTPUT)
        requests.append(replace(request, resume=ids[CROWD_PROMPT:]))
    return requests


def _request(rid: int, prompt: tuple[int, ...], max_tokens: int) -> Generate:
    sampling = Sampling(temperature=0.8 if rid % 2 else 0.0, seed=rid, ignore_eos=True)
    return Generate(rid, TokensPrompt(prompt), sampling, max_tokens=max_tokens, top_logprobs=2)


def picture(seed: int, wide: int = 6, high: int = 6) -> Media:
    """Return a PNG of `wide` × `high` coloured squares."""
    squares = Image.frombytes("RGB", (wide, high), random.Random(seed).randbytes(3 * wide * high))
    stream = io.BytesIO()
    squares.resize((wide * SQUARE_PIXELS, high * SQUARE_PIXELS), Image.Resampling.NEAREST).save(stream, "PNG")
    data = stream.getvalue()
    return Media("image", hashlib.blake2b(data, digest_size=32).digest(), data)

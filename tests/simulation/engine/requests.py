"""Requests of simulated clients, and the answer that each has alone on a fresh engine."""

import random
from dataclasses import dataclass

from msgspec.structs import replace

from protocol.to_worker import Constraint, ConstraintKind, Generate, Sampling, TokensPrompt
from tests.support.models import VOCAB

# Seeds of one block ask the same requests, so that an answer alone is computed once for several worlds.
BLOCK_SEEDS = 100
KINDS = 24
_SHARED = 0, 1, 2, 31, 63, 64, 65, 96, 130, 160
# The models often repeat these beginnings, which then are half complete for many tokens.
_HALF_STOPS = "aab", "eex", "oox", "totox", "vivix", "\x0b\x0bx", "\ufffd\ufffdx"
_CONSTRAINTS = (
    Constraint(ConstraintKind.REGEX, "[a-d]{3,9}"),
    Constraint(ConstraintKind.CHOICE, '["left", "right", "rights of way"]'),
    Constraint(ConstraintKind.JSON_SCHEMA, '{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"],'
               '"additionalProperties":false}'),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """All that a client is promised of an answer, however it was scheduled."""

    ids: tuple[int, ...]
    ending_ids: tuple[int, ...]
    text: str
    finish: str
    prompt_tokens: int
    completion_tokens: int


def request_of(block: int, kind: int) -> Generate:
    """Return the request of this number among those of a block of seeds; equal for all worlds of the block."""
    trunks = random.Random(f"trunk {block} {kind % 3}")
    trunk = [trunks.randrange(10, VOCAB) for _ in range(max(_SHARED))]
    rng = random.Random(f"request {block} {kind}")
    prompt = trunk[: rng.choice(_SHARED)]
    prompt += [rng.randrange(10, VOCAB) for _ in range(rng.choice((1, 1, 3, 20, 70)))]
    if rng.random() < 0.3:  # a repetition, in which lookup finds drafts
        prompt += prompt[-24:] * 2
    constraint = rng.choice((*_CONSTRAINTS, *[None] * 9))
    sampling = Sampling(
        temperature=rng.choice((0.0, 0.0, 0.8, 1.3)),
        top_k=rng.choice((0, 0, 20)),
        top_p=rng.choice((1.0, 0.9)),
        seed=rng.getrandbits(50),
        repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.5)),
        ignore_eos=rng.random() < 0.5,
        min_tokens=rng.choice((0, 0, 4)) if constraint is None else 0,
    )
    return Generate(
        0,
        TokensPrompt(tuple(prompt)),
        sampling,
        max_tokens=rng.choice((1, 2, 6, 12, 24, 40)),
        stop=rng.choice(((), (), ("a",), ("to", "e"), _HALF_STOPS)),
        priority=rng.choice((0, 0, 1)),
        constraint=constraint,
        tenant=rng.choice(("", "one", "two")),
    )


def sent(request: Generate, rid: int, *, resume: tuple[int, ...] = (), deadline_ms: int = 0) -> Generate:
    return replace(request, rid=rid, resume=resume, deadline_ms=deadline_ms)

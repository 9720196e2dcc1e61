"""Quarantine of requests that crash workers: known by a fingerprint, refused for a while."""

import hashlib
from dataclasses import dataclass, field
from typing import Final

import msgspec

from protocol.failures import Code, Failure
from protocol.to_worker import Generate, Sampling

EXPIRY_S: Final = 900.0
SIZE_MAX: Final = 256
REFUSED: Final = Failure(
    Code.QUARANTINED, "this request was refused: the model's worker died twice while it processed this very request"
)

_encoder = msgspec.msgpack.Encoder()


def fingerprint(request: Generate) -> bytes:
    """Digest of what a request asks for: all of it but its identity, urgency, position and chance.

    The seed is chance: a client that comes again with the same prompt is given another one.
    """
    same = Generate(
        0,
        request.prompt,
        msgspec.structs.replace(request.sampling, seed=Sampling().seed),
        request.max_tokens,
        request.stop,
        request.top_logprobs,
        thinking_budget=request.thinking_budget,
        constraint=request.constraint,
        adapter=request.adapter,
        truncate=request.truncate,
        cuts_tokens=request.cuts_tokens,
        prompt_logprobs=request.prompt_logprobs,
    )
    return hashlib.blake2b(_encoder.encode(same), digest_size=16).digest()


@dataclass(slots=True)
class Quarantine:
    """Refused fingerprints, each with its expiry in monotonic seconds. Owned by one model's `ParkedSequences`."""

    _until: dict[bytes, float] = field(default_factory=dict[bytes, float])

    def add(self, of: bytes, now: float) -> None:
        self._until.pop(of, None)
        if len(self._until) >= SIZE_MAX:
            # Dicts keep their order: the first one is free soonest.
            del self._until[next(iter(self._until))]
        self._until[of] = now + EXPIRY_S

    def refusal(self, request: Generate, now: float) -> Failure | None:
        """The reason to refuse this request, if any. Costs nothing while the table is empty."""
        if not self._until:
            return None
        of = fingerprint(request)
        if of not in self._until:
            return None
        if now < self._until[of]:
            return REFUSED
        del self._until[of]
        return None

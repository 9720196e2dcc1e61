"""Quarantine of requests that crash workers. Requests with the same fingerprint are refused until the fingerprint
expires.
"""

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
    """Return a digest of the fields that decide what a worker computes. The seed is left out, because it differs in
    retries.
    """
    computed = Generate(
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
        questions=request.questions,
    )
    return hashlib.blake2b(_encoder.encode(computed), digest_size=16).digest()


@dataclass(slots=True)
class Quarantine:
    """Refused fingerprints with their expiry in monotonic seconds. One model's `ParkedSequences` owns them."""

    _expiry: dict[bytes, float] = field(default_factory=dict[bytes, float])

    def add(self, digest: bytes, now: float) -> None:
        self._expiry.pop(digest, None)
        if len(self._expiry) >= SIZE_MAX:
            # A dict keeps its order, so the first entry is the one that expires first.
            del self._expiry[next(iter(self._expiry))]
        self._expiry[digest] = now + EXPIRY_S

    def refusal(self, request: Generate, now: float) -> Failure | None:
        """Return the reason to refuse a request, or None. No fingerprint is computed while the table is empty."""
        if not self._expiry or (digest := fingerprint(request)) not in self._expiry:
            return None
        if now < self._expiry[digest]:
            return REFUSED
        del self._expiry[digest]
        return None

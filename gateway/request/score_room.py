"""Memory for the log-probabilities of a request's prompts. They may be a thousand times as large as the prompts."""

from typing import Final

from gateway.errors import BadRequest, Unavailable
from gateway.request.body_memory import RETRY_AFTER_S, BodyLease
from protocol.to_worker import Generate

# Maximum size of the log-probabilities in one answer. Repeated ones count each time.
SCORES_BYTES_MAX: Final = 256 << 20
# Approximate size of one token with its text as JSON. The objects that wait for a slow reader take twice as much.
TOKEN_JSON_BYTES: Final = 80


class ScoreRoom:
    """Memory for the prompt scores of one request until its end. It is a part of the memory for request bodies.

    Scores count twice, as objects and in the answer. All are reserved before the first is computed, so that some of
    several concurrent requests finish; if memory was reserved bit by bit, all could fail.
    """

    def __init__(self, lease: BodyLease | None, repeats: int) -> None:
        """The answer contains the `prompt_logprobs` of each prompt `repeats` times."""
        self._lease = lease
        self._repeats = repeats
        self._answer_bytes = 0
        # Sequences that have a reservation. When another worker takes over a request, it accepts the sequences again.
        self._held: set[int] = set()

    def hold(self, generate: Generate, tokens: int) -> None:
        """Reserve memory for the requested scores of a prompt of `tokens` tokens.

        Raises `BadRequest` if the limits never allow so much, and `Unavailable` if there is not enough memory now.
        """
        if generate.rid in self._held:
            return
        self._held.add(generate.rid)
        echo = scores_bytes(tokens, generate.top_logprobs if generate.echo else None)
        entries = scores_bytes(tokens, generate.prompt_logprobs)
        answer_bytes = echo + entries * self._repeats
        self._answer_bytes += answer_bytes
        more, lease = echo + entries + answer_bytes, self._lease
        if self._answer_bytes > SCORES_BYTES_MAX or (lease is not None and not lease.may_ever_hold(more)):
            param = "prompt_logprobs" if entries else "logprobs"
            raise BadRequest(
                f"The log-probabilities of the prompts take {self._answer_bytes / (1 << 20):.1f} MiB, more than there "
                f"is room for: ask for smaller '{param}', fewer choices or fewer tokens.",
                param,
            )
        if lease is not None and not lease.hold(more):
            message = "The log-probabilities of the prompts find no room in the memory set aside for requests."
            raise Unavailable(f"{message} Try again later.", RETRY_AFTER_S, "body_memory_full")


def scores_bytes(tokens: int, top: int | None) -> int:
    """Estimate the size as JSON of the log-probabilities of `tokens` tokens, each with `top` alternatives."""
    return 0 if top is None else tokens * (1 + top) * TOKEN_JSON_BYTES

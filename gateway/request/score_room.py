"""Room for the log-probabilities of a request's prompts, which may be a thousand times as large as the prompts."""

from typing import Final

from gateway.errors import BadRequest, Unavailable
from gateway.request.bodies import RETRY_AFTER_S, BodyLease
from protocol.to_worker import Generate

# Log-probabilities of all prompts in one answer, each as often as it is written there.
SCORES_BYTES_MAX: Final = 256 << 20
# About what one token takes as JSON, with its text. As objects that wait for a slow reader it takes twice as much.
TOKEN_BYTES: Final = 80


class ScoreRoom:
    """What the prompts' scores of one request take until it has ended, in the room that all requests' bodies share.

    They count twice, as they come and in the answer, and from before the first is computed: of requests that come
    together some have their answer, where room that is taken bit by bit would fail them all.
    """

    def __init__(self, lease: BodyLease | None, repeats: int) -> None:
        """`repeats`: how often `prompt_logprobs` of each prompt are in the answer."""
        self._lease = lease
        self._repeats = repeats
        self._answer_bytes = 0
        # Sequences that have their room: a worker that takes over accepts them again.
        self._held: set[int] = set()

    def hold(self, generate: Generate, tokens: int) -> None:
        """Make room for the scores that are asked for of a prompt of so many tokens.

        Raises `BadRequest` for more than an answer may have, or the caller can ever have room for, and `Unavailable`.
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
    """About what log-probabilities of so many tokens take as JSON, each with so many of the likeliest tokens."""
    return 0 if top is None else tokens * (1 + top) * TOKEN_BYTES

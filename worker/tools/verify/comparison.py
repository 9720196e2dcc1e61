"""Comparison of outputs with the outputs of the same requests run alone."""

from collections.abc import Generator, Sequence

from protocol.verify import Difference, VerifyCheck
from worker.tools.verify.engine_session import VerifiedOutput


def compare(name: str, outputs: Sequence[VerifiedOutput], expected: Sequence[VerifiedOutput]) -> VerifyCheck:
    """Compare each token of the outputs with the expected outputs."""
    return VerifyCheck(
        name,
        len(outputs),
        sum(len(output.ids) for output in outputs),
        sum(output.cached for output in outputs),
        tuple(_differences(outputs, expected)),
        drift=max(_drifts(outputs, expected), default=0.0),
    )


def _drifts(outputs: Sequence[VerifiedOutput], expected: Sequence[VerifiedOutput]) -> Generator[float]:
    """Yield the deviation of each token's log-probability from its value when run alone, for equal outputs.

    A resumed row has log-probabilities only for its new tokens, so values are compared from the end.
    """
    for output, other in zip(outputs, expected, strict=True):
        if output.ids == other.ids:
            pairs = zip(reversed(output.logprobs), reversed(other.logprobs), strict=False)
            yield from (abs(one.logprob - two.logprob) for one, two in pairs)


def _differences(outputs: Sequence[VerifiedOutput], expected: Sequence[VerifiedOutput]) -> Generator[Difference]:
    for index, (output, other) in enumerate(zip(outputs, expected, strict=True)):
        if (output.ids, output.finish) == (other.ids, other.finish):
            continue
        at = first_difference(output.ids, other.ids)
        top = other.logprobs[at].top if at < len(other.logprobs) else ()
        yield Difference(index, at, round(top[0][1] - top[1][1], 6) if len(top) > 1 else None)


def first_difference(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the index of the first different item, or the length of the shorter sequence."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def likelihoods(output: VerifiedOutput) -> list[float]:
    return [each.logprob for each in output.logprobs]

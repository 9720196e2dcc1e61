"""Engine of decisions, without a dialect: from questions to a worker's request, and from its numbers to answers.

A question is a text with its options, each under a short label. The worker asks each question alone behind the input,
and returns the log-probability of every label. An option's probability is that of its label among all labels.
"""

import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from string import ascii_uppercase
from typing import Any, Final

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.api.common import serve
from gateway.api.common.serve import Vectors, respond_vectors
from gateway.errors import Unavailable
from gateway.request.record import record_of
from gateway.services import Services
from protocol.to_worker import ChatPrompt, Generate, LabelledQuestion, Sampling

QUESTIONS_MAX: Final = 400
OPTIONS_MIN: Final = 2
OPTIONS_MAX: Final = 255
LEVELS_MIN: Final = 2
LEVELS_MAX: Final = 10


class QuestionKind(StrEnum):
    """Kind of a question. The options of a predicate are true and false, in this order; a score's are ordered."""

    PREDICATE = "predicate"
    CHOICE = "choice"
    SCORE = "score"


class Option(msgspec.Struct, frozen=True):
    """Option of a question as the model reads it."""

    name: str
    description: str = ""


class Question(msgspec.Struct, frozen=True):
    """Question about the input."""

    kind: QuestionKind
    instructions: str
    options: tuple[Option, ...]

    @property
    def order(self) -> list[int]:
        """Indices of the options in the order in which the model reads them.

        The options of a choice are sorted, so that an answer does not depend on the client's order of them.
        """
        if self.kind is not QuestionKind.CHOICE:
            return list(range(len(self.options)))
        return sorted(range(len(self.options)), key=lambda at: (self.options[at].name, self.options[at].description))

    def labelled(self) -> LabelledQuestion:
        """Return the question with a label for each option, in the order of `order`."""
        labels = labels_of(self.kind, len(self.options))
        listed = [self.options[at] for at in self.order]
        return LabelledQuestion(_TEXTS[self.kind](self.instructions, labels, listed), labels)

    def probabilities(self, logprobs: Sequence[float]) -> list[float] | None:
        """Return the probability of each option in the client's order, from the log-probabilities of the labels.

        Returns None if the model gave no finite number for the question.
        """
        best = max(logprobs)
        if not all(map(math.isfinite, logprobs)):
            return None
        weights = [math.exp(logprob - best) for logprob in logprobs]
        total = math.fsum(weights)
        shares = dict(zip(self.order, (weight / total for weight in weights), strict=True))
        return [shares[at] for at in range(len(shares))]


def labels_of(kind: QuestionKind, count: int) -> tuple[str, ...]:
    """Return the labels of `count` options: most tokenizers have a token for each. No label begins another one."""
    match kind:
        case QuestionKind.PREDICATE:
            return ("Yes", "No")
        case QuestionKind.SCORE:
            return tuple(map(str, range(count)))
        case QuestionKind.CHOICE if count <= len(ascii_uppercase):
            return tuple(ascii_uppercase[:count])
        case QuestionKind.CHOICE:
            pairs = [first + second for first in ascii_uppercase for second in ascii_uppercase]
            return tuple(pairs[:count])


def top_probability_above_chance(probabilities: Sequence[float]) -> float:
    """Return the confidence in a choice: (p − 1/n) / (1 − 1/n) for the highest p of n options.

    It is 0 if all options are equally probable, and 1 if one of them is certain.
    """
    chance = 1 / len(probabilities)
    return min(1.0, max(0.0, (max(probabilities) - chance) / (1 - chance)))


def closeness_to_mode(probabilities: Sequence[float]) -> float:
    """Return the confidence in a score: 1 − d / u, and at least 0. d is the expected distance in levels from the most
    probable level, and u is the mean distance of all levels from the middle of the scale."""
    count = len(probabilities)
    mode = max(range(count), key=lambda level: probabilities[level])
    distance = math.fsum(p * abs(level - mode) for level, p in enumerate(probabilities))
    uniform = sum(abs(level - (count - 1) / 2) for level in range(count)) / count
    return min(1.0, max(0.0, 1 - distance / uniform))


def expected_level(probabilities: Sequence[float]) -> float:
    """Return the score: the sum of each level times its probability."""
    return math.fsum(level * p for level, p in enumerate(probabilities))


async def decide(
    services: Services,
    scope: Scope,
    receive: Receive,
    send: Send,
    name: str,
    unknown: list[str],
    prompt: ChatPrompt,
    questions: Sequence[Question],
    render: Callable[[str, list[list[float] | None], Vectors], bytes],
    salt: str = "",
) -> None:
    """Ask the model `name` all questions, and answer with what `render` makes of its name, the probabilities of each
    question's options, and the usage. `salt` separates cached inputs. Raises `ApiError`."""
    record = record_of(scope)
    model = serve.begin_reading(services, record, name, unknown)

    def lower(next_rid: Callable[[], int], deadline_ms: int) -> Generate:
        return Generate(
            next_rid(),
            prompt,
            Sampling(),
            max_tokens=0,
            deadline_ms=deadline_ms,
            want_progress=True,
            cache_salt=salt,
            most_drafted=0,
            questions=tuple(question.labelled() for question in questions),
        )

    def encode(vectors: Vectors) -> bytes:
        given = vectors.numbers(0)
        if len(given) != sum(len(question.options) for question in questions):
            # A worker that outlived an upgrade does not know questions.
            raise Unavailable("The model's worker is of another version than the server: restart the model.")
        numbers = iter(given)
        found = [[next(numbers) for _ in question.options] for question in questions]
        probabilities = [question.probabilities(each) for question, each in zip(questions, found, strict=True)]
        return render(model.name, probabilities, vectors)

    job = await serve.prepare(services, record, model, lower)
    await respond_vectors(job, 1, encode, receive, send)


def as_text(value: Any) -> str:
    """Return a text as it is, and other JSON as compact text."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _predicate(instructions: str, _: Sequence[str], options: Sequence[Option]) -> str:
    asked = [f"Question or statement about the input above: {instructions}"] if instructions else []
    yes, no = options
    asked += [f"Answer {each.name} in this case: {each.description}" for each in (yes, no) if each.description]
    return "\n".join([*asked, "Answer with one word, Yes or No."])


def _choice(instructions: str, labels: Sequence[str], options: Sequence[Option]) -> str:
    asked = instructions or "Which option fits the input above best?"
    word = "letter" if len(labels) <= len(ascii_uppercase) else "code"
    return f"{asked}\n{_listed(labels, options)}\nAnswer with the {word} of the best option, and nothing else."


def _score(instructions: str, labels: Sequence[str], options: Sequence[Option]) -> str:
    asked = instructions or "Which level fits the input above best?"
    return f"{asked}\n{_listed(labels, options)}\nAnswer with the number of the level that fits best, and nothing else."


def _listed(labels: Sequence[str], options: Sequence[Option]) -> str:
    rows = zip(labels, options, strict=True)
    return "\n".join(
        f"{label}. {option.name}" + (f": {option.description}" if option.description else "") for label, option in rows
    )


_TEXTS: Final[dict[QuestionKind, Callable[[str, Sequence[str], Sequence[Option]], str]]] = {
    QuestionKind.PREDICATE: _predicate,
    QuestionKind.CHOICE: _choice,
    QuestionKind.SCORE: _score,
}

"""`POST /v1/systemone` of TypeSafe: questions by id about one state, and TypeSafe's shape of errors."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta, Struct
from starlette.types import Receive, Scope, Send

from gateway.api.common import canonical, serve
from gateway.api.common.decode import Schema
from gateway.api.common.request_fields import RefusedField, case, words
from gateway.api.common.serve import Vectors
from gateway.api.decisions.engine import (
    LEVELS_MAX,
    LEVELS_MIN,
    OPTIONS_MAX,
    OPTIONS_MIN,
    QUESTIONS_MAX,
    Option,
    Question,
    QuestionKind,
    as_text,
    closeness_to_mode,
    decide,
    expected_level,
    top_probability_above_chance,
)
from gateway.config.names import DEFAULT
from gateway.errors import ApiError, BadRequest, ModelNotFound, invalid_choice, missing_parameter
from gateway.request.record import record_of
from gateway.services import Services

# TypeSafe's models, whose names its clients send unless they are told another. They stand for the default model.
MODEL_PREFIX: Final = "jev-"
KINDS: Final = {"noul": QuestionKind.PREDICATE, "choice": QuestionKind.CHOICE, "score": QuestionKind.SCORE}
UNPROCESSABLE: Final = 422

Content = str | dict[str, Any] | list[Any]


class SystemQuestion(Struct, frozen=True):
    """Question of any type. `criteria` describe the options: `true` and `false` of a noul, the options of a choice by
    name, the levels of a score in order."""

    hint: ClassVar = {
        "anyOf": [
            case(type={"const": "noul"}, criteria={"type": ["object", "null"]}),
            case(("criteria",), type={"const": "choice"}, criteria={"type": "object", "minProperties": OPTIONS_MIN}),
            case(("criteria",), type={"const": "score"}, criteria={"type": "array", "minItems": LEVELS_MIN}),
        ]
    }

    type: Annotated[str, words(*KINDS)]
    instructions: Content | None = None
    criteria: dict[str, Any] | list[Any] | None = None


class SystemOneRequest(Struct, frozen=True, kw_only=True):
    """`POST /v1/systemone`. The questions are about `state`: a text, or JSON."""

    model: str = ""
    state: Content
    questions: Annotated[dict[str, SystemQuestion], Meta(min_length=1, max_length=QUESTIONS_MAX)]


class NoulAnswer(Struct, frozen=True, tag="noul"):
    noul: float


class OptionAnswer(Struct, frozen=True, tag="choice"):
    """Answer to a choice. `confidence` is (p − 1/n) / (1 − 1/n) for the highest p of n options."""

    choice: str
    confidence: float
    probabilities: dict[str, float]


class RatingAnswer(Struct, frozen=True, tag="score"):
    """Answer to a score. `confidence` is 1 less the expected distance from the most probable level, relative to the
    mean distance of all levels from the middle."""

    score: float
    confidence: float
    legend: dict[str, Content]
    probabilities: dict[str, float]


class SystemOneUsage(Struct, frozen=True):
    input_tokens: int
    output_tokens: int = 0


class SystemOneAnswers(Struct, frozen=True):
    """Answers by the ids of the questions."""

    model: str
    answers: dict[str, NoulAnswer | OptionAnswer | RatingAnswer]
    usage: SystemOneUsage


class Problem(Struct, frozen=True):
    """Invalid value of a request, and its place in the request."""

    loc: list[str | int]
    msg: str
    type: str


class Fault(Struct, frozen=True):
    error_type: str
    message: str


class TypeSafeErrorBody(Struct, frozen=True):
    """Error: a list of problems with status 422, and one object with any other status."""

    detail: list[Problem] | Fault


_REFUSED: Final = {"assets": RefusedField("send images to /v1/decisions")}
_schema = Schema(SystemOneRequest, refused=_REFUSED)


async def system_one(services: Services, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `POST /v1/systemone`."""
    record = record_of(scope)
    request, unknown = await serve.read(services, record, scope, receive, _schema.decode)
    state = as_text(canonical.sendable(request.state, "state"))
    if not state:
        raise BadRequest("'state' is empty.", "state", "invalid_value")
    questions = [lower_question(each, f"questions.{name}") for name, each in request.questions.items()]
    prompt = canonical.chat_prompt(
        [canonical.user(state)], canonical.ToolPolicy(), canonical.ThinkingBudget(is_enabled=False), {}
    )

    def render(model: str, probabilities: list[list[float] | None], vectors: Vectors) -> bytes:
        pairs = zip(request.questions.items(), probabilities, strict=True)
        answers = {name: answer(name, question, found) for (name, question), found in pairs}
        return msgspec.json.encode(SystemOneAnswers(model, answers, SystemOneUsage(vectors.prompt_tokens)))

    name = _model(services, request.model, scope)
    await decide(services, scope, receive, send, name, unknown, prompt, questions, render)


def answer(
    name: str, question: SystemQuestion, probabilities: list[float] | None
) -> NoulAnswer | OptionAnswer | RatingAnswer:
    """Return the answer to a question from the probabilities of its options. Raises `BadRequest` if there are none."""
    if probabilities is None:
        param = f"questions.{name}"
        raise BadRequest("The question does not fit the model's context, or has no finite answer.", param)
    match question.criteria:
        case dict() if question.type == "choice":
            named = dict(zip(question.criteria, probabilities, strict=True))
            best = max(named, key=lambda option: named[option])
            return OptionAnswer(best, top_probability_above_chance(probabilities), named)
        case list():
            keyed = {str(level): p for level, p in enumerate(probabilities)}
            legend = {str(level): given for level, given in enumerate(question.criteria)}
            return RatingAnswer(expected_level(probabilities), closeness_to_mode(probabilities), legend, keyed)
        case _:
            return NoulAnswer(probabilities[0])


def lower_question(question: SystemQuestion, where: str) -> Question:
    """Lower a question. Raises `BadRequest`."""
    if question.type not in KINDS:
        raise invalid_choice(question.type, KINDS, f"{where}.type")
    kind, criteria, place = KINDS[question.type], question.criteria, f"{where}.criteria"
    instructions = "" if question.instructions is None else as_text(question.instructions)
    if kind is QuestionKind.SCORE:
        if not isinstance(criteria, list):
            raise BadRequest(f"'{place}' is a list of the levels of a score.", place, "invalid_value")
        _check_count(len(criteria), LEVELS_MIN, LEVELS_MAX, place)
        options = [Option(_described(level, f"{place}[{at}]")) for at, level in enumerate(criteria)]
        if not all(option.name for option in options):
            raise BadRequest(f"'{place}' has a level without a description.", place, "invalid_value")
        return Question(kind, instructions, tuple(options))
    if isinstance(criteria, list):
        raise BadRequest(f"'{place}' is an object.", place, "invalid_value")
    if kind is QuestionKind.CHOICE:
        if criteria is None:
            raise missing_parameter(place)
        _check_count(len(criteria), OPTIONS_MIN, OPTIONS_MAX, place)
        options = [Option(name, _described(value, f"{place}.{name}")) for name, value in criteria.items()]
        return Question(kind, instructions, tuple(options))
    return Question(kind, instructions, _noul_options(criteria or {}, bool(instructions), place))


def _noul_options(criteria: Mapping[str, Any], is_instructed: bool, place: str) -> tuple[Option, Option]:
    if unknown := sorted(criteria.keys() - {"true", "false"}):
        raise invalid_choice(unknown[0], ("true", "false"), place)
    yes, no = (_described(criteria.get(key), f"{place}.{key}") for key in ("true", "false"))
    if not (is_instructed or yes or no):
        raise BadRequest("A noul needs instructions or criteria.", place, "invalid_value")
    return Option("Yes", yes), Option("No", no)


def _described(value: Any, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str | dict | list):
        raise BadRequest(f"'{where}' is a text, an object or a list.", where, "invalid_value")
    return as_text(canonical.sendable(value, where))


def _check_count(count: int, least: int, most: int, where: str) -> None:
    if not least <= count <= most:
        raise BadRequest(f"'{where}' has {count} entries; {least} to {most} are taken.", where, "invalid_value")


def _model(services: Services, name: str, scope: Scope) -> str:
    """Return the name, or the default model for a name of TypeSafe's own models that no model here has."""
    if not name.startswith(MODEL_PREFIX):
        return name
    try:
        services.live.router.locate(name, record_of(scope).caller)
    except ModelNotFound:
        return DEFAULT
    return name


# -- errors ----------------------------------------------------------------------------------------------------------

_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_STEP: Final = re.compile(r"\[(\d+)\]|\[\.\.\.\]|\.?([^.\[]+)")


def typesafe_status(error: ApiError) -> int:
    """Return the status of an error in TypeSafe's API, which has 422 for invalid requests."""
    return UNPROCESSABLE if error.status == 400 else error.status


def typesafe_body(error: ApiError) -> bytes:
    """Encode an error as TypeSafe's JSON body."""
    if error.status != 400:
        kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        return msgspec.json.encode(TypeSafeErrorBody(Fault(kind, error.message)))
    steps = _STEP.findall(error.param or "")
    loc: list[str | int] = ["body", *(int(index) if index else name for index, name in steps if index or name)]
    return msgspec.json.encode(TypeSafeErrorBody([Problem(loc, error.message, error.code or "value_error")]))

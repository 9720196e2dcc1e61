"""`mlxctl decide`: one question about a text, answered with probabilities."""

import sys
from typing import Annotated, Any

import typer
from msgspec import Struct

from gateway.ctl import client
from gateway.ctl.printing import Json, harmless, print_result
from gateway.failed import CommandFailed


class CliDecision(Struct, frozen=True):
    """Answer to one question; the fields of other types of answers are empty."""

    type: str
    probability: float | None = None
    choice: str | None = None
    score: float | None = None
    confidence: float | None = None
    probabilities: list[dict[str, Any]] = []


class CliDecisions(Struct, frozen=True):
    """Answer of `POST /v1/decisions`."""

    answers: list[CliDecision]


def decide(
    model: Annotated[str, typer.Argument(help="Name or alias of a model.")],
    question: Annotated[str, typer.Argument(help="Question, or statement that is true or false.")],
    text: Annotated[
        str | None, typer.Option("--input", help="Text to decide about; without it, piped input.", show_default=False)
    ] = None,
    option: Annotated[list[str] | None, typer.Option(help="Option to choose from; repeat it.")] = None,
    level: Annotated[list[str] | None, typer.Option(help="Level of a score, the lowest first; repeat it.")] = None,
    json: Json = False,
) -> None:
    """Decide about a text: yes or no, one of the options, or a level.

    Example: mlxctl decide demo "Does the customer want money back?" --input "I was charged twice."
    """
    if option and level:
        raise CommandFailed("--option and --level exclude each other")
    if text is None and sys.stdin.isatty():
        raise CommandFailed("there is nothing to decide about: set --input, or pipe a text")
    asked: dict[str, Any] = {"type": "predicate", "instructions": question}
    if option:
        asked |= {"type": "choice", "choices": [{"value": each} for each in option]}
    if level:
        asked |= {"type": "score", "levels": [{"label": each} for each in level]}
    body = {"model": model, "input": sys.stdin.read() if text is None else text, "questions": [asked]}
    (answer,) = client.post("/v1/decisions", body, CliDecisions).answers
    print_result(answer, _shown(answer), json)


def _shown(answer: CliDecision) -> str:
    rows = [(harmless(str(each.get("value"))), each["probability"]) for each in answer.probabilities]
    match answer.type:
        case "predicate":
            return f"yes {answer.probability:.3f}"
        case "choice":
            head = f"{harmless(answer.choice or '')} (confidence {answer.confidence:.3f})"
        case "score":
            head = f"{answer.score:.2f} (confidence {answer.confidence:.3f})"
            rows = [
                (f"{each['value']} {harmless(each['label'])}", each["probability"]) for each in answer.probabilities
            ]
        case _:
            return "refused: the question does not fit the model's context"
    return "\n".join([head, *(f"  {share:.3f}  {name}" for name, share in rows)])

"""The OpenAPI document as a judge of answers."""

import json
from functools import cache
from typing import Any

import jsonschema

import protocol
from gateway.api.routes import DESCRIPTION, OPERATIONS
from gateway.api.system import openapi


@cache
def document() -> dict[str, Any]:
    return openapi.document(OPERATIONS, version=protocol.__version__, description=DESCRIPTION)


def check_answer(method: str, path: str, status: int, body: Any) -> None:
    """Fails unless the body has the shape that is published for this path (with its parameters' names) and status."""
    _check(_content(method, path, status)["application/json"]["schema"], body)


def check_events(path: str, data: str) -> list[Any]:
    """The events of a stream, comments and the end mark left out. Fails unless each has the published shape."""
    item = _content("POST", path, 200)["text/event-stream"]["x-itemSchema"]["properties"]["data"]["contentSchema"]
    lines = [line[6:] for line in data.split("\n") if line.startswith("data: ") and line != "data: [DONE]"]
    events = [json.loads(line) for line in lines]
    for event in events:
        _check(item, event)
    return events


def _content(method: str, path: str, status: int) -> dict[str, Any]:
    responses = document()["paths"][path][method.lower()]["responses"]
    assert str(status) in responses, f"{method} {path}: {status} is not published"
    return responses[str(status)]["content"]


def _check(schema: dict[str, Any], value: Any) -> None:
    # References lead to the components of the document.
    jsonschema.Draft202012Validator(schema | {"components": document()["components"]}).validate(value)

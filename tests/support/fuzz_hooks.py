"""Hooks of schemathesis for rules of this API that its document cannot express."""

import os
from typing import Any

import schemathesis

from tests.support.published import check_events

# A response that is kept, so that conversations go on.
KEPT = os.environ["MLXD_FUZZ_RESPONSE"]


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """With whole numbers written as such, which JSON Schema does not ask for, and with a conversation that there is."""
    if isinstance(body, dict) and isinstance(body.get("previous_response_id"), str):
        body["previous_response_id"] = KEPT
    return _whole(body)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        return int(value)
    if isinstance(value, list):
        return [_whole(one) for one in value]
    if isinstance(value, dict):
        return {key: _whole(one) for key, one in value.items()}
    return value


@schemathesis.check
def events_have_the_published_shape(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: "schemathesis.Case[Any]"
) -> None:
    """Fails when an event is not as `x-itemSchema` says."""
    if response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        check_events(case.operation.path, response.content.decode())

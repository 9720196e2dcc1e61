"""What schemathesis does not know of OpenAPI 3.1: the events of a stream."""

from typing import Any

import schemathesis

from tests.support.published import check_events


@schemathesis.check
def events_have_the_published_shape(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: "schemathesis.Case[Any]"
) -> None:
    """Fails when an event is not as `x-itemSchema` says."""
    if response.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        check_events(case.operation.path, response.content.decode())

"""What of a body another server is sent."""

import json

from gateway.remote.upstreams.upstream_body import bounded_body


def test_the_field_for_extras_is_not_sent_on() -> None:
    body = b'{"model": "a", "x_mlxd": {"timing": true}, "max_tokens": 3, "user": "u"}'
    assert json.loads(bounded_body(body, 0).with_model("b")) == {"model": "b", "max_tokens": 3, "user": "u"}

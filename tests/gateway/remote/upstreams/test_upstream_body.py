"""Bodies for upstreams: the fields that are sent, and those that are refused."""

import json
from typing import Any

import pytest

from gateway.errors import Unsupported
from gateway.remote.upstreams.upstream import bounded_body


def sent(**fields: Any) -> dict[str, Any]:
    return json.loads(bounded_body(json.dumps({"model": "a", **fields}).encode(), 0).with_model("b"))


def test_the_field_for_extras_is_not_sent_on() -> None:
    assert sent(x_mlxd={"timing": True}, max_tokens=3, user="u") == {"model": "b", "max_tokens": 3, "user": "u"}


@pytest.mark.parametrize(
    "fields",
    [
        {"models": ["dear/model"]},
        {"route": "fallback"},
        {"provider": {"order": ["other"]}},
        {"preset": "@preset/mine"},
        {"plugins": [{"id": "web"}]},
        {"fallbacks": ["dear/model"]},
        {"api_base": "http://127.0.0.1:1"},
        {"web_search_options": {"search_context_size": "high"}},
        {"mcp_servers": [{"type": "url", "url": "http://127.0.0.1:1", "name": "n"}]},
        {"container": "c"},
        {"service_tier": "priority"},
        {"speed": "fast"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_that_choose_another_model_or_price_or_reach_other_hosts_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as refused:
        sent(**fields)
    assert refused.value.param == next(iter(fields))


@pytest.mark.parametrize("kind", ["web_search_20250305", "openrouter:web_search", "mcp", "code_execution_20250825", 1])
def test_tools_that_the_upstream_would_run_are_refused(kind: object) -> None:
    with pytest.raises(Unsupported) as refused:
        sent(tools=[{"type": "function", "function": {"name": "f"}}, {"type": kind, "name": "t"}])
    assert refused.value.param == "tools[1].type"


def test_other_fields_and_tools_of_the_client_are_sent_on_unchanged() -> None:
    fields: dict[str, Any] = {
        "top_a": 0.1,
        "reasoning": {"effort": "high"},
        "transforms": ["middle-out"],
        "service_tier": "auto",
        "models": None,
        "plugins": [],
        "tools": [{"name": "f", "input_schema": {}}, {"type": "custom", "name": "c"}, {"type": "bash_20250124"}],
    }
    assert sent(**fields) == {"model": "b"} | fields

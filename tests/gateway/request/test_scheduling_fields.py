"""`priority`, `timeout` and `cache_salt` of a request, and what a key makes of them."""

from itertools import count

import msgspec
import pytest

from gateway.access.caller import OWNER, Caller, tenant_of
from gateway.api.openai.lowering import lower_chat
from gateway.api.openai.request import decode_chat
from gateway.config.settings import ModelConfig
from gateway.errors import BadRequest
from protocol.to_worker import Generate


def lowered(deadline_ms: int = 0, **fields: object) -> Generate:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    request, unknown = decode_chat(msgspec.json.encode(body))
    assert unknown == []
    return lower_chat(request, ModelConfig(name="m", path="m"), count(1).__next__, 7, deadline_ms)[0]


def test_a_request_says_how_urgent_it_is_and_how_long_it_may_take() -> None:
    generate = lowered(priority=5, timeout=2.5, cache_salt="tenant")
    assert (generate.priority, generate.deadline_ms, generate.cache_salt) == (5, 2500, "tenant")


def test_without_them_the_server_decides() -> None:
    generate = lowered(deadline_ms=9000)
    assert (generate.priority, generate.deadline_ms, generate.cache_salt) == (0, 9000, "")


@pytest.mark.parametrize(("server_ms", "timeout", "expected"), [(1000, 5, 1000), (5000, 1, 1000), (0, 1, 1000)])
def test_the_earlier_deadline_holds(server_ms: int, timeout: float, expected: int) -> None:
    assert lowered(server_ms, timeout=timeout).deadline_ms == expected


@pytest.mark.parametrize("fields", [{"timeout": 0}, {"timeout": -1}, {"priority": 5000}, {"priority": "high"}])
def test_senseless_values_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        lowered(**fields)


def test_a_key_may_ask_to_run_later_but_not_sooner() -> None:
    key = Caller(key="team", priority=3, cache_salt="salt")
    assert key.bind(lowered(priority=-10)).priority == 3
    assert key.bind(lowered(priority=10)).priority == 13
    assert OWNER.bind(lowered(priority=-10)).priority == -10


def test_a_salt_of_a_request_stays_within_its_key() -> None:
    one, other = Caller(key="a", cache_salt="s1"), Caller(key="b", cache_salt="s2")
    assert one.bind(lowered()).cache_salt == "s1"
    assert one.bind(lowered(cache_salt="x")).cache_salt != other.bind(lowered(cache_salt="x")).cache_salt
    assert one.bind(lowered(cache_salt="x")).cache_salt != one.bind(lowered()).cache_salt


def test_a_worker_knows_the_tenant_of_a_request_and_not_its_name() -> None:
    one, other = (Caller(key=name, tenant=tenant_of(name)) for name in ("alice", "bob"))
    assert one.bind(lowered()).tenant == tenant_of("alice") != other.bind(lowered()).tenant
    assert "alice" not in tenant_of("alice")
    assert OWNER.bind(lowered()).tenant == ""


def test_an_answer_is_no_longer_than_its_key_allows() -> None:
    key = Caller(key="team", max_tokens=100)
    assert key.bind(lowered()).max_tokens == 100
    assert key.bind(lowered(max_tokens=7)).max_tokens == 7
    assert key.bind(lowered(max_tokens=700)).max_tokens == 100
    assert OWNER.bind(lowered(max_tokens=700)).max_tokens == 700

"""The gateway's list of the worker's parsers, which it does not import."""

import pytest

from gateway.config.load import PARSERS, unknown_parser_reason
from worker.output.parsers.families import ALIASES, FAMILIES, resolve


def test_the_gateway_knows_the_worker_s_names_and_no_others() -> None:
    assert frozenset({*FAMILIES, *ALIASES}) == PARSERS


@pytest.mark.parametrize("name", ["", "hermes", "Qwen3-Coder", "deepseek-v3.1", "qwen2.5", "gpt-oss"])
def test_a_name_that_a_worker_takes_is_good(name: str) -> None:
    assert unknown_parser_reason(name) is None
    assert not name or resolve(name) in FAMILIES


def test_a_name_that_nobody_knows_is_not() -> None:
    assert unknown_parser_reason("hermse") == "unknown parser 'hermse'; did you mean 'hermes'?"
    assert "known are" in (unknown_parser_reason("zzzzz") or "")

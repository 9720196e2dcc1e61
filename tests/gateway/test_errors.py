import json

import pytest

from gateway.errors import TABLE, BodyTooLarge, error_headers, from_failure, openai_body
from protocol.failures import RETRYABLE, Code, Failure


@pytest.mark.parametrize("code", Code)
def test_every_failure_code_has_an_answer(code: Code) -> None:
    error = from_failure(Failure(code, "what happened", "secret detail", "param"))

    assert 400 <= error.status <= 599
    body = json.loads(openai_body(error))
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] == "what happened"
    assert body["error"]["param"] == "param"
    assert "secret" not in openai_body(error).decode()


def test_failures_of_the_server_name_no_path_to_clients() -> None:
    for code in (
        Code.INTERNAL, Code.MODEL_MISSING, Code.MODEL_CORRUPT, Code.MODEL_UNSUPPORTED, Code.BAD_CONFIG,
        Code.OUT_OF_MEMORY, Code.INCOMPATIBLE,
    ):  # fmt: skip
        failure = Failure(code, "/srv/models/m holds no config.json")
        assert "/srv" not in from_failure(failure).message
        assert from_failure(failure, is_operator=True).message == failure.message


@pytest.mark.parametrize("code", sorted(RETRYABLE))
def test_what_may_succeed_later_says_when_to_come_again(code: Code) -> None:
    error = from_failure(Failure(code, "x"))

    assert error.status in (429, 503)
    assert dict(error_headers(error))[b"retry-after"].isdigit()


def test_a_clients_mistake_is_a_400_without_retry_after() -> None:
    for code in (Code.INVALID_REQUEST, Code.CONTEXT_LENGTH_EXCEEDED, Code.TEMPLATE_ERROR, Code.UNSUPPORTED):
        error = from_failure(Failure(code, "x"))
        assert error.status == 400
        assert error_headers(error) == []


def test_the_context_error_has_the_code_that_clients_look_for() -> None:
    assert TABLE[Code.CONTEXT_LENGTH_EXCEEDED].code == "context_length_exceeded"


def test_retry_after_is_whole_seconds_rounded_up() -> None:
    assert error_headers(from_failure(Failure(Code.WORKER_DIED, "x"), 2.1)) == [(b"retry-after", b"3")]
    assert error_headers(BodyTooLarge(1)) == []

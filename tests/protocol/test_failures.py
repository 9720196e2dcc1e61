"""Failure codes and exit statuses are wire values."""

from protocol.failures import EXIT_MEANING, FINAL_EXITS, RETRYABLE, Code, ExitStatus, Failure


def test_every_code_keeps_its_number() -> None:
    assert {code.name: int(code) for code in Code} == {
        "INTERNAL": 0, "INVALID_REQUEST": 1, "UNSUPPORTED": 2, "CONTEXT_LENGTH_EXCEEDED": 3, "TEMPLATE_ERROR": 4,
        "BUSY": 5, "DEADLINE_EXCEEDED": 6, "ABORTED": 7, "DRAINING": 8, "WORKER_DIED": 9, "QUARANTINED": 10,
        "ROW_FAILED": 11, "UNSUPPORTED_MODALITY": 12, "INVALID_IMAGE": 13, "IMAGE_TOO_LARGE": 14, "INVALID_VIDEO": 15,
        "INVALID_AUDIO": 16, "TOO_MANY_MEDIA": 17,
        "MODEL_MISSING": 20, "MODEL_CORRUPT": 21, "MODEL_UNSUPPORTED": 22, "OUT_OF_MEMORY": 23,
        "LOAD_TIMEOUT": 24, "BAD_CONFIG": 25, "INCOMPATIBLE": 26, "DOES_NOT_FIT": 27,
    }  # fmt: skip


def test_every_exit_status_has_a_meaning_for_the_operator() -> None:
    assert set(ExitStatus) <= set(EXIT_MEANING)
    assert ExitStatus.OK not in FINAL_EXITS
    assert ExitStatus.INTERNAL not in FINAL_EXITS


def test_what_the_client_did_wrong_is_not_worth_another_attempt() -> None:
    wrong = {Code.INVALID_REQUEST, Code.UNSUPPORTED, Code.CONTEXT_LENGTH_EXCEEDED, Code.TEMPLATE_ERROR}
    assert not wrong & RETRYABLE
    assert Failure(Code.BUSY, "later").is_retryable
    assert not Failure(Code.INVALID_REQUEST, "no").is_retryable

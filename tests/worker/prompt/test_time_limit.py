"""A chat template that does not end: its request is refused, and its thread goes on with the next one."""

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.failures import Code
from protocol.from_worker import Tokenized
from protocol.to_worker import ChatPrompt, Generate, Sampling, Tokenize
from tests.support.engine import spec
from tests.support.models import TEMPLATE
from tests.support.scale import patient
from worker.errors import RequestInvalid
from worker.model.loader import load
from worker.prompt import templates
from worker.prompt.chat_template import TimeLimit
from worker.prompt.intake import Intake

# More than the probes of a template have.
MANY = 14
LOOPS = {
    "nested": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "filters": "{% for i in range(90000) %}{% set x = range(90000) | map('string') | join %}{% endfor %}",
}


def chat(count: int) -> ChatPrompt:
    return ChatPrompt([{"role": "user", "content": "x"}] * count)


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_template_that_loops_refuses_its_request_and_goes_on_with_the_next(
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    loop: str,
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(model_folder("qwen3"), folder)
    (folder / "chat_template.jinja").write_text(f"{{% if messages | length == {MANY} %}}{loop}{{% endif %}}{TEMPLATE}")
    intake = Intake(load(spec(folder), lambda *_: None))
    limit_s = patient(0.2)
    monkeypatch.setattr(templates, "RENDERING", TimeLimit(limit_s))

    with pytest.raises(RequestInvalid) as caught:
        intake.row(Generate(1, chat(MANY), Sampling()), time.monotonic())
    assert (caught.value.failure.code, caught.value.failure.param) == (Code.TEMPLATE_ERROR, "messages")
    assert f"more than {limit_s:g} seconds" in caught.value.failure.message
    assert "their request is refused" in caplog.text
    with pytest.raises(RequestInvalid, match="seconds"):
        intake.tokenize(Tokenize(2, chat(MANY)), lambda: True)

    assert intake.row(Generate(3, chat(MANY - 1), Sampling()), time.monotonic()).prompt
    assert isinstance(intake.tokenize(Tokenize(4, chat(MANY + 1)), lambda: True), Tokenized)


def test_a_limit_that_is_reached_at_the_end_raises_nothing_later() -> None:
    limit, draw = TimeLimit(0.005), random.Random(0)
    outcomes = {True: 0, False: 0}

    def work(seconds: float) -> bool:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass
        return True

    for seconds in (0.0, 3600.0, *(draw.uniform(0.0, 0.015) for _ in range(100))):
        try:
            is_done = limit.run(lambda seconds=seconds: work(seconds))
        except RequestInvalid:
            is_done = False
        outcomes[is_done] += 1
        # Code behind it, in which an exception that came late would be raised.
        assert work(0.001)

    assert min(outcomes.values()) > 0

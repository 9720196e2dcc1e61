"""Which tokens of a request's sequences are counted."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.access.caller import NOBODY
from gateway.access.ledger import Ledger
from gateway.access.rate_limit import UsageCharge
from gateway.config.settings import ModelConfig
from gateway.link.collector import Collector
from gateway.request.generation import TokenAccounting
from gateway.request.record import RequestRecord
from gateway.telemetry.metrics import Metrics
from protocol.from_worker import Delta, Finish, Usage
from protocol.to_worker import Generate, Sampling, TextPrompt

pytestmark = pytest.mark.anyio


async def test_tokens_that_come_together_with_another_choices_end_are_charged(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    runtime = cast(Any, SimpleNamespace(ledger=ledger, metrics=Metrics()))
    generates = [Generate(rid, TextPrompt("hi"), Sampling(), max_tokens=9) for rid in (1, 2)]
    record = RequestRecord("r", "POST", "/v1/completions", caller=NOBODY)
    accounting = TokenAccounting(runtime, ModelConfig(name="m", path="m"), generates, record)
    end = Delta(1, text="a", token_ids=(5,), finish=Finish.STOP, usage=Usage(3, 0, 1))
    assert accounting.record([end, Delta(2, text="b c", token_ids=(6, 7))])
    # The client leaves before the second choice has ended.
    charge = UsageCharge(0.0, 2)
    accounting.charge(Collector([1, 2]), charge)
    assert charge.completion == 3
    assert ledger.day("").tokens == 3 + 3
    assert accounting.tokens == 3

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import httpx2
import openai
import pytest

from gateway.access.key import KeyLimits
from gateway.access.ledger import Ledger, LedgerLine
from gateway.access.rate_limit import Meter
from gateway.access.usage import UsageFile
from gateway.errors import BudgetSpent
from gateway.telemetry.metrics import KeyMetrics, Metrics
from tests.gateway.harness import Gateway, chat, running, until
from tests.gateway.middleware.test_auth import bearer, make

BERLIN = ZoneInfo("Europe/Berlin")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@dataclass(slots=True)
class Clock:
    now: float

    def __call__(self) -> float:
        return self.now

    def at(self, *moment: int) -> None:
        self.now = datetime(*moment, tzinfo=BERLIN).timestamp()  # pyright: ignore[reportArgumentType]


@pytest.fixture
def clock() -> Clock:
    made = Clock(0)
    made.at(2026, 3, 28, 22)
    return made


@pytest.fixture
def open_ledger(tmp_path: Path, clock: Clock) -> Callable[[], Ledger]:
    return lambda: Ledger(tmp_path / "usage", lambda: BERLIN, 3, clock)


# -- usage -----------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_use_is_kept_by_day_key_and_model_over_restarts_and_months(
    open_ledger: Callable[[], Ledger], clock: Clock
) -> None:
    first = open_ledger()
    first.record("alice", "m", 1, 100, 40, 7)
    first.record("alice", "m", 2, 10, 0, 3)
    first.record("bob", "n", 1, 5, 0, 5)
    clock.at(2026, 4, 1, 0, 0, 1)
    first.record("alice", "n", 1, 1, 0, 1)
    first.close()

    again = open_ledger()
    again.record("alice", "n", 1, 1, 0, 1)
    march, april = date(2026, 3, 1), date(2026, 4, 30)
    assert await again.lines(march, april, ["day", "key", "model"]) == [
        LedgerLine("2026-03-28", "alice", "m", 3, 110, 40, 10),
        LedgerLine("2026-03-28", "bob", "n", 1, 5, 0, 5),
        LedgerLine("2026-04-01", "alice", "n", 2, 2, 0, 2),
    ]
    assert await again.lines(march, april, ["key"]) == [
        LedgerLine("", "alice", "", 5, 112, 40, 12),
        LedgerLine("", "bob", "", 1, 5, 0, 5),
    ]
    assert await again.lines(march, date(2026, 3, 27), ["key"]) == []
    assert (again.day("alice").tokens, again.month("alice").tokens) == (4, 4)


def test_days_and_months_begin_in_the_zone_also_when_its_clocks_change(
    open_ledger: Callable[[], Ledger], clock: Clock
) -> None:
    ledger = open_ledger()
    assert ledger.left_s("day") == 2 * 3600
    clock.at(2026, 3, 29)
    assert ledger.left_s("day") == 23 * 3600
    ledger.record("k", "m", 1, 10, 0, 0)
    clock.at(2026, 3, 29, 23, 59, 59)
    assert ledger.day("k").tokens == 10
    clock.at(2026, 3, 30)
    assert (ledger.day("k").tokens, ledger.month("k").tokens) == (0, 10)
    assert ledger.left_s("month") == 2 * 86400
    clock.at(2026, 12, 31, 23)
    assert ledger.left_s("month") == 3600


def test_a_clock_that_was_wrong_for_a_moment_loses_no_month(open_ledger: Callable[[], Ledger], clock: Clock) -> None:
    ledger = open_ledger()
    ledger.record("k", "m", 1, 10, 0, 0)
    clock.at(2031, 1, 1)
    ledger.record("k", "m", 1, 1, 0, 0)
    clock.at(2026, 3, 28, 23)
    assert ledger.day("k").tokens == 10
    ledger.record("k", "m", 1, 1, 0, 0)
    ledger.close()
    assert open_ledger().month("k").tokens == 11


def test_the_newest_months_are_kept(open_ledger: Callable[[], Ledger], clock: Clock, tmp_path: Path) -> None:
    for month in (1, 2, 3, 4, 5):
        clock.at(2026, month, 1)
        ledger = open_ledger()
        ledger.record("k", "m", 1, 1, 0, 0)
        ledger.close()
    ledger._forget()  # pyright: ignore[reportPrivateUsage]
    assert sorted(path.name for path in (tmp_path / "usage").iterdir()) == [
        "2026-03.json", "2026-04.json", "2026-05.json",
    ]  # fmt: skip


def test_a_damaged_month_is_set_aside_and_said_so(
    open_ledger: Callable[[], Ledger], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "usage").mkdir()
    (tmp_path / "usage" / "2026-03.json").write_text("[[")
    ledger = open_ledger()
    ledger.record("k", "m", 1, 1, 0, 0)
    ledger.close()

    assert "not counted" in caplog.text
    assert (tmp_path / "usage" / "2026-03.damaged").read_text() == "[["
    assert open_ledger().month("k").tokens == 1


@pytest.mark.anyio
async def test_a_file_that_can_be_neither_removed_nor_renamed_stops_no_counting(
    open_ledger: Callable[[], Ledger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.access.ledger.PERIOD_S", 0.001)
    # No file, and in the place of one.
    (tmp_path / "usage" / "2020-01.json").mkdir(parents=True)
    for month in ("2026-03.json", "2026-03.damaged/x"):
        (tmp_path / "usage" / month).mkdir(parents=True)
    for month in ("2026-01", "2026-02"):
        (tmp_path / "usage" / f"{month}.json").write_text("[]")

    ledger = open_ledger()
    writing = asyncio.create_task(ledger.run())
    await until(lambda: "2020-01.json cannot be removed" in caplog.text)
    ledger.record("ana", "demo", 1, 2, 0, 3)
    await until(lambda: "usage is not kept" in caplog.text)

    assert "2026-03.json cannot be set aside" in caplog.text
    assert caplog.text.count("cannot be removed") == 1
    assert ledger.day("ana").tokens == 5
    assert not writing.done()
    writing.cancel()


# -- budgets ---------------------------------------------------------------------------------------------------------


def use(meter: Meter, ledger: Ledger, tokens: int, requests: int = 1) -> None:
    """As a generation does it."""
    with meter.hold(0, requests) as charge:
        ledger.record("k", "m", requests, tokens, 0, 0)
        charge.prompt = tokens


def test_a_budget_ends_with_its_use_and_begins_with_its_period(open_ledger: Callable[[], Ledger], clock: Clock) -> None:
    ledger, numbers = open_ledger(), KeyMetrics()
    meter = Meter("k", KeyLimits(tokens_per_day=100, requests_per_month=5), numbers, ledger=ledger)
    use(meter, ledger, 60)
    use(meter, ledger, 60)
    with pytest.raises(BudgetSpent, match="100 tokens of this day") as caught:
        use(meter, ledger, 1)
    assert caught.value.retry_after_s == 2 * 3600
    assert (caught.value.status, caught.value.code) == (429, "insufficient_quota")
    assert numbers.rejections == {"budget": 1}
    assert numbers.budget() == [("day", "tokens", 1.2), ("month", "requests", 0.4)]

    # A restart, and another limit, forget nothing.
    ledger.close()
    ledger = open_ledger()
    meter = Meter("k", KeyLimits(tokens_per_day=110), numbers, ledger=ledger)
    with pytest.raises(BudgetSpent):
        use(meter, ledger, 1)
    meter.limit(KeyLimits(tokens_per_day=110, requests_per_month=5))
    clock.at(2026, 3, 29, 1)
    use(meter, ledger, 1, 3)
    with pytest.raises(BudgetSpent, match="5 requests of this month"):
        use(meter, ledger, 1)


@pytest.mark.parametrize("limits", [KeyLimits(tokens_per_day=100), KeyLimits(requests_per_month=1)])
def test_a_tokenize_call_costs_no_budget_and_is_refused_once_one_is_spent(
    open_ledger: Callable[[], Ledger], limits: KeyLimits
) -> None:
    ledger, numbers = open_ledger(), KeyMetrics()
    meter = Meter("k", limits, numbers, ledger=ledger)
    with meter.hold(100), meter.tokenize_call(1000), meter.tokenize_call(1000):
        pass
    use(meter, ledger, 100)
    with pytest.raises(BudgetSpent), meter.tokenize_call(1):
        pass
    assert numbers.rejections == {"budget": 1}


def test_what_runs_counts_against_a_budget_before_it_has_ended(open_ledger: Callable[[], Ledger]) -> None:
    ledger = open_ledger()
    meter = Meter("k", KeyLimits(tokens_per_day=100, requests_per_day=10), KeyMetrics(), ledger=ledger)
    with meter.hold(100), pytest.raises(BudgetSpent, match="tokens"), meter.hold(1):
        pass
    with meter.hold(1, 8), pytest.raises(BudgetSpent, match="10 requests"), meter.hold(1, 3):
        pass
    with meter.hold(1, 10):
        pass


def test_a_budget_is_told_of_once_in_a_period_when_it_is_nearly_used_and_when_it_is_spent(
    open_ledger: Callable[[], Ledger], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = open_ledger()
    meter = Meter("k", KeyLimits(tokens_per_day=100, alert_at=50), KeyMetrics(), ledger=ledger)
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            use(meter, ledger, 18)
        clock.at(2026, 3, 29, 1)
        use(meter, ledger, 70)
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition("(")[2] for text in told] == ["54 %)", "108 %)", "70 %)"]
    assert told[0] == "key k has used 54 of its 100 tokens of this day (54 %)"


def test_what_was_used_of_a_minute_is_not_forgotten_by_a_restart(tmp_path: Path, clock: Clock) -> None:
    def start(ago_s: float) -> tuple[Meter, UsageFile]:
        clock.now += ago_s
        metrics, mono = Metrics(), Clock(500.0)
        meter = Meter("k", KeyLimits(rpm=60, tpm=600), metrics.key("k"), mono)
        return meter, UsageFile(tmp_path / "usage.json", metrics, clock, {"k": meter})

    meter, usage = start(0)
    for _ in range(40):
        meter.request()
    with meter.hold(10) as charge:
        charge.prompt = 1200
    usage.close()
    meter, usage = start(10)
    assert meter.missing() == {"requests": 30, "tokens": 1100}
    usage.close()
    assert start(300)[0].missing() == {}


# -- over HTTP -------------------------------------------------------------------------------------------------------


def admin_of(gateway: Gateway) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(gateway.admin)  # pyright: ignore[reportArgumentType]
    return httpx2.AsyncClient(transport=transport, base_url="http://admin")


async def lines(gateway: Gateway, by: str) -> list[dict[str, object]]:
    async with admin_of(gateway) as admin:
        return (await admin.get(f"/v1/usage?by={by}")).json()["lines"]


@pytest.mark.anyio
@pytest.mark.parametrize(("days", "word"), [("to=0001-01-05", "from"), ("from=2026-02-01&to=2026-01-31", "after")])
async def test_days_that_are_none_or_the_wrong_way_round_are_refused(tmp_path: Path, days: str, word: str) -> None:
    async with running(tmp_path) as gateway, admin_of(gateway) as admin:
        answer = await admin.get(f"/v1/usage?{days}")
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]


@pytest.mark.anyio
async def test_every_way_to_end_is_recorded_once_and_a_spent_budget_stops_the_next(tmp_path: Path) -> None:
    secret = make(tmp_path, "k", tokens_per_day=20)
    async with running(tmp_path, ["--step-ms", "5"]) as gateway:
        body = {"model": "m", "prompt": ["a", "b"], "max_tokens": 4}
        answer = await gateway.client.post("/v1/completions", json=body, headers=bearer(secret))
        assert answer.status_code == 200
        used = {"day": None, "key": "k", "model": "m", "requests": 2, "completion_tokens": 8}
        [line] = await lines(gateway, "key,model")
        assert {name: line[name] for name in used} == used
        assert line["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]

        async with gateway.client.stream(
            "POST", "/v1/chat/completions", json=chat(max_tokens=10_000, stream=True), headers=bearer(secret)
        ) as stream:
            async for text in stream.aiter_lines():
                if "t9" in text:
                    break
        await until(lambda: gateway.app.services.admission.inside("m") == 0)
        [line] = await lines(gateway, "key")
        assert line["requests"] == 3
        assert isinstance(line["completion_tokens"], int)
        assert 16 <= line["completion_tokens"] < 1000

        spent = await gateway.client.post("/v1/chat/completions", json=chat(), headers=bearer(secret))
        assert (spent.status_code, spent.json()["error"]["code"]) == (429, "insufficient_quota")
        assert 0 < int(spent.headers["retry-after"]) <= 25 * 3600
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=secret, max_retries=1) as sdk:
            with pytest.raises(openai.RateLimitError):
                await sdk.completions.create(model="m", prompt="hi")
        assert gateway.metrics.keys["k"].rejections["budget"] == 2
    assert json.loads(next((tmp_path / "state" / "usage").iterdir()).read_bytes())[0][3] == 3

import asyncio

import pytest

from gateway.errors import ApiError
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.prometheus import BURST, Exposition, ScrapeText

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def names_in(text: bytes) -> list[bytes]:
    return [line.rpartition(b" ")[0] for line in text.splitlines()]


@pytest.fixture
def metrics() -> Metrics:
    """Numbers of 20 models and 50 keys."""
    filled = Metrics()
    filled.declare([f"model-{number}" for number in range(20)])
    for number in range(50):
        filled.request_ended("model-0", f"key-{number}", 200)
    return filled


async def test_twenty_five_scrapes_a_second_are_rendered_once_a_second(metrics: Metrics) -> None:
    now = [100.0]
    text = ScrapeText(metrics, clock=lambda: now[0])
    texts: list[bytes] = []
    for _ in range(4 * 25):
        texts.append(await text.read())
        assert b'model="model-19"' in texts[-1]
        now[0] += 1 / 25

    assert len({id(each) for each in texts}) <= BURST + 4


async def test_scrapes_are_errors_until_a_rendering_succeeds(metrics: Metrics) -> None:
    def broken() -> int:
        raise RuntimeError("a family failed")

    now = [100.0]
    text = ScrapeText(metrics, clock=lambda: now[0])
    # Read after the first families.
    metrics.unacked_aborts = broken
    for _ in range(int(BURST)):
        with pytest.raises(RuntimeError):
            await text.read()
    with pytest.raises(ApiError) as caught:
        await text.read()
    metrics.unacked_aborts = int
    assert caught.value.status == 500
    now[0] += 1.0
    assert b"mlxd_build_info" in await text.read()


async def test_a_scrape_in_time_shows_what_is_counted_now(metrics: Metrics) -> None:
    now = [100.0]
    text = ScrapeText(metrics, clock=lambda: now[0])
    for count in range(1, 10):
        metrics.stale_message()
        assert f"mlxd_stale_messages_total {count}.0".encode() in await text.read()
        now[0] += 15


async def test_what_is_shown_beyond_the_burst_is_a_second_old_at_most(metrics: Metrics) -> None:
    now = [100.0]
    text = ScrapeText(metrics, clock=lambda: now[0])
    for _ in range(20):
        await text.read()
    metrics.stale_message()
    assert b"mlxd_stale_messages_total 0.0" in await text.read()
    now[0] += 1.0
    assert b"mlxd_stale_messages_total 1.0" in await text.read()


async def test_scrapes_at_once_share_their_renderings(metrics: Metrics) -> None:
    text = ScrapeText(metrics, clock=lambda: 100.0)
    texts = await asyncio.gather(*(text.read() for _ in range(50)))

    assert len({id(each) for each in texts}) == BURST
    assert all(b'key="key-49"' in each for each in texts)


async def test_the_loop_has_its_turn_after_each_family(metrics: Metrics) -> None:
    turns = 0

    async def stream() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        streaming = tasks.create_task(stream())
        text = await ScrapeText(metrics).read()
        streaming.cancel()

    assert names_in(text) == names_in(Exposition(metrics).text())
    assert turns >= text.count(b"# TYPE ") > 50


async def test_models_may_come_and_go_while_a_text_is_rendered(metrics: Metrics) -> None:
    async def change() -> None:
        for number in range(1000):
            metrics.model(f"new-{number % 7}")
            metrics.model_removed(f"new-{(number + 3) % 7}")
            metrics.key(f"new-{number}")
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(change())
        assert b'model="model-19"' in await ScrapeText(metrics).read()

"""Many tabs of one browser, which opens six connections to a daemon: answers come, and every tab is up to date."""

from collections.abc import Iterator

import pytest

from tests.browser.conftest import SCRIPTED_DAEMON, Visiting, code_of
from tests.browser.waiting import until
from tests.support.daemon import DaemonProcess, write_config
from tests.support.pool import short_home

TABS = 8
STREAMS = 3


@pytest.fixture
def owned() -> Iterator[DaemonProcess]:
    with short_home() as home:
        write_config(home, ("a", "b"))
        with DaemonProcess(home, "talkative", "--step-ms=20", module=SCRIPTED_DAEMON) as daemon:
            yield daemon


def test_eight_tabs_and_three_answers_hold_up_nothing(owned: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(owned)
    tabs = [visit.page, *(visit.context.new_page() for _ in range(TABS - 1))]
    for tab in tabs:
        tab.goto(code_of(owned))
        tab.wait_for_selector("main.dashboard .card")
    chats = [visit.context.new_page() for _ in range(STREAMS)]
    for chat in chats:
        chat.goto(f"{visit.url}/ui/#/chat")
        chat.locator("#message-box").fill("count")
        chat.locator("#message-box").press("Enter")
    for chat in chats:
        chat.wait_for_function("() => document.querySelector('.message.assistant .markdown')?.innerText.includes('t9')")

    # An order is carried out meanwhile, and each tab shows it, with a feed of its own or without.
    card = tabs[-1].locator(".card").filter(has=tabs[-1].locator("h3:text-is('b')"))
    card.get_by_role("button", name="Load").click()
    for tab in tabs:
        tab.locator(".card").filter(has=tab.locator("h3:text-is('b')")).locator("header:has-text('ready')").wait_for()
    answers = [chat.locator(".message.assistant .markdown") for chat in chats]
    before = [answer.inner_text() for answer in answers]
    until(lambda: all(answer.inner_text() != text for answer, text in zip(answers, before, strict=True)))
    for chat in chats:
        chat.keyboard.press("Escape")
        chat.wait_for_selector(".ending:has-text('Stopped')")

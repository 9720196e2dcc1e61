"""Visitors in the browser: an open loopback, an API key, a one-time link, and a name that is not this machine's."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.conftest import SCRIPTED_DAEMON, Visiting, code_of
from tests.browser.test_chat import told
from tests.support.ctl import ctl
from tests.support.daemon import DaemonProcess, write_config
from tests.support.pool import short_home


@pytest.fixture(scope="module")
def closed() -> Iterator[tuple[DaemonProcess, str]]:
    """A daemon that wants a key, and one for the model `a`."""
    with short_home() as home:
        write_config(home, ("a", "b"))
        key = make_key(home)
        with DaemonProcess(home, "talkative", "--step-ms=4", module=SCRIPTED_DAEMON) as daemon:
            yield daemon, key


def make_key(home: Path) -> str:
    """A key for the model `a`."""
    made = ctl(home, "keys", "create", "ana", "--models", "a", "--json")
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout)["key"]


def test_a_key_opens_the_chat_with_its_models_only(closed: tuple[DaemonProcess, str], visiting: Visiting) -> None:
    daemon, key = closed
    visit = visiting(daemon, expected=("status of 401",))
    page = visit.open()
    page.get_by_label("API key").fill("sk-mlxd-wrong")
    page.get_by_role("button", name="Use this key").click()
    page.wait_for_selector(".gate [role=alert]")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Use this key").click()
    page.wait_for_selector("#message-box")
    page.get_by_role("button", name="Model:").click()
    assert page.get_by_role("menuitemradio").count() == 1
    page.keyboard.press("Escape")
    visit.send(told(["text", "for ana"]))
    visit.answered()
    assert visit.said() == "for ana"

    page.goto(f"{visit.url}/ui/#/keys")
    page.wait_for_selector(".gate:has-text('mlxctl ui')")
    page.wait_for_selector(".gate:has-text('Usage of ana')")
    assert page.evaluate("localStorage.getItem('mlxd.key')") is None
    assert key not in page.url


def test_a_link_opens_a_session_once(talkative: DaemonProcess, visiting: Visiting) -> None:
    link = code_of(talkative)
    visit = visiting(talkative)
    visit.page.goto(link)
    visit.page.wait_for_selector("text=Log out")
    assert "code" not in visit.page.url
    stored = visit.page.evaluate("[localStorage.getItem('mlxd.session'), document.cookie]")
    assert len(stored[0]) > 20
    assert stored[1] == ""

    second = visiting(talkative, expected=("status of 403",))
    second.page.goto(link)
    second.page.wait_for_selector("[role=alert]:has-text('mlxctl ui')")
    assert second.page.evaluate("localStorage.getItem('mlxd.session')") is None
    assert second.page.locator("text=Log out").count() == 0


def test_all_tabs_of_a_browser_are_logged_in_and_out_together(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative)
    visit.open()
    other = visit.context.new_page()
    other.goto(code_of(talkative))
    visit.page.wait_for_selector("text=Log out")
    later = visit.context.new_page()
    later.goto(f"{visit.url}/ui/#/keys")
    later.wait_for_selector("main.dashboard")
    later.get_by_role("button", name="Log out").click()
    visit.page.wait_for_selector("text=Log out", state="detached")
    other.wait_for_selector(".gate:has-text('mlxctl ui')")


def test_log_out_ends_the_session(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative)
    visit.page.goto(code_of(talkative))
    visit.page.get_by_role("button", name="Log out").click()
    visit.page.wait_for_selector(".gate:has-text('mlxctl ui')")

    assert visit.page.evaluate("localStorage.getItem('mlxd.session')") is None


def test_a_name_of_another_machine_gets_no_page(talkative: DaemonProcess, visiting: Visiting) -> None:
    port = talkative.url.rpartition(":")[2]
    visit = visiting(f"http://evil.example:{port}", expected=("status of 4", "Cross-Origin-Opener-Policy"))
    for path in ("/ui/", "/v1/models", "/ui/api/me"):
        answer = visit.page.goto(f"{visit.url}{path}")
        assert answer is not None
        assert answer.status in (403, 421), path

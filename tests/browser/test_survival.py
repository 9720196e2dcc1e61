"""Survival of conversations: reload in the middle of an answer, killed workers and gateways, failed saves, two tabs."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gateway.access.key import Key, KeyFile
from tests.browser.conftest import SCRIPTED_DAEMON, Visit, Visiting, code_of
from tests.browser.test_chat import told
from tests.browser.waiting import until
from tests.support.daemon import DaemonProcess, refuse_journals, write_config
from tests.support.pool import short_home

TOKENS = 400
# Still being written when its gateway is killed.
LONGER = 1_000
LOST = ("net::ERR", "status of 50", "status of 40")


def words(number: int = TOKENS) -> str:
    """Tokens of a scripted worker."""
    return " ".join(f"t{at}" for at in range(number))


def begin(visit: Visit, tokens: int = TOKENS) -> None:
    """Asks for an answer of many tokens, and waits until it is being written."""
    page = visit.open()
    page.get_by_role("button", name="Tune").click()
    page.get_by_label("max tokens").fill(str(tokens))
    page.locator(".panel header button").click()
    visit.send("count")
    page.wait_for_function("() => document.querySelector('.message.assistant .markdown')?.innerText.includes('t9')")


def test_an_answer_goes_on_after_a_reload(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative, expected=LOST)
    begin(visit)
    visit.page.reload()
    visit.answered()

    assert visit.said() == words()


def test_an_answer_goes_on_in_another_conversation(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative)
    begin(visit)
    visit.page.get_by_role("button", name="New chat").click()
    visit.page.wait_for_selector(".welcome")
    visit.send(told(["text", "meanwhile"]))
    visit.answered()
    assert visit.said() == "meanwhile"
    visit.page.locator(".row a").filter(has_text="count").click()
    visit.page.wait_for_selector(".message.user:has-text('count')")
    visit.answered()

    assert visit.said() == words()


def test_a_killed_worker_is_not_the_readers_problem(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative, expected=LOST)
    begin(visit)
    for pid in talkative.worker_pids():
        os.kill(pid, signal.SIGKILL)
    visit.answered()

    assert visit.said() == words()


def test_an_answer_goes_on_when_its_gateway_is_killed_and_back(visiting: Visiting) -> None:
    with short_home() as home:
        write_config(home, ("a",))
        with DaemonProcess(home, "talkative", "--step-ms=4", module=SCRIPTED_DAEMON) as daemon:
            port = daemon.url.rpartition(":")[2]
            visit = visiting(daemon, expected=LOST)
            begin(visit)
            (home / "mlxd.toml").write_text((home / "mlxd.toml").read_text().replace("port = 0", f"port = {port}"))
            daemon.kill()
        with DaemonProcess(home, "talkative", "--step-ms=4", module=SCRIPTED_DAEMON):
            visit.answered()
            assert visit.said() == words()


def test_a_restart_of_the_daemon_logs_nobody_out_and_asks_for_no_key(visiting: Visiting) -> None:
    with short_home() as home:
        write_config(home, ("a",))
        with DaemonProcess(home, "talkative", "--step-ms=4", module=SCRIPTED_DAEMON) as daemon:
            keep_port(daemon)
            visit = visiting(daemon, expected=("net::ERR", "status of 50"))
            visit.page.goto(code_of(daemon))
            visit.page.wait_for_selector("text=Log out")
            begin(visit, LONGER)
            # What is shown meanwhile; a refusal would be a complaint of the browser.
            visit.page.evaluate(
                "() => { window.gates = 0; new MutationObserver(() => {"
                " window.gates += document.querySelectorAll('.gate').length"
                " }).observe(document.body, {childList: true, subtree: true}) }"
            )
            place = visit.page.url
            daemon.kill()
        with DaemonProcess(home, "talkative", "--step-ms=4", module=SCRIPTED_DAEMON):
            visit.answered()
            assert visit.said() == words(LONGER)
            assert visit.page.evaluate("window.gates") == 0
            # The address of a conversation is the same in another tab, which is logged in as well.
            other = visit.context.new_page()
            other.goto(place)
            other.wait_for_selector(f".message.assistant:has-text('t{LONGER - 1}')")
            other.get_by_role("link", name="Keys").click()
            other.wait_for_selector("main.dashboard")


def keep_port(daemon: DaemonProcess) -> None:
    """The next daemon of this home has the same address."""
    file = daemon.home / "mlxd.toml"
    file.write_text(file.read_text().replace("port = 0", f"port = {daemon.url.rpartition(':')[2]}"))


def end_sessions(home: Path) -> None:
    """As if every session had expired."""
    (home / "state" / "sessions.json").unlink()


def test_an_answer_goes_on_although_its_session_has_ended(visiting: Visiting) -> None:
    with short_home() as home:
        write_config(home, ("a",))
        with DaemonProcess(home, "talkative", "--step-ms=4", module=SCRIPTED_DAEMON) as daemon:
            port = daemon.url.rpartition(":")[2]
            (home / "mlxd.toml").write_text((home / "mlxd.toml").read_text().replace("port = 0", f"port = {port}"))
            visit = visiting(daemon, expected=(*LOST, "status of 40"))
            visit.page.goto(code_of(daemon))
            visit.page.wait_for_selector("text=Log out")
            begin(visit)
            daemon.kill()
            end_sessions(home)
        with DaemonProcess(home, "talkative", "--step-ms=4", module=SCRIPTED_DAEMON) as daemon:
            # Without a key the page needs no session for the chat.
            visit.answered()
            assert visit.said() == words()
            visit.page.goto(code_of(daemon))
            visit.page.wait_for_selector("text=Log out")
            visit.open()
            visit.page.get_by_role("button", name="New chat").click()
            visit.page.wait_for_selector(".welcome")
            begin(visit)
            # As `mlxctl keys create` does, but before the answer can end.
            KeyFile(home / "keys" / "keys.json").create(Key(name="ana", prefix="", salt="", hash=""))
            daemon.kill()
            end_sessions(home)
        with DaemonProcess(home, "talkative", "--step-ms=4", module=SCRIPTED_DAEMON) as daemon:
            place = visit.page.url
            visit.page.wait_for_selector(".gate")
            visit.page.goto(code_of(daemon))
            visit.page.wait_for_selector("text=Log out")
            visit.page.goto(place)
            # Until the page joins the answer again, it shows what it had of it.
            visit.page.wait_for_selector(f".message.assistant:has-text('t{TOKENS - 1}')")
            visit.answered()
            assert visit.said() == words()


@pytest.mark.parametrize("number", [1, 2], ids=["of the session that ended", "of no session"])
def test_a_refusal_that_comes_after_the_log_in_ends_neither_session_nor_answer(visiting: Visiting, number: int) -> None:
    with short_home() as home:
        write_config(home, ("a",))
        with DaemonProcess(home, "talkative", "--step-ms=4", module=SCRIPTED_DAEMON) as daemon:
            port = daemon.url.rpartition(":")[2]
            (home / "mlxd.toml").write_text((home / "mlxd.toml").read_text().replace("port = 0", f"port = {port}"))
            visit = visiting(daemon, expected=LOST)
            visit.page.goto(code_of(daemon))
            visit.page.wait_for_selector("text=Log out")
            begin(visit, LONGER)
            place = visit.page.url
            late = LateAnswer(visit, "**/v1/responses/*?stream=true*", number)
            KeyFile(home / "keys" / "keys.json").create(Key(name="ana", prefix="", salt="", hash=""))
            daemon.kill()
            end_sessions(home)
        with DaemonProcess(home, "talkative", "--step-ms=4", module=SCRIPTED_DAEMON) as daemon:
            late.is_served = True
            until(lambda: late.is_held(visit))
            visit.page.goto(code_of(daemon))
            visit.page.wait_for_selector("text=Log out")
            assert late.deliver() == 401
            visit.page.goto(place)
            visit.page.wait_for_selector(f".message.assistant:has-text('t{LONGER - 1}')")
            visit.answered()

            assert visit.said() == words(LONGER)
            assert visit.page.get_by_text("Log out").is_visible()


class LateAnswer:
    """The answer to the request of that number, which comes when it is delivered; until `is_served` there are none."""

    def __init__(self, visit: Visit, pattern: str, number: int) -> None:
        self.is_served = False
        self._left = number
        self._held: list[tuple[Any, Any]] = []
        visit.page.route(pattern, self._take)

    def _take(self, route: Any) -> None:
        if not self.is_served:
            route.abort()
            return
        self._left -= 1
        if self._left == 0:
            self._held.append((route, route.fetch()))
        else:
            route.continue_()

    def is_held(self, visit: Visit) -> bool:
        # Routes are taken while the page is waited for.
        visit.page.wait_for_timeout(20)
        return bool(self._held)

    def deliver(self) -> int:
        """The status of the answer."""
        route, answer = self._held[0]
        route.fulfill(response=answer)
        return answer.status


def test_a_gateway_that_restarts_without_a_journal_loses_no_conversation(visiting: Visiting) -> None:
    with short_home() as home:
        write_config(home, ("a",))
        refuse_journals(home)
        with DaemonProcess(home, "talkative", "--step-ms=4", module=SCRIPTED_DAEMON) as daemon:
            port = daemon.url.rpartition(":")[2]
            visit = visiting(daemon, expected=LOST)
            begin(visit)
            (home / "mlxd.toml").write_text((home / "mlxd.toml").read_text().replace("port = 0", f"port = {port}"))
            daemon.kill()
        with DaemonProcess(home, "talkative", "--step-ms=4", module=SCRIPTED_DAEMON) as daemon:
            visit.page.wait_for_selector(".message.assistant > footer")
            so_far = visit.said()
            visit.page.get_by_role("button", name="Continue").first.click()
            visit.answered()
            assert visit.said().startswith(so_far)
            visit.page.reload()
            visit.page.wait_for_selector(".message.assistant")
            assert visit.said().startswith(so_far)


def test_a_failed_save_is_said_until_one_succeeds(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative)
    page = visit.open()
    page.evaluate(
        """() => {
          const put = IDBObjectStore.prototype.put;
          window.heal = () => (IDBObjectStore.prototype.put = put);
          IDBObjectStore.prototype.put = () => { throw new DOMException("full", "QuotaExceededError"); };
        }"""
    )
    visit.send(told(["text", "kept on the screen"]))
    visit.answered()

    assert "storage is full" in page.get_by_role("alert").inner_text()
    assert visit.said() == "kept on the screen"
    page.evaluate("() => void heal()")
    visit.send(told(["text", "saved"]))
    visit.answered(2)
    page.wait_for_selector(".banner.bad", state="detached")
    page.reload()
    page.wait_for_selector(".message.assistant")
    assert [each.inner_text() for each in page.locator(".message.assistant .markdown").all()] == [
        "kept on the screen",
        "saved",
    ]


def test_export_clear_and_import_give_the_same_tree(
    talkative: DaemonProcess, visiting: Visiting, tmp_path: Path
) -> None:
    visit = visiting(talkative)
    page = visit.open()
    visit.send(told(["text", "first"]))
    visit.answered()
    page.get_by_role("button", name="Another answer").click()
    visit.answered()
    before = _records(visit)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    file = tmp_path / "conversations.json"
    download.value.save_as(file)
    assert json.loads(file.read_text())["format"] == "mlxd-conversations"

    page.locator(".row").hover()
    page.locator(".row .menu-button").click()
    page.get_by_role("menuitem", name="Delete").click()
    page.locator("dialog .danger").click()
    page.wait_for_selector(".row", state="detached")
    assert _records(visit) == []
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Import").click()
    chooser.value.set_files(file)
    page.locator(".row a").click()
    page.wait_for_selector(".siblings:has-text('2/2')")

    after = _records(visit)
    assert {record["id"]: record for record in after} == {record["id"]: record for record in before}


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": "mlxd-conversations", "version": 1, "conversations": [{"id": 1}]}']
)
def test_a_file_that_is_no_export_changes_nothing(
    talkative: DaemonProcess, visiting: Visiting, tmp_path: Path, text: str
) -> None:
    visit = visiting(talkative)
    page = visit.open()
    file = tmp_path / "other.json"
    file.write_text(text)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Import").click()
    chooser.value.set_files(file)

    page.wait_for_selector(".notice.bad:has-text('was not imported')")
    assert _records(visit) == []


def test_two_tabs_do_not_overwrite_each_other(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative)
    page = visit.open()
    visit.send(told(["text", "from one"]))
    visit.answered()
    other = visit.context.new_page()
    other.goto(page.url)
    other.wait_for_selector(".message.assistant")

    other.locator("#message-box").fill(told(["text", "from two"]))
    other.locator("#message-box").press("Enter")
    page.wait_for_selector(".message.assistant:has-text('from two')")
    visit.send(told(["text", "from one again"]))
    visit.answered(3)
    other.wait_for_selector(".message.assistant:has-text('from one again')")
    page.reload()
    page.wait_for_selector(".message.assistant")

    assert [each.inner_text() for each in page.locator(".message.assistant .markdown").all()] == [
        "from one",
        "from two",
        "from one again",
    ]


def test_search_finds_a_conversation_by_a_message(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative)
    page = visit.open()
    for text in ("a needle in hay", "only hay"):
        page.get_by_role("button", name="New chat").click()
        page.wait_for_selector(".welcome")
        visit.send(f"title {text[:3]}")
        page.wait_for_selector(".message.assistant .markdown")
        page.keyboard.press("Escape")
        visit.answered()
        visit.send(told(["text", text]))
        visit.answered(2)
    rows = page.locator(".row")
    assert rows.count() == 2
    page.keyboard.press("Control+k")
    page.locator("#search-box:focus").fill("NEEDLE hay")
    until(lambda: rows.count() == 1)

    page.locator("#search-box").fill("nowhere")
    until(lambda: rows.count() == 0)


_READ = """async () => {
  const open = indexedDB.open("mlxd");
  const db = await new Promise((resolve) => (open.onsuccess = () => resolve(open.result)));
  const all = (store) => new Promise((resolve) => {
    const get = db.transaction(store).objectStore(store).getAll();
    get.onsuccess = () => resolve(get.result);
  });
  return [...(await all("conversations")), ...(await all("messages"))];
}"""


def _records(visit: Visit) -> list[dict[str, Any]]:
    """Conversations and messages, without the times of their saves."""
    records = visit.page.evaluate(_READ)
    return [{name: value for name, value in record.items() if name not in ("saved", "updated")} for record in records]

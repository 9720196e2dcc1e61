"""States of the composer and of answers, in words: a cold model, a full disk of answers, no daemon."""

from tests.browser.conftest import SCRIPTED_DAEMON, Visiting, code_of
from tests.browser.test_chat import told
from tests.browser.waiting import seen_s
from tests.support.daemon import DaemonProcess, write_config
from tests.support.pool import short_home


def test_a_cold_model_is_loaded_in_words_and_answers(visiting: Visiting) -> None:
    with short_home() as home:
        write_config(home, ("a",))
        with DaemonProcess(
            home, "talkative", "--step-ms=4", f"--load-s={seen_s(3):g}", module=SCRIPTED_DAEMON
        ) as daemon:
            visit = visiting(daemon)
            page = visit.open()
            visit.send(told(["text", "warm"]))
            # "Loading the model" as long as its size is not known, then "Loading 40%".
            page.wait_for_selector(".progress:has-text('Loading')")
            page.wait_for_selector(".picker:has-text('loading')")
            visit.answered()
            assert visit.said() == "warm"


def test_a_model_that_does_not_load_says_why_and_can_be_asked_again(visiting: Visiting) -> None:
    with short_home() as home:
        write_config(home, ("a",))
        with DaemonProcess(home, "talkative", "--exit-on-load=1", module=SCRIPTED_DAEMON) as daemon:
            visit = visiting(daemon, expected=("status of 50",))
            page = visit.open()
            visit.send("a question")
            page.wait_for_selector(".ending")

            said = page.locator(".ending").inner_text()
            assert "model 'a'" in said, said
            assert page.locator(".ending button").count() == 1
            page.reload()
            page.wait_for_selector(".ending")
            assert page.locator(".ending").inner_text() == said
            assert page.locator(".said").inner_text() == "a question"


def test_the_bar_and_the_picker_follow_the_model_in_a_session(visiting: Visiting) -> None:
    with short_home() as home:
        write_config(home, ("a",))
        with DaemonProcess(
            home, "talkative", "--step-ms=4", f"--load-s={seen_s(1):g}", module=SCRIPTED_DAEMON
        ) as daemon:
            # The page asks how far a request is, which may have ended by then.
            visit = visiting(daemon, expected=("status of 404",))
            visit.page.goto(code_of(daemon))
            visit.page.wait_for_selector("text=Log out")
            visit.open()
            visit.page.wait_for_selector(".status:has-text('0 ready')")
            visit.send(told(["text", "warm"]))
            visit.answered()
            visit.page.wait_for_selector(".picker:has-text('ready')")
            visit.page.wait_for_selector(".status:has-text('1 ready')")


def test_answers_come_also_where_the_daemon_keeps_none(visiting: Visiting) -> None:
    with short_home() as home:
        write_config(home, ("a",), server="response_store = 0")
        with DaemonProcess(home, "talkative", "--step-ms=4", module=SCRIPTED_DAEMON) as daemon:
            # The refusal of a background response is the sign by which the page knows.
            visit = visiting(daemon, expected=("status of 400",))
            visit.open()
            for number in (1, 2):
                visit.send(told(["text", f"answer {number}"]))
                visit.answered(number)
            assert visit.said() == "answer 2"


def test_a_daemon_that_is_gone_is_said_and_found_again(visiting: Visiting) -> None:
    with short_home() as home:
        write_config(home, ("a",))
        with DaemonProcess(home, "talkative", "--step-ms=4", module=SCRIPTED_DAEMON) as daemon:
            port = daemon.url.rpartition(":")[2]
            (home / "mlxd.toml").write_text((home / "mlxd.toml").read_text().replace("port = 0", f"port = {port}"))
            visit = visiting(daemon, expected=("net::ERR", "status of 40"))
            page = visit.open()
            page.goto(code_of(daemon))
            page.wait_for_selector(".card")
            daemon.kill()
            page.wait_for_selector(".banner:has-text('mlxd does not answer')")
        with DaemonProcess(home, "talkative", "--step-ms=4", module=SCRIPTED_DAEMON):
            page.wait_for_selector(".banner:has-text('mlxd does not answer')", state="detached")
            # Its session goes on.
            assert page.locator(".gate").count() == 0
            page.goto(f"{visit.url}/ui/#/chat")
            visit.send(told(["text", "back"]))
            visit.answered()
            assert visit.said() == "back"

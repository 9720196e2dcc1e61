"""Dashboard in a real browser: every order shows in the page, and is what `mlxctl --json` says."""

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.browser.conftest import SCRIPTED_DAEMON, Visit, Visiting, code_of
from tests.browser.test_chat import told
from tests.browser.test_hostile import look
from tests.browser.waiting import deadline_s, seen_s, until
from tests.gateway.web.hostile import VECTORS
from tests.support.ctl import ctl
from tests.support.daemon import DaemonProcess, write_config
from tests.support.hub import Hub, model_repo
from tests.support.pool import short_home


@pytest.fixture(scope="module")
def owned() -> Iterator[DaemonProcess]:
    """A daemon whose models load for a second, and that captures requests."""
    with short_home() as home:
        write_config(home, ("a", "b"), server="capture = 20")
        with DaemonProcess(
            home, "talkative", "--step-ms=4", f"--load-s={seen_s(1):g}", module=SCRIPTED_DAEMON
        ) as daemon:
            yield daemon


def opened(visit: Visit, daemon: DaemonProcess, place: str = "models") -> Visit:
    """The page with a session."""
    visit.page.goto(code_of(daemon))
    visit.page.wait_for_selector("text=Log out")
    visit.page.goto(f"{visit.url}/ui/#/{place}")
    visit.page.wait_for_selector("main.dashboard section")
    return visit


def listed(daemon: DaemonProcess, *command: str) -> Any:
    done = ctl(daemon.home, *command, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def state_of(daemon: DaemonProcess, name: str) -> dict[str, Any]:
    return next(model for model in listed(daemon, "status")["models"] if model["name"] == name)


def test_load_pin_and_unload(owned: DaemonProcess, visiting: Visiting) -> None:
    visit = opened(visiting(owned), owned)
    card = visit.page.locator(".card", has_text="b").filter(has=visit.page.locator("h3:text-is('b')"))
    card.get_by_role("button", name="Load").click()
    card.locator("header:has-text('loading')").wait_for()
    card.locator("header:has-text('ready')").wait_for()
    assert state_of(owned, "b")["state"] == "ready"
    card.get_by_role("button", name="Pin").click()
    card.locator("header:has-text('pinned')").wait_for()
    assert state_of(owned, "b")["is_pinned"]
    card.get_by_role("button", name="Unpin").click()
    card.get_by_role("button", name="Pin", exact=True).wait_for()
    card.get_by_role("button", name="Unload").click()
    card.locator("header:has-text('not loaded')").wait_for()
    assert state_of(owned, "b")["state"] == "stopped"


def test_a_load_shows_a_percent_that_moves_and_takes_the_place_of_another_model(visiting: Visiting) -> None:
    with short_home() as home:
        write_config(home, ("a", "b"))
        (home / "mlxd.toml").write_text((home / "mlxd.toml").read_text() + "[memory]\nmax_loaded = 1\n")
        with DaemonProcess(
            home, "talkative", "--step-ms=4", f"--load-s={seen_s(3):g}", module=SCRIPTED_DAEMON
        ) as daemon:
            page = opened(visiting(daemon), daemon).page

            def card(name: str) -> Any:
                return page.locator(".card").filter(has=page.locator(f"h3:text-is('{name}')"))

            for name, other in (("a", "b"), ("b", "a")):
                card(name).get_by_role("button", name="Load").click()
                bar = card(name).locator("progress")
                bar.wait_for()
                # In one look: the bar goes when the model is ready.
                first = shown(bar)
                until(lambda bar=bar, first=first: shown(bar) != first)
                card(name).locator("header:has-text('ready')").wait_for()
                card(other).locator("header:has-text('not loaded')").wait_for()
                assert (state_of(daemon, name)["state"], state_of(daemon, other)["state"]) == ("ready", "stopped")


def shown(bars: Any) -> list[float]:
    return bars.evaluate_all("bars => bars.map((bar) => bar.value)")


def test_a_visitor_without_a_session_sees_the_percent_of_a_load(visiting: Visiting) -> None:
    with short_home() as home:
        write_config(home, ("a",))
        with DaemonProcess(
            home, "talkative", "--step-ms=4", f"--load-s={seen_s(4):g}", module=SCRIPTED_DAEMON
        ) as daemon:
            visit = visiting(daemon)
            page = visit.open()
            page.get_by_role("button", name="Tune").click()
            # Fields show what an empty one means.
            assert page.get_by_label("temperature").get_attribute("placeholder") == "1"
            assert page.get_by_label("max tokens").get_attribute("placeholder") == "no limit"
            visit.send(told(["text", "warm"]))
            page.wait_for_selector(".progress:has-text('%')")
            visit.answered()


def test_a_running_request_is_seen_and_cancelled(owned: DaemonProcess, visiting: Visiting) -> None:
    visit = opened(visiting(owned), owned, "requests")
    page = visit.page
    body = {"model": "a", "messages": [{"role": "user", "content": "count"}], "stream": True}
    with owned.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        row = page.locator("tbody tr", has_text="/v1/chat/completions").first
        row.wait_for()
        assert row.locator("td").first.inner_text() == "a"
        row.get_by_role("button", name="Cancel").click()
        assert "cancelled" in answer.read().decode()
    page.wait_for_selector("text=No request runs now.")
    assert listed(owned, "requests")["requests"] == []


def test_a_captured_request_is_text(owned: DaemonProcess, visiting: Visiting) -> None:
    for vector in VECTORS[:3]:
        body = {"model": "a", "messages": [{"role": "user", "content": told(["text", vector])}]}
        assert owned.client.post("/v1/chat/completions", json=body).status_code == 200
    visit = opened(visiting(owned), owned, "requests")
    visit.page.locator("button.link").first.click()
    visit.page.wait_for_selector(".capture > pre")
    look(visit)

    shown = " ".join(visit.page.locator(".capture > pre").all_inner_texts())
    assert "<svg onload" in shown or "onerror" in shown or "<script>" in shown
    assert visit.page.locator("main img, main script, main iframe").count() == 0


def test_a_key_is_made_used_rotated_and_revoked(visiting: Visiting) -> None:
    with short_home() as home:
        write_config(home, ("a",))
        with DaemonProcess(home, "talkative", "--step-ms=4", module=SCRIPTED_DAEMON) as daemon:
            visit = opened(visiting(daemon), daemon, "keys")
            page = visit.page
            page.get_by_role("button", name="New key").click()
            page.get_by_label("Name").fill("ana")
            page.get_by_label("Requests a minute").fill("60")
            page.get_by_role("button", name="Create").click()
            first = page.locator(".secret code").inner_text()
            page.locator("dialog").get_by_role("button", name="Close").last.click()
            assert status(daemon, first) == 200
            assert status(daemon, "") == 401
            assert [key["name"] for key in listed(daemon, "keys", "list")] == ["ana"]

            page.get_by_role("button", name="Rotate").click()
            page.locator("dialog").get_by_role("button", name="Rotate").click()
            page.locator(".secret code").wait_for()
            second = page.locator(".secret code").inner_text()
            page.locator("dialog").get_by_role("button", name="Close").last.click()
            assert (status(daemon, first), status(daemon, second)) == (401, 200)
            page.get_by_role("button", name="Revoke").click()
            page.locator("dialog").get_by_role("button", name="Revoke").click()
            page.wait_for_selector("text=There is no key")
            assert status(daemon, second) == 401
            assert second not in page.content()


def status(daemon: DaemonProcess, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx2.get(f"{daemon.url}/v1/models", headers=headers, timeout=deadline_s()).status_code


def test_a_reload_is_checked_and_shows_its_changes(visiting: Visiting) -> None:
    with short_home() as home:
        write_config(home, ("a",))
        with DaemonProcess(home, "talkative", "--step-ms=4", module=SCRIPTED_DAEMON) as daemon:
            visit = opened(visiting(daemon, expected=("status of 400",)), daemon, "settings")
            page = visit.page
            page.get_by_role("button", name="Check the file").click()
            page.wait_for_selector("text=a reload would change nothing")
            text = (home / "mlxd.toml").read_text()
            (home / "mlxd.toml").write_text(f"{text}\nnonsense = 1\n")
            page.get_by_role("button", name="Check the file").click()
            page.wait_for_selector(".failure:has-text('nonsense')")
            assert page.get_by_role("button", name="Reload").is_disabled()

            (home / "mlxd.toml").write_text(f'{text}\n[models.c]\npath = "demo"\n')
            page.get_by_role("button", name="Check the file").click()
            page.wait_for_selector(".changes:has-text('c')")
            page.get_by_role("button", name="Reload").click()
            page.wait_for_selector(".notice:has-text('reloaded')")
            assert {model["name"] for model in listed(daemon, "status")["models"]} == {"a", "c"}
            page.goto(f"{visit.url}/ui/#/models")
            page.wait_for_selector(".card h3:text-is('c')")


def test_logs_are_followed_and_filtered(owned: DaemonProcess, visiting: Visiting) -> None:
    visit = opened(visiting(owned), owned, "logs")
    page = visit.page
    page.wait_for_selector(".line:has-text('mlxd serves')")
    owned.client.get("/v1/no-such-path-as-this")
    page.get_by_label("Text").fill("mlxd serves")
    until(lambda: page.locator(".line").count() == 1)
    page.get_by_label("Text").fill("")
    page.get_by_label("Level").select_option("error")
    until(lambda: page.locator(".line", has_text="info").count() == 0)


def test_a_model_is_found_pulled_and_served(
    visiting: Visiting, model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with short_home() as home, Hub({"org/tiny": model_repo(model_folder("qwen3"))}) as hub:
        for name, value in hub.environ(tmp_path / "hub").items():
            monkeypatch.setenv(name, value)
        (home / "mlxd.toml").write_text("[server]\nport = 0\n")
        with DaemonProcess(home, module="gateway.main") as daemon:
            visit = opened(visiting(daemon), daemon)
            page = visit.page
            page.get_by_placeholder("Words, or ORG/NAME").fill("org/tiny")
            page.get_by_role("button", name="Search").click()
            page.locator(".rows li", has_text="org/tiny").get_by_role("button", name="Pull").click()
            page.wait_for_selector(".pull:has-text('is here')")
            page.locator(".pull").get_by_role("button", name="Serve it").click()
            page.wait_for_selector(".card h3:text-is('org/tiny')")
            page.wait_for_selector("table th:has-text('org/tiny')")
            assert any(model["name"] == "org/tiny" for model in listed(daemon, "models"))


def test_a_download_shows_its_part_and_is_cancelled_and_resumed(
    visiting: Visiting, model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with downloading(model_folder, tmp_path, monkeypatch) as (daemon, hub):
        size = len(hub.repos["org/tiny"].files["model.safetensors"])
        hub.stalls["model.safetensors"] = size // 2
        page = opened(visiting(daemon), daemon).page
        row = page.locator(".pull").first
        pull_tiny(page)
        row.locator("progress").wait_for()
        page.wait_for_function("() => Number(document.querySelector('.pull progress')?.value) > 0")
        assert "%" in row.locator(".numbers").inner_text()
        row.get_by_role("button", name="Cancel").click()
        page.wait_for_selector(".pull:has-text('kept')")

        hub.stalls.clear()
        row.get_by_role("button", name="Resume").click()
        page.wait_for_selector(".pull:has-text('is here')")
        assert any(request.range for request in hub.asked_for("model.safetensors"))


def test_a_disk_that_is_full_while_a_model_comes_is_told_and_what_came_is_kept(
    visiting: Visiting, model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with downloading(model_folder, tmp_path, monkeypatch) as (daemon, hub):
        size = len(hub.repos["org/tiny"].files["model.safetensors"])
        page = opened(visiting(daemon), daemon).page
        pid, limit = daemon.process.pid, resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size // 2, limit[1]))
        pull_tiny(page)
        page.wait_for_selector(".pull .bad:has-text('cannot be written')")
        assert "kept" in page.locator(".pull .bad").inner_text()
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
        page.locator(".pull").first.get_by_role("button", name="Resume").click()
        page.wait_for_selector(".pull:has-text('is here')")


@contextmanager
def downloading(
    model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str = ""
) -> Iterator[tuple[DaemonProcess, Hub]]:
    """A daemon with a hub that has `org/tiny`."""
    with short_home() as home, Hub({"org/tiny": model_repo(model_folder("qwen3"))}) as hub:
        for name, value in hub.environ(tmp_path / "hub").items():
            monkeypatch.setenv(name, value)
        (home / "mlxd.toml").write_text(f"[server]\nport = 0\n{memory}")
        with DaemonProcess(home, module="gateway.main") as daemon:
            yield daemon, hub


def pull_tiny(page: Any) -> None:
    page.get_by_placeholder("Words, or ORG/NAME").fill("org/tiny")
    page.get_by_role("button", name="Search").click()
    page.locator(".rows li", has_text="org/tiny").get_by_role("button", name="Pull").click()


def test_a_model_that_does_not_fit_is_marked_before_the_click(
    visiting: Visiting, model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with downloading(model_folder, tmp_path, monkeypatch, '[memory]\nbudget = "512KiB"\n') as (daemon, _):
        page = opened(visiting(daemon), daemon).page
        page.get_by_placeholder("Words, or ORG/NAME").fill("org/tiny")
        page.get_by_role("button", name="Search").click()
        page.wait_for_selector(".finder ~ div:has-text('fit')")
        assert page.locator(".rows li", has_text="org/tiny").count() == 0
        page.locator(".finder input[type=checkbox]").uncheck()
        page.locator(".rows li .warn", has_text="fit").wait_for()


def test_memory_and_charts_are_drawn_at_once(owned: DaemonProcess, visiting: Visiting) -> None:
    visit = opened(visiting(owned), owned)
    page = visit.page
    assert page.locator(".memory-bar").count() == 1
    assert page.locator(".chart canvas").count() == 4
    page.wait_for_function("() => /ready/.test(document.querySelector('.status').textContent)")


def test_the_settings_of_a_client_name_this_address(owned: DaemonProcess, visiting: Visiting) -> None:
    visit = opened(visiting(owned), owned, "settings")
    page = visit.page
    page.wait_for_selector(f"pre:has-text('{owned.url}')")
    page.locator(".connect select").first.select_option("codex")
    page.wait_for_selector("pre:has-text('model_provider')")

    assert "mlxctl connect codex --write" in page.locator("main").inner_text()
    # It has no file, so that the page says what to enter.
    page.locator(".connect select").first.select_option("cursor")
    page.wait_for_selector("main:has-text('Override OpenAI Base URL')")
    assert "mlxctl connect cursor --write" not in page.locator("main").inner_text()


def test_hostile_names_keys_and_errors_are_text(visiting: Visiting) -> None:
    hostile = "<img src=x onerror=window.hacked=1>"
    with short_home() as home:
        (home / "mlxd.toml").write_text(
            f'[server]\nport = 0\ncapture = 5\n[models."{hostile.replace(" ", "_")}"]\npath = "demo"\naliases = ["a"]\n'
        )
        with DaemonProcess(home, "talkative", "--exit-on-load=1", module=SCRIPTED_DAEMON) as daemon:
            body = {"model": "a", "messages": [{"role": "user", "content": hostile}]}
            assert daemon.client.post("/v1/chat/completions", json=body).status_code >= 500
            body["model"] = hostile
            assert daemon.client.post("/v1/chat/completions", json=body).status_code == 404
            visit = opened(visiting(daemon), daemon)
            for name in ("models", "requests", "keys", "logs", "settings", "chat"):
                visit.page.goto(f"{visit.url}/ui/#/{name}")
                visit.page.wait_for_selector("main")
                visit.page.wait_for_timeout(300)
                assert visit.page.evaluate("window.hacked") is None, name
                assert visit.page.locator("main img:not([src^='icons/']), main script").count() == 0, name

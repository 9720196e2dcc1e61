"""A first visit, with nothing but the demos: what they can be asked, and the way to a model of one's own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.model_files.metadata import find
from tests.browser.conftest import Visiting, code_of
from tests.support.daemon import DaemonProcess
from tests.support.hub import Hub, model_repo
from tests.support.pool import short_home

OFFERED = "mlx-community/Qwen3-0.6B-4bit"


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[DaemonProcess, Hub]]:
    """A daemon without a configuration of models, and a hub with one of mlxd's own list."""
    with short_home() as home, Hub({OFFERED: model_repo(find("demo"))}) as hub:
        for name, value in hub.environ(tmp_path / "hub").items():
            monkeypatch.setenv(name, value)
        (home / "mlxd.toml").write_text("[server]\nport = 0\n")
        with DaemonProcess(home, module="gateway.main") as daemon:
            yield daemon, hub


def test_a_model_is_offered_downloaded_served_and_chosen(fresh: tuple[DaemonProcess, Hub], visiting: Visiting) -> None:
    daemon, hub = fresh
    visit = visiting(daemon)
    page = visit.open()
    # A visitor without a session is told how to get one.
    page.wait_for_selector(".first-models:has-text('mlxctl ui')")
    assert page.locator(".examples button").all_inner_texts()[1] == "What is 17 plus 25?"
    page.goto(code_of(daemon))
    page.wait_for_selector("text=Log out")
    page.goto(f"{visit.url}/ui/#/chat")
    size = len(hub.repos[OFFERED].files["model.safetensors"])
    hub.stalls["model.safetensors"] = size // 2
    row = page.locator(".first-models li")
    row.filter(has_text="very small, to try things out").get_by_role("button", name="Pull").click()
    page.wait_for_function("() => Number(document.querySelector('.first-models progress')?.value) > 0")
    assert "%" in row.locator(".numbers").inner_text()
    page.screenshot(path="/tmp/hour-shot.png", full_page=True)
    row.get_by_role("button", name="Cancel").click()
    hub.stalls.clear()
    row.get_by_role("button", name="Resume").click()

    page.wait_for_selector(f".picker:has-text('{OFFERED}')")
    page.wait_for_selector(".first-models", state="detached")
    assert page.locator(".examples button").all_inner_texts()[1] != "What is 17 plus 25?"
    models = [model["id"] for model in daemon.client.get("/v1/models").json()["data"]]
    assert OFFERED in models

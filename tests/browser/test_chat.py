"""Chat in a real browser: streams, branches, stop, continue, what is sent, and what survives."""

import json

import httpx2
import pytest

from tests.browser.conftest import Visiting
from tests.browser.waiting import deadline_s, until
from tests.support.daemon import DaemonProcess

QUESTION = "What is the capital of France?"


def told(*events: list[str]) -> str:
    """A message that a talkative model answers with these events."""
    return json.dumps([*events, ["finish", "stop"]])


def test_the_demo_model_answers_what_the_api_answers(demo: DaemonProcess, visiting: Visiting) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    wanted = demo.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    visit = visiting(demo)
    page = visit.open()
    page.get_by_role("button", name="Tune").click()
    page.get_by_label("temperature").fill("0")
    page.locator(".panel header button").click()

    visit.send(QUESTION)
    visit.answered()

    assert visit.said() == wanted.strip()
    assert "tokens" in page.locator(".numbers").inner_text()


def test_only_what_was_set_is_sent(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative)
    page = visit.open()
    visit.send(told(["text", "one"]))
    visit.answered(1)
    page.get_by_role("button", name="Tune").click()
    page.get_by_label("top p").fill("0.5")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Thinking").select_option("off")
    visit.send(told(["text", "two"]))
    visit.answered(2)

    first, second = visit.bodies[-2:]
    sampling = {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_tokens",
        "max_output_tokens",
        "seed",
        "repetition_penalty",
    }
    assert sampling & first.keys() == set()
    assert not {"reasoning_effort", "instructions", "tools"} & first.keys()
    assert sampling & second.keys() == {"top_p"}
    assert (second["top_p"], second["reasoning_effort"]) == (0.5, "none")
    assert "Be brief." in json.dumps(second)


def test_other_answers_and_edits_are_branches_that_survive_a_reload(
    talkative: DaemonProcess, visiting: Visiting
) -> None:
    visit = visiting(talkative)
    page = visit.open()
    visit.send(told(["text", "first"]))
    visit.answered()
    page.get_by_role("button", name="Another answer").click()
    visit.answered()
    assert page.locator(".message.assistant .siblings span").inner_text() == "2/2"

    page.locator(".message.user").hover()
    page.locator(".message.user").get_by_role("button", name="Edit").click()
    page.locator(".editor textarea").fill(told(["text", "edited"]))
    page.locator(".editor textarea").press("Control+Enter")
    visit.answered()
    assert visit.said() == "edited"

    page.reload()
    page.wait_for_selector(".message.assistant")
    assert visit.said() == "edited"
    assert page.locator(".message.user .siblings span").inner_text() == "2/2"
    page.locator(".message.user").get_by_role("button", name="The branch before").click()
    assert visit.said() == "first"
    assert page.locator(".message.assistant .siblings span").inner_text() == "2/2"


def test_stop_frees_the_row(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative)
    page = visit.open()
    visit.send("go on and on")
    page.wait_for_selector(".message.assistant .markdown")
    assert _running(talkative) == 1
    page.keyboard.press("Escape")
    page.wait_for_selector(".ending:has-text('Stopped')")

    _until_idle(talkative)
    text = visit.said()
    page.reload()
    page.wait_for_selector(".ending:has-text('Stopped')")
    assert visit.said() == text


def test_continue_appends_to_the_same_message(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative)
    page = visit.open()
    visit.send('[["text", "t0 t1"], ["finish", "length"]]')
    visit.answered()
    assert page.locator(".ending").inner_text().startswith("The answer reached its largest number of tokens")
    page.get_by_role("button", name="Tune").click()
    page.get_by_label("max tokens").fill("3")
    page.locator(".ending button").click()
    visit.answered()

    assert visit.said().startswith("t0 t1")
    assert len(visit.said()) > len("t0 t1")
    assert visit.bodies[-1]["continue_final_message"] is True
    assert page.locator(".message").count() == 2


def test_reasoning_is_folded_with_its_time(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative)
    page = visit.open()
    visit.send(told(["reasoning", "Let me think."], ["wait"], ["text", "Done."]))
    visit.answered()

    summary = page.locator(".reasoning summary")
    assert summary.inner_text().startswith("Thought for")
    assert not page.get_by_text("Let me think.", exact=True).is_visible()
    summary.click()
    assert page.get_by_text("Let me think.", exact=True).is_visible()


def test_a_tool_call_is_shown_and_takes_a_result(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative)
    page = visit.open()
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    page.get_by_role("button", name="Tune").click()
    page.locator(".panel details summary").click()
    page.get_by_label("Tools (JSON)").fill(json.dumps([tool]))
    visit.send('[["tool", "get_weather", "{\\"city\\": \\"Bern\\"}"], ["finish", "tool_calls"]]')
    page.wait_for_selector(".call form")

    assert page.locator(".call code").inner_text() == "get_weather"
    assert '"city": "Bern"' in page.locator(".call pre").inner_text()
    page.locator(".call textarea").fill(told(["text", "It rains."]))
    page.locator(".call form button").click()
    visit.answered(2)
    assert visit.said() == "It rains."


@pytest.mark.parametrize(("finish", "sentence"), [("error", "it failed"), ("length", "largest number of tokens")])
def test_an_end_that_is_none_is_told_in_words(
    talkative: DaemonProcess, visiting: Visiting, finish: str, sentence: str
) -> None:
    visit = visiting(talkative)
    page = visit.open()
    visit.send(f'[["text", "So far"], ["finish", "{finish}"]]')
    visit.answered()

    assert visit.said() == "So far"
    assert sentence in page.locator(".ending").inner_text()


def test_an_unknown_model_is_told_and_can_be_changed(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative, expected=("status of 404",))
    page = visit.open()
    page.evaluate("localStorage.setItem('mlxd.model', 'gone')")
    page.get_by_role("button", name="Model:").click()
    page.get_by_role("menuitemradio").nth(1).click()
    visit.send(told(["text", "from b"]))
    visit.answered()

    assert visit.bodies[-1]["model"] == "b"
    assert page.locator(".message.assistant .author").inner_text() == "b"


def _running(daemon: DaemonProcess) -> int:
    transport = httpx2.HTTPTransport(uds=str(daemon.home / "run" / "admin.sock"))
    with httpx2.Client(transport=transport, base_url="http://mlxd", timeout=deadline_s()) as client:
        return len(client.get("/v1/requests").json()["requests"])


def _until_idle(daemon: DaemonProcess) -> None:
    until(lambda: _running(daemon) == 0)

"""Hostile texts in every field of the page: nothing runs, no element outside the set appears, no server is asked."""

import json

from tests.browser.conftest import Visit, Visiting
from tests.gateway.web.hostile import VECTORS
from tests.gateway.web.test_markdown import ELEMENTS
from tests.support.daemon import DaemonProcess

# The page's own, beside those that a model's text may become.
OWN = "button svg path math article header footer span div details summary form label textarea"
_LISTEN = """() => {
  window.violations = [];
  document.addEventListener('securitypolicyviolation', (event) => violations.push(event.violatedDirective));
}"""
_LOOK = """() => ({
  hacked: window.hacked === undefined ? null : String(window.hacked),
  names: [...new Set([...document.querySelectorAll('.message *')].map((each) => each.localName))],
  handlers: [...document.querySelectorAll('*')].flatMap((each) => [...each.attributes])
    .filter(({ name }) => name.startsWith('on') || name === 'srcdoc' || name === 'formaction').map(({ name }) => name),
  links: [...document.querySelectorAll('.message a')].map((each) => each.protocol),
})"""


def look(visit: Visit) -> None:
    seen = visit.page.evaluate(_LOOK)
    assert seen["hacked"] is None
    assert set(seen["names"]) <= set(f"{ELEMENTS} {OWN}".split())
    assert seen["handlers"] == []
    assert set(seen["links"]) <= {"http:", "https:", "mailto:"}


def test_hostile_answers_reasoning_and_calls_run_nothing(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative)
    page = visit.open()
    page.evaluate(_LISTEN)
    for at, text in enumerate(VECTORS, 1):
        events = [["reasoning", text], *(["text", piece] for piece in pieces(text)), ["finish", "stop"]]
        visit.send(json.dumps(events))
        visit.answered(at)
        page.locator(".reasoning summary").last.click()
        look(visit)
    call = json.dumps({"x": VECTORS[0]})
    visit.send(json.dumps([["tool", VECTORS[0], call], ["finish", "tool_calls"]]))
    visit.answered(len(VECTORS) + 1)
    look(visit)

    page.reload()
    page.wait_for_selector(".message.assistant")
    page.evaluate(_LISTEN)
    look(visit)
    assert page.evaluate("violations") == []


def pieces(text: str) -> list[str]:
    """A text cut where a stream may cut it."""
    return [text[at : at + 7] for at in range(0, len(text), 7)]


def test_hostile_titles_prompts_and_failures_are_text(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative, expected=("status of 404",))
    page = visit.open()
    for text in VECTORS[:6]:
        page.get_by_role("button", name="New chat").click()
        page.wait_for_selector(".welcome")
        page.evaluate("text => localStorage.setItem('mlxd.model', text)", text)
        visit.send(text)
        page.wait_for_selector(".message.assistant .markdown, .ending")
        page.keyboard.press("Escape")
        visit.answered()
        assert page.locator(".said").inner_text().strip() == text.strip()
        look(visit)
    assert page.locator(".row").count() == 6
    assert page.locator(".row img, .row script, .row svg:not(.icon)").count() == 0

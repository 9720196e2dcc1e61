"""Documents in the browser: drawn without complaint, and copied as they were written."""

import json

from tests.browser.conftest import Visiting
from tests.gateway.web.test_markdown import documents
from tests.support.daemon import DaemonProcess


def test_each_document_is_copied_as_it_was_written(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative, permissions=["clipboard-read", "clipboard-write"])
    page = visit.open()
    for at, (name, text) in enumerate(documents().items(), 1):
        visit.send(json.dumps([["text", text], ["finish", "stop"]]))
        visit.answered(at)
        last = page.locator(".message.assistant").last
        last.locator("footer").get_by_role("button", name="Copy").click()
        last.get_by_role("status").filter(has_text="Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == text, name
        page.wait_for_timeout(0)


def test_code_is_copied_without_its_fence(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative, permissions=["clipboard-read", "clipboard-write"])
    page = visit.open()
    code = 'def f():\n\treturn "<b>"'
    visit.send(json.dumps([["text", f"Look:\n\n```python\n{code}\n```"], ["finish", "stop"]]))
    visit.answered()
    page.locator(".code-bar button").click()
    page.locator(".code-bar").get_by_role("status").filter(has_text="Copied").wait_for()

    assert page.evaluate("navigator.clipboard.readText()") == code
    page.wait_for_selector(".hljs-keyword")


def test_formulas_become_mathml(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative)
    page = visit.open()
    visit.send(json.dumps([["text", "Let $x^2$ and\n\n$$\\frac{a}{b}$$"], ["finish", "stop"]]))
    visit.answered()
    page.wait_for_selector("math mfrac")

    assert page.evaluate("document.querySelector('math msup').namespaceURI") == "http://www.w3.org/1998/Math/MathML"
    assert page.locator("math").first.bounding_box()["width"] > 5

"""Accessibility: axe without serious findings, keyboard, small screens, what a screen reader is told."""

from pathlib import Path

import pytest

from tests.browser.conftest import ROOT, Visit, Visiting, code_of
from tests.browser.test_chat import told
from tests.support.daemon import DaemonProcess

AXE = ROOT / "deploy" / "web" / "node_modules" / "axe-core" / "axe.min.js"
PAGES = ("models", "requests", "keys", "logs", "settings")
RICH = """# Title

- [x] a `code` and $x^2$

```python
print('<b>')
```

| a | b |
|-|-|
| 1 | [l](https://e.example) |
"""


def findings(visit: Visit) -> list[str]:
    """Serious findings of axe on what is shown now."""
    visit.page.evaluate(Path(AXE).read_text())
    result = visit.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']}: {node['html'][:200]} {node.get('failureSummary', '')[:300]}"
        for each in result["violations"]
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: npm ci in deploy/web")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(talkative: DaemonProcess, visiting: Visiting, theme: str) -> None:
    visit = visiting(talkative, color_scheme=theme, reduced_motion="reduce")
    page = visit.open()
    assert findings(visit) == []
    visit.send(told(["reasoning", "hm"], ["text", RICH]))
    visit.answered()
    page.wait_for_selector("math")
    page.get_by_role("button", name="Tune").click()
    page.locator(".panel details summary").click()
    assert findings(visit) == []
    page.goto(f"{visit.url}/ui/#/models")
    page.wait_for_selector(".gate")
    assert findings(visit) == []

    page.goto("about:blank")
    page.goto(code_of(talkative))
    for name in PAGES:
        page.goto(f"{visit.url}/ui/#/{name}")
        page.wait_for_selector(f"main.dashboard h1:has-text('{name.title()}')", state="attached")
        page.wait_for_timeout(300)
        assert findings(visit) == [], name


def test_a_chat_by_keyboard_alone(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative)
    page = visit.open()
    page.wait_for_selector("#message-box:focus")
    page.keyboard.type(told(["text", "by keys"]))
    page.keyboard.press("Enter")
    visit.answered()
    assert visit.said() == "by keys"
    page.keyboard.press("Control+Shift+O")
    page.wait_for_selector(".welcome")
    page.get_by_role("button", name="Model:").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector(".picker strong:has-text('b')")


def test_a_screen_reader_is_told_of_the_beginning_and_the_answer(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative)
    page = visit.open()
    page.evaluate(
        """() => {
          window.told = [];
          const watch = () => {
            const text = document.querySelector('.conversation > [role=status]')?.textContent;
            if (text && told.at(-1) !== text) told.push(text);
          };
          new MutationObserver(watch).observe(document.body, { subtree: true, childList: true, characterData: true });
        }"""
    )
    visit.send(told(["text", "one "], ["wait"], ["wait"], ["text", "two "], ["wait"], ["text", "three"]))
    visit.answered()
    page.wait_for_function("() => told.includes('one two three')")

    assert page.evaluate("told") == ["Writing", "one two three"]


@pytest.mark.parametrize("width", [360, 768])
def test_nothing_is_cut_off_on_a_small_screen(talkative: DaemonProcess, visiting: Visiting, width: int) -> None:
    visit = visiting(talkative, viewport={"width": width, "height": 720}, has_touch=True, is_mobile=True)
    page = visit.open()
    page.locator("#message-box").fill(told(["text", f"{RICH}\n\n{'long' * 60}"]))
    page.get_by_role("button", name="Send").click()
    visit.answered()
    assert _overflow(visit) == 0
    if width < 760:
        page.get_by_role("button", name="Conversations").click()
        page.locator(".sidebar.open .row a").wait_for()
        page.locator(".shade").click(position={"x": 340, "y": 400})
    page.goto("about:blank")
    page.goto(code_of(talkative))
    for name in PAGES:
        page.goto(f"{visit.url}/ui/#/{name}")
        page.wait_for_selector(f"main.dashboard h1:has-text('{name.title()}')", state="attached")
        assert _overflow(visit) == 0, name


def _overflow(visit: Visit) -> int:
    """Pixels by which the page is wider than the screen."""
    return visit.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")

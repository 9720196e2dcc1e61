"""Long answers and conversations: drawing costs what is new, not what is there."""

import json
from collections import Counter
from typing import Any

from tests.browser.conftest import Visit, Visiting
from tests.support.daemon import DaemonProcess

LONG_CHARS = 60_000
# 40 parts are 4 kB, 600 are 60 kB; either grows by 25 parts, 20 characters an update, as at 200 tokens a second.
SHORT_PARTS, LONG_PARTS, NEW_PARTS, UPDATE_CHARS = 40, 600, 25, 20
BLOCKS_A_PART = 3
# What compares a block or token with the one before; nothing else may be called for one that stays.
COMPARISONS = ("", "shouldComponentUpdate")
# Preact's walk through the list of blocks, which is 18 calls.
CALLS_A_KEPT_BLOCK_MAX = 20
# An answer here is 4 kB: one that stays, with its elements, is seen.
HEAP_ROUNDS, HEAP_GROWTH_MIB = 20, 2
THOUSAND_MIB = 4
# Parts are alike and of one length, so that updates of any two answers are alike too.
_GROWING = """async () => {
  const { h, render } = await import("./vendor/preact.js");
  const { Markdown } = await import("./text/markdown.js");
  const part = (at) => `Paragraph ${1e6 + at} with **bold**, \\`code\\` and some more words to read.`
    + "\\n\\n- one\\n- two\\n\\n```js\\nconst x = " + (1e6 + at) + ";\\n```\\n\\n";
  const box = document.createElement("div");
  box.id = "growing";
  document.body.append(box);
  let text = "";
  const draw = (to) => render(h(Markdown, { text: text.slice(0, to), isOpen: true }), box);
  window.begin = (parts, more) => {
    text = Array.from({ length: parts + more }, (_, at) => part(at)).join("");
    draw(parts * part(0).length);
    // Effects run after a frame.
    return new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve, 100)));
  };
  window.grow = (parts, more, chars) => {
    const observer = new MutationObserver(() => {});
    observer.observe(box, { subtree: true, childList: true, characterData: true, attributes: true });
    let updates = 0;
    for (let to = parts * part(0).length + chars; to <= text.length; to += chars) {
      draw(to);
      updates += 1;
    }
    const change = (each) => [each.type, each.addedNodes.length, each.removedNodes.length].join(" ");
    return { updates, changes: observer.takeRecords().map(change) };
  };
}"""


# A thousand conversations, the oldest with 500 messages.
_FILL = """async () => {
  const { database } = await import("./history/database.js");
  const db = await database();
  const write = db.transaction(["conversations", "messages"], "readwrite");
  for (let at = 0; at < 1000; at += 1) {
    write.objectStore("conversations").put({
      id: `c${at}`, title: `Number ${at}`, model: "a", system: "", sampling: {}, thinking: "", tools: "",
      leaf: at ? null : "m499", created: at + 1, updated: at + 1,
    });
  }
  for (let at = 0; at < 500; at += 1) {
    write.objectStore("messages").put({
      id: `m${at}`, conversation: "c0", parent: at ? `m${at - 1}` : null, role: at % 2 ? "assistant" : "user",
      text: `Message ${at} with **some** text.`, reasoning: "", calls: [], call_id: "", files: [], model: "a",
      created: at, timings: {}, state: "whole", finish: "stop", error: "", response: null,
    });
  }
  await write.done;
}"""


def test_an_update_of_a_long_answer_is_the_work_of_an_update_of_a_short_one(
    talkative: DaemonProcess, visiting: Visiting
) -> None:
    visit = visiting(talkative)
    visit.open()
    visit.page.evaluate(_GROWING)
    short, short_calls = growth(visit, SHORT_PARTS)
    long, long_calls = growth(visit, LONG_PARTS)

    assert long == short
    assert of_text(long_calls) == of_text(short_calls)
    kept = long["updates"] * (LONG_PARTS - SHORT_PARTS) * BLOCKS_A_PART
    assert sum(long_calls.values()) - sum(short_calls.values()) <= CALLS_A_KEPT_BLOCK_MAX * kept


def growth(visit: Visit, parts: int) -> tuple[dict[str, Any], Counter[tuple[str, str, int]]]:
    """Updates and changes of the document while an answer grows, and calls by module, name and place of a function."""
    devtools = visit.context.new_cdp_session(visit.page)
    devtools.send("Profiler.enable")
    devtools.send("Profiler.startPreciseCoverage", {"callCount": True, "detailed": False})
    visit.page.evaluate("([parts, more]) => begin(parts, more)", [parts, NEW_PARTS])
    # Code that is whole is drawn again once its highlighter is loaded.
    visit.page.wait_for_function(
        "parts => document.querySelectorAll('#growing .hljs-keyword').length === parts", arg=parts
    )
    # Counters begin again.
    devtools.send("Profiler.takePreciseCoverage")
    done = visit.page.evaluate("given => grow(...given)", [parts, NEW_PARTS, UPDATE_CHARS])
    scripts = devtools.send("Profiler.takePreciseCoverage")["result"]
    devtools.send("Profiler.stopPreciseCoverage")
    devtools.detach()
    calls: Counter[tuple[str, str, int]] = Counter()
    for script in scripts:
        for function in script["functions"]:
            place = function["ranges"][0]
            calls[script["url"].rpartition("/ui/")[2], function["functionName"], place["startOffset"]] += place["count"]
    assert done["updates"] > 100
    return done, calls


def of_text(calls: Counter[tuple[str, str, int]]) -> dict[tuple[str, str, int], int]:
    """Calls that read or draw a text."""
    found = {
        function: number
        for function, number in calls.items()
        if function[0].startswith(("text/", "vendor/marked")) and number and function[1] not in COMPARISONS
    }
    assert {("text/lexer.js", "update"), ("text/markdown.js", "blockNode")} <= {function[:2] for function in found}
    return found


def test_a_long_answer_arrives_whole(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative)
    page = visit.open()
    text = "\n\n".join(f"Paragraph {at} of a long answer, with words." for at in range(1_500))
    assert len(text) > LONG_CHARS
    visit.send(json.dumps([*(["text", text[at : at + 400]] for at in range(0, len(text), 400)), ["finish", "stop"]]))
    visit.answered()

    assert page.locator(".message.assistant .markdown > p").count() == 1_500
    assert page.locator(".message.assistant .markdown > p").last.inner_text().startswith("Paragraph 1499 ")


def test_a_thousand_conversations_and_a_long_one_open(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative)
    page = visit.open()
    page.wait_for_selector(".welcome")
    empty = heap(visit)
    page.evaluate(_FILL)
    page.goto(f"{visit.url}/ui/#/chat/c0")
    page.reload()
    page.wait_for_function("() => document.querySelectorAll('.message').length === 500")

    assert page.locator(".message").last.is_visible()
    assert page.locator(".row").count() == 100
    # The others are titles in a list: their messages are read when they are opened.
    page.goto(f"{visit.url}/ui/#/chat")
    page.reload()
    page.wait_for_selector(".row")
    assert heap(visit) - empty < THOUSAND_MIB, empty
    page.locator(".sidebar .list").evaluate("each => each.scrollTo(0, each.scrollHeight)")
    page.wait_for_function("() => document.querySelectorAll('.row').length > 100")


def heap(visit: Visit) -> float:
    """Mebibytes of the page's heap that are in use, after its garbage is collected."""
    devtools = visit.context.new_cdp_session(visit.page)
    for _ in range(2):
        devtools.send("HeapProfiler.collectGarbage")
    used = devtools.send("Runtime.getHeapUsage")["usedSize"]
    devtools.detach()
    return used / (1 << 20)


def test_the_heap_is_flat_over_many_answers(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative)
    page = visit.open()
    answer = json.dumps(
        [*(["text", f"Paragraph {at} with **bold** text.\n\n"] for at in range(100)), ["finish", "stop"]]
    )
    sizes = []
    for _ in range(HEAP_ROUNDS):
        page.get_by_role("button", name="New chat").click()
        page.wait_for_selector(".welcome")
        visit.send(answer)
        visit.answered()
        sizes.append(heap(visit))

    # The first ones load code and fill caches.
    assert max(sizes[-3:]) - min(sizes[4:7]) < HEAP_GROWTH_MIB, sizes

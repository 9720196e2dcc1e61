"""Long answers and conversations: drawing costs what is new, not what is there."""

import json

from tests.browser.conftest import Visit, Visiting
from tests.support.daemon import DaemonProcess

SHORT, LONG = 4_000, 60_000
# An answer here is 4 kB: one that stays, with its elements, is seen.
HEAP_ROUNDS, HEAP_GROWTH_MIB = 20, 2
THOUSAND_MIB = 4
RATIO_MAX = 8
# A paragraph, a list and a fence at a time, 20 characters an update, as at 200 tokens a second.
_MEASURE = """async ([short, long]) => {
  const { h, render } = await import("./vendor/preact.js");
  const { Markdown } = await import("./text/markdown.js");
  const part = (at) => `Paragraph ${at} with **bold**, \\`code\\` and some more words to read.\\n\\n- one\\n- two\\n\\n`
    + "```js\\nconst x = " + at + ";\\n```\\n\\n";
  let text = "";
  for (let at = 0; text.length < long + 4000; at += 1) text += part(at);
  const box = document.createElement("div");
  document.body.append(box);
  const p95 = (from) => {
    const times = [];
    render(h(Markdown, { text: text.slice(0, from), isOpen: true }), box);
    for (let end = from; end < from + 3000; end += 20) {
      const begin = performance.now();
      render(h(Markdown, { text: text.slice(0, end), isOpen: true }), box);
      box.offsetHeight;
      times.push(performance.now() - begin);
    }
    return times.sort((a, b) => a - b)[Math.floor(times.length * 0.95)];
  };
  p95(short);
  const result = [p95(short), p95(long)];
  box.remove();
  return result;
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


def test_an_update_of_a_long_answer_costs_little_more_than_of_a_short_one(
    talkative: DaemonProcess, visiting: Visiting
) -> None:
    visit = visiting(talkative)
    page = visit.open()
    short, long = page.evaluate(_MEASURE, [SHORT, LONG])

    assert long <= RATIO_MAX * short, (short, long)


def test_a_long_answer_arrives_whole(talkative: DaemonProcess, visiting: Visiting) -> None:
    visit = visiting(talkative)
    page = visit.open()
    text = "\n\n".join(f"Paragraph {at} of a long answer, with words." for at in range(1_500))
    assert len(text) > LONG
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

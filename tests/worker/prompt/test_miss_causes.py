"""The causes of misses: a real prefix cache, a template of one line, and a client that does one thing wrong at a time.

A token is a character, so that a test sees at once how many were missed.
"""

import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from protocol.from_worker import Explained, MissCause, MissCode
from protocol.to_worker import ChatPrompt, Explain, Media, TextPrompt
from tests.support import disk as folder
from tests.support.caches import filled, layout
from worker.engine.load_checks import silent_row
from worker.prefix_cache.cache_and_eviction import SCORED, PrefixCache
from worker.prefix_cache.disk import CacheDisk
from worker.prompt.miss_explainer import MissExplainer, RecentPrompts

PLENTY = 1 << 30
SYSTEM = "You are the helper of a shop that sells bicycles, and you answer in one sentence. "
QUESTION = "How much is the red one with the basket in front, and is there one in my size?"
ANSWER = "It is four hundred, and there are two in your size left in the shop."
THOUGHT = "The red one is number seven of the list, so I look there."
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("stock", "price")]
Template = Callable[[ChatPrompt], str]


def text_of(content: Any, prompt: ChatPrompt) -> str:
    """Text in which another image is another character."""
    if isinstance(content, str):
        return content
    images = {at: chr(0x2500 + medium.digest[0]) for at, medium in enumerate(prompt.media)}
    return "".join(part["text"] if part["type"] == "text" else images[part["media"]] for part in content)


def plain(prompt: ChatPrompt) -> str:
    """System prompt, tools, messages with their thoughts."""
    tools = "".join(f"({tool['function']['name']})" for tool in prompt.tools)
    heads = [f"<{message['role']}>" for message in prompt.messages]
    thoughts = [f"[{thought}]" if (thought := m.get("reasoning_content")) else "" for m in prompt.messages]
    texts = [text_of(message["content"], prompt) for message in prompt.messages]
    parts = [head + thought + text for head, thought, text in zip(heads, thoughts, texts, strict=True)]
    return f"{parts[0]}{tools}{prompt.effort}{''.join(parts[1:])}<assistant>"


def forgetful(prompt: ChatPrompt) -> str:
    """A template that drops the thoughts of all earlier answers, as most do."""
    messages = [{name: value for name, value in m.items() if name != "reasoning_content"} for m in prompt.messages]
    return plain(structs.replace(prompt, messages=messages))


class Clock:
    """A template that writes the time into the system prompt."""

    def __init__(self) -> None:
        self.minute = 10

    def __call__(self, prompt: ChatPrompt) -> str:
        self.minute += 1
        return f"It is 2026-03-01 12:{self.minute}. {plain(prompt)}"


def message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def chat(*messages: dict[str, Any], system: str = SYSTEM, **fields: Any) -> ChatPrompt:
    return ChatPrompt([message("system", system), *messages], **fields)


ASKED = chat(message("user", QUESTION))
ASKED_AGAIN = chat(
    message("user", QUESTION), message("assistant", ANSWER), message("user", "Thanks. And the blue one?")
)


class Shop:
    """A model with a prefix cache that many requests use, one after another."""

    def __init__(self, template: Template = plain, kind: str = "plain", budget: int = PLENTY, **options: Any) -> None:
        self.cache = PrefixCache(layout(kind), budget, **options)
        self.recent = RecentPrompts()
        self._kind, self._template = kind, template
        self._explainer = MissExplainer(self.recent, self.cache, lambda ids: "".join(map(chr, ids)))
        self._rid = 0

    def ask(
        self,
        prompt: ChatPrompt | str,
        answer: str = "",
        *,
        salt: str = "",
        thoughts: str = "",
        is_stored: bool = True,
        is_scored: bool = False,
        marks: Sequence[int] = (),
    ) -> int:
        """Serve a request as the engine does, and return its rid. KV is stored up to `marks`, and at the end."""
        self._rid += 1
        text = prompt if isinstance(prompt, str) else self._template(prompt)
        row = silent_row(self._rid, [ord(character) for character in text], 2)
        row.cache_salt = salt
        self.recent.add(row, TextPrompt(prompt) if isinstance(prompt, str) else prompt, len(text))
        ticket = self.cache.restore(row.reusable, salt)
        while ticket is not None and not ticket.is_done:
            time.sleep(0.001)
        self.cache.fetch(row.reusable, salt, ticket, rid=row.rid)
        row.stats.insert(SCORED if is_scored else self.cache.lookup, is_resumed=False)
        row.stats.admitted = time.monotonic()
        row.output += [ord(character) for character in (f"[{thoughts}]" if thoughts else "") + answer]
        row.thinking.tokens = len(thoughts)
        for end in (*marks, len(row.tokens())) if is_stored else ():
            tokens = row.tokens()[:end]
            self.cache.store(tokens, filled(self._kind, tokens.tolist()), salt, row.rid)
        return row.rid

    def explain(self, rid: int, other: int = 0, *, shows_text: bool = True, crosses_salts: bool = True) -> Explained:
        return self._explainer.explain(Explain(99, rid, other, shows_text, crosses_salts))


def only(explained: Explained) -> MissCause:
    assert len(explained.causes) == 1, explained
    return explained.causes[0]


def test_a_conversation_that_goes_on_misses_nothing() -> None:
    shop = Shop()
    first = shop.ask(ASKED, ANSWER)
    explained = shop.explain(shop.ask(ASKED_AGAIN))
    assert (explained.other, explained.causes) == (first, ())
    assert explained.reused == explained.common == len(plain(ASKED) + ANSWER)


def changed_system() -> tuple[Explained, dict[str, Any]]:
    shop = Shop()
    shop.ask(ASKED, ANSWER)
    other = structs.replace(
        ASKED_AGAIN, messages=[message("system", SYSTEM.replace("one", "two")), *ASKED_AGAIN.messages[1:]]
    )
    return shop.explain(shop.ask(other)), {"code": MissCode.SYSTEM, "message": 0, "role": "system"}


def moved_date() -> tuple[Explained, dict[str, Any]]:
    shop = Shop()
    shop.ask(chat(message("user", QUESTION), system=f"{SYSTEM} Today is Sat, 28 Feb 2026."), ANSWER)
    again = structs.replace(
        ASKED_AGAIN, messages=[message("system", f"{SYSTEM} Today is Sun, 1 Mar 2026."), *ASKED_AGAIN.messages[1:]]
    )
    return shop.explain(shop.ask(again)), {"code": MissCode.DATE, "message": 0, "role": "system"}


def moved_date_of_the_template() -> tuple[Explained, dict[str, Any]]:
    shop = Shop(Clock())
    shop.ask(ASKED, ANSWER)
    return shop.explain(shop.ask(ASKED_AGAIN)), {"code": MissCode.DATE, "message": -1, "role": "template"}


def reordered_tools() -> tuple[Explained, dict[str, Any]]:
    shop = Shop()
    shop.ask(structs.replace(ASKED, tools=TOOLS), ANSWER)
    reordered = shop.ask(structs.replace(ASKED_AGAIN, tools=TOOLS[::-1]))
    return shop.explain(reordered), {"code": MissCode.TOOL_ORDER, "old": "stock, price", "new": "price, stock"}


def changed_tools() -> tuple[Explained, dict[str, Any]]:
    shop = Shop()
    shop.ask(structs.replace(ASKED, tools=TOOLS[:1]), ANSWER)
    return shop.explain(shop.ask(structs.replace(ASKED_AGAIN, tools=TOOLS))), {"code": MissCode.TOOLS, "new": "price"}


def dropped_thoughts() -> tuple[Explained, dict[str, Any]]:
    shop = Shop(forgetful)
    shop.ask(ASKED, ANSWER, thoughts=THOUGHT)
    question, answer, thanks = ASKED_AGAIN.messages[1:]
    again = chat(question, {**answer, "reasoning_content": THOUGHT}, thanks)
    return shop.explain(shop.ask(again)), {"code": MissCode.THOUGHTS, "message": 2, "role": "assistant"}


def unsent_thoughts() -> tuple[Explained, dict[str, Any]]:
    shop = Shop()
    shop.ask(ASKED, ANSWER, thoughts=THOUGHT)
    return shop.explain(shop.ask(ASKED_AGAIN)), {"code": MissCode.THOUGHTS_UNSENT, "message": 2, "role": "assistant"}


def edited_message() -> tuple[Explained, dict[str, Any]]:
    shop = Shop()
    shop.ask(ASKED, ANSWER)
    question, *rest = ASKED_AGAIN.messages[1:]
    edited = chat(message("user", question["content"].replace("basket", "dynamo")), *rest)
    facts = {"code": MissCode.MESSAGE, "message": 1, "role": "user"}
    return shop.explain(shop.ask(edited)), facts


def changed_image() -> tuple[Explained, dict[str, Any]]:
    shop = Shop()
    content = [
        {"type": "text", "text": QUESTION},
        {"type": "image", "media": 0},
        {"type": "text", "text": "Like here."},
    ]
    asked = chat(message("user", content), media=(Media("image", bytes(32), b"seven"),))
    shop.ask(asked, ANSWER)
    again = chat(*asked.messages[1:], *ASKED_AGAIN.messages[2:], media=(Media("image", b"\x01" * 32, b"eight"),))
    return shop.explain(shop.ask(again)), {"code": MissCode.MEDIA, "message": 1, "role": "user"}


def changed_settings() -> tuple[Explained, dict[str, Any]]:
    shop = Shop()
    shop.ask(structs.replace(ASKED, effort="low"), ANSWER)
    return shop.explain(shop.ask(structs.replace(ASKED_AGAIN, effort="high"))), {"code": MissCode.SETTINGS}


def evicted() -> tuple[Explained, dict[str, Any]]:
    scale = Shop()
    scale.ask(ASKED, ANSWER)
    shop = Shop(budget=scale.cache.nbytes * 3 // 2)
    first = shop.ask(ASKED, ANSWER)
    intruder = shop.ask("A text of other people. " * 8)
    assert first == 1
    return shop.explain(shop.ask(ASKED_AGAIN)), {"code": MissCode.EVICTED, "by": intruder}


def shrunk_memory() -> tuple[Explained, dict[str, Any]]:
    shop = Shop()
    shop.ask(ASKED, ANSWER)
    shop.cache.resize(1000)
    shop.cache.resize(PLENTY)
    return shop.explain(shop.ask(ASKED_AGAIN)), {"code": MissCode.MEMORY, "by": 0}


def too_large() -> tuple[Explained, dict[str, Any]]:
    scale = Shop()
    scale.ask(ASKED, ANSWER)
    shop = Shop(budget=scale.cache.nbytes // 2)
    first = shop.ask(ASKED, ANSWER)
    return shop.explain(shop.ask(ASKED_AGAIN)), {"code": MissCode.TOO_LARGE, "by": first}


def no_checkpoint() -> tuple[Explained, dict[str, Any]]:
    shop = Shop(kind="recurrent")
    shop.ask(ASKED, ANSWER, marks=[len(SYSTEM)])
    question = message("user", QUESTION[:40] + " And is there one for children, with three wheels?")
    shop_explained = shop.explain(shop.ask(chat(question)))
    return shop_explained, {"code": MissCode.CHECKPOINT, "at": len(SYSTEM)}


def another_key() -> tuple[Explained, dict[str, Any]]:
    shop = Shop()
    first = shop.ask(ASKED, ANSWER, salt="alice")
    return shop.explain(shop.ask(ASKED_AGAIN, salt="bob")), {"code": MissCode.SALT, "by": first}


def not_stored() -> tuple[Explained, dict[str, Any]]:
    shop = Shop()
    first = shop.ask(ASKED, ANSWER, is_stored=False)
    return shop.explain(shop.ask(ASKED_AGAIN)), {"code": MissCode.NOT_STORED, "by": first}


def scored() -> tuple[Explained, dict[str, Any]]:
    shop = Shop()
    shop.ask(ASKED, ANSWER)
    return shop.explain(shop.ask(ASKED_AGAIN, is_scored=True)), {"code": MissCode.SCORED}


def new_conversation() -> tuple[Explained, dict[str, Any]]:
    shop = Shop()
    shop.ask(ASKED, ANSWER)
    new = chat(message("user", "Where is the shop, and when do you open on a Sunday?"))
    return shop.explain(shop.ask(new)), {"code": MissCode.NEW}


def first_prompt() -> tuple[Explained, dict[str, Any]]:
    shop = Shop()
    return shop.explain(shop.ask(ASKED)), {"code": MissCode.NEW, "at": 0, "tokens": len(plain(ASKED)) - 1}


CASES = [
    changed_system, moved_date, moved_date_of_the_template, reordered_tools, changed_tools, dropped_thoughts,
    unsent_thoughts, edited_message, changed_image, changed_settings, evicted, shrunk_memory, too_large, no_checkpoint,
    another_key, not_stored, scored, new_conversation, first_prompt,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_miss_is_named_by_its_cause(case: Callable[[], tuple[Explained, dict[str, Any]]]) -> None:
    explained, facts = case()
    cause = only(explained)
    assert {name: getattr(cause, name) for name in facts} == facts
    assert cause.tokens > 0


def test_the_page_s_table_of_causes_is_shown_here_and_the_page_has_every_code() -> None:
    page = (Path(__file__).parents[3] / "docs" / "slow-requests.md").read_text()
    table = page.partition("## Ten usual causes")[2].partition("Rarer causes")[0]
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) == 10
    # A model that was loaded again is shown on a real daemon (tests/integration/test_why.py).
    shown = {facts["code"] for _, facts in (case() for case in CASES)} | {"reloaded"}
    assert {code for codes in rows for code in codes} <= shown
    assert [code for code in MissCode if f"`{code}`" not in page] == []


def test_the_first_token_that_differs_and_its_text_are_told() -> None:
    shop = Shop()
    first = shop.ask(ASKED, ANSWER)
    edited = shop.ask(chat(message("user", QUESTION.replace("basket", "dynamo")), *ASKED_AGAIN.messages[2:]))
    explained = shop.explain(edited)
    cause = only(explained)
    assert plain(ASKED)[cause.at :].startswith("basket")
    assert explained.reused == cause.at == explained.common
    assert cause.tokens == len(plain(ASKED) + ANSWER) - cause.at
    assert "basket" in cause.old
    assert "dynamo" in cause.new
    assert explained.other == first


def test_texts_are_hashes_where_keys_differ() -> None:
    explained = structs.replace(edited_message()[0])
    assert "basket" in only(explained).old
    shop = Shop()
    shop.ask(ASKED, ANSWER)
    edited = shop.ask(chat(message("user", QUESTION.replace("basket", "dynamo")), *ASKED_AGAIN.messages[2:]))
    hashed = only(shop.explain(edited, shows_text=False))
    assert hashed.old.startswith("#")
    assert len(hashed.old) == len(hashed.new) == 13


def test_a_request_of_another_salt_is_not_named_to_a_client() -> None:
    shop = Shop()
    shop.ask(ASKED, ANSWER, salt="alice")
    explained = shop.explain(shop.ask(ASKED_AGAIN, salt="bob"), crosses_salts=False)
    assert (explained.other, only(explained).code) == (0, MissCode.NEW)


def test_a_named_request_is_compared_even_if_another_is_more_similar() -> None:
    shop = Shop()
    named = shop.ask(chat(message("user", "Where is the shop?"), system="You sell cars."), "Here.")
    shop.ask(ASKED, ANSWER)
    again = shop.ask(ASKED_AGAIN)
    assert shop.explain(again).causes == ()
    explained = shop.explain(again, named)
    assert explained.other == named
    assert [cause.code for cause in explained.causes] == [MissCode.SYSTEM, MissCode.MESSAGE]


def test_a_file_that_is_gone_is_the_cause(tmp_path: Path) -> None:
    disk = CacheDisk(tmp_path, "model", PLENTY)
    shop = Shop(disk=disk)
    shop.ask(ASKED, ANSWER)
    text = [ord(character) for character in plain(ASKED) + ANSWER]
    shop.cache.persist(silent_row(1, text, 2).tokens(), {len(text)})
    shop.cache.flush()
    folder.written(disk)
    shop.cache.clear()
    shutil.rmtree(tmp_path)
    cause = only(shop.explain(shop.ask(ASKED_AGAIN)))
    assert (cause.code, cause.at) == (MissCode.DISK, 0)
    shop.cache.close()


def test_what_came_from_disk_is_told(tmp_path: Path) -> None:
    disk = CacheDisk(tmp_path, "model", PLENTY)
    shop = Shop(disk=disk)
    shop.ask(ASKED, ANSWER)
    text = [ord(character) for character in plain(ASKED) + ANSWER]
    shop.cache.persist(silent_row(1, text, 2).tokens(), {len(text)})
    shop.cache.flush()
    folder.written(disk)
    shop.cache.clear()
    explained = shop.explain(shop.ask(ASKED_AGAIN))
    assert explained.restored == explained.reused == len(text)
    assert explained.causes == ()
    shop.cache.close()


def test_a_request_that_still_waits_explains_nothing_and_is_no_cause() -> None:
    shop = Shop()
    text = plain(ASKED)
    shop.recent.add(silent_row(50, [ord(character) for character in text], 2), ASKED, len(text))
    assert shop.explain(50) == Explained(99)
    assert only(shop.explain(shop.ask(ASKED))).code == MissCode.NEW


def test_nothing_is_kept_without_a_cache() -> None:
    shop = Shop(budget=0)
    shop.recent.is_on = lambda: shop.cache.is_on
    rid = shop.ask(ASKED, ANSWER)
    assert shop.recent.nbytes == 0
    assert only(shop.explain(rid)).code == MissCode.OFF


def test_recent_prompts_stay_within_their_limits() -> None:
    recent = RecentPrompts(max_prompts=3, max_bytes=10_000)
    for rid in range(1, 6):
        recent.add(silent_row(rid, [1] * 100, 2), TextPrompt("x"), 100)
    assert [each.rid for each in recent.until(5)] == [3, 4, 5]
    assert recent.until(2) == []
    recent.add(silent_row(6, [1] * 2000, 2), TextPrompt("x"), 100)
    assert recent.until(6)[-1].rid == 6
    assert recent.nbytes <= 10_000
    recent.until(6)[-1].output.extend([1] * 200)
    assert recent.nbytes > 10_000
    recent.add(silent_row(7, [1] * 10, 2), TextPrompt("x"), 10)
    assert [each.rid for each in recent.until(7)] == [7]
    recent.add(silent_row(8, [1] * 4000, 2), TextPrompt("x"), 100)
    assert recent.nbytes == 0
    assert recent.until(8) == []

"""Why a request was slow: asked of a real daemon on the embedded model, after each kind of miss."""

from typing import Any

import msgspec

from gateway.control_types import RequestWhy
from tests.support.ctl import ctl
from tests.support.daemon import DaemonProcess

SYSTEM = "You are a careful assistant of the test of reasons. You answer in a few words, and you never guess a number. "
QUESTION = "What is the capital of France, and how many letters does its name have?"


def ask(
    daemon: DaemonProcess, name: str, messages: list[dict[str, str]], model: str = "demo", **fields: Any
) -> dict[str, Any]:
    body = {"model": model, "messages": messages, "max_tokens": 8, **fields}
    answer = daemon.client.post("/v1/chat/completions", json=body, headers={"x-request-id": name})
    assert answer.status_code == 200, answer.text
    return answer.json()


def why(daemon: DaemonProcess, name: str) -> RequestWhy:
    shown = ctl(daemon.home, "why", name, "--json")
    assert shown.returncode == 0, shown.stderr
    return msgspec.json.decode(shown.stdout, type=RequestWhy)


def conversation(system: str, *texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant") * len(texts)
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return [{"role": "system", "content": system}, *turns]


def test_a_moved_date_is_named_with_its_tokens_and_the_request_before(demo_daemon: DaemonProcess) -> None:
    first = ask(demo_daemon, "why-date-1", conversation(f"{SYSTEM} It is 2026-02-28 10:11.", QUESTION))
    text = first["choices"][0]["message"]["content"]
    again = conversation(f"{SYSTEM} It is 2026-02-28 10:12.", QUESTION, text, "And of Spain?")
    usage = ask(demo_daemon, "why-date-2", again)["usage"]
    found = why(demo_daemon, "why-date-2")
    assert (found.model, found.key, found.compared) == ("demo", None, "why-date-1")
    assert found.timing.prompt_tokens == usage["prompt_tokens"]
    assert found.timing.cached_tokens == usage["prompt_tokens_details"]["cached_tokens"]
    (cause,) = [cause for cause in found.causes if cause.code == "date_changed"]
    assert "message 0 (system)" in cause.text
    assert "It is 2026-02-28 10:12." in cause.text
    assert 0 < cause.tokens < found.timing.prompt_tokens
    assert found.causes == sorted(found.causes, key=lambda cause: -cause.ms)
    assert found.timing.total_ms >= found.timing.prefill_ms + found.timing.decode_ms


def test_an_answer_s_id_finds_its_request_and_the_verb_prints_sentences(demo_daemon: DaemonProcess) -> None:
    answer = ask(
        demo_daemon, "why-words", conversation(f"{SYSTEM} Words.", "List the numbers from 1 to 80."), max_tokens=200
    )
    shown = ctl(demo_daemon.home, "why", answer["id"])
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("why-words for demo took ")
    assert "The answer was generated: " in shown.stdout


def test_an_unknown_request_is_a_404(demo_daemon: DaemonProcess) -> None:
    shown = ctl(demo_daemon.home, "why", "nobody")
    assert shown.returncode == 1
    assert "There is no request 'nobody'" in shown.stderr


def test_nothing_of_a_prompt_is_in_the_daemon_s_log(demo_daemon: DaemonProcess) -> None:
    ask(demo_daemon, "why-quiet-1", conversation(f"{SYSTEM} Quixotic.", QUESTION))
    ask(demo_daemon, "why-quiet-2", conversation(f"{SYSTEM} Zygotic.", QUESTION, "Paris.", "And of Spain?"))
    assert "otic" in str(why(demo_daemon, "why-quiet-2").causes)
    for file in demo_daemon.home.rglob("*.log*"):
        assert "otic" not in file.read_text(errors="replace")


def test_a_model_that_was_loaded_again_has_an_empty_cache(demo_daemon: DaemonProcess) -> None:
    asked = conversation("", QUESTION)[1:]
    ask(demo_daemon, "why-cold-1", asked, "small")
    assert ctl(demo_daemon.home, "unload", "small").returncode == 0
    ask(demo_daemon, "why-cold-2", asked, "small")
    found = why(demo_daemon, "why-cold-2")
    codes = {cause.code: cause for cause in found.causes}
    assert codes.keys() >= {"load", "reloaded"}
    assert "was loaded again after request why-cold-1" in codes["reloaded"].text

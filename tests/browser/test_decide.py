"""The page for decisions, on the demo model: it shows what the API answers."""

from tests.browser.conftest import Visiting
from tests.browser.test_accessibility import AXE, findings
from tests.support.daemon import DaemonProcess

TEXT = "I was charged twice, please refund me."


def test_questions_get_the_answers_of_the_api(demo: DaemonProcess, visiting: Visiting) -> None:
    questions = [
        {"type": "predicate", "instructions": "Does the customer want money back?"},
        {"type": "choice", "instructions": "Which team?", "choices": [{"value": "billing"}, {"value": "sales"}]},
    ]
    body = {"model": "demo", "input": TEXT, "questions": questions}
    decided = demo.client.post("/v1/decisions", json=body).json()["answers"]

    visit = visiting(demo)
    page = visit.open("decide")
    send = page.get_by_role("button", name="Decide", exact=True)
    page.get_by_label("Text", exact=True).fill(TEXT)
    assert send.is_disabled(), "there is no question"
    page.get_by_label("Question", exact=True).fill("Does the customer want money back?")
    page.get_by_role("button", name="Add a question").click()
    second = page.get_by_role("group", name="Question 2")
    second.get_by_label("Kind").select_option("choice")
    second.get_by_label("Question", exact=True).fill("Which team?")
    second.get_by_label("Options, one a line").fill("billing\n")
    assert send.is_disabled(), "a choice has two options"
    second.get_by_label("Options, one a line").fill("billing\n sales \n")
    send.click()
    page.locator(".outcome").nth(1).wait_for()

    predicate, choice = (page.locator(".outcome").nth(at).inner_text() for at in (0, 1))
    assert f"{decided[0]['probability'] * 100:.1f} %" in predicate
    assert page.locator(".outcome strong").nth(1).inner_text() == decided[1]["choice"]
    for each in decided[1]["probabilities"]:
        assert f"{each['probability'] * 100:.1f} %" in choice
    assert not AXE.exists() or findings(visit) == []


def test_a_refusal_of_the_server_is_a_sentence(demo: DaemonProcess, visiting: Visiting) -> None:
    page = visiting(demo, expected=("status of 400",)).open("decide")
    page.get_by_label("Text", exact=True).fill("word " * 60_000)
    page.get_by_label("Question", exact=True).fill("Is it long?")
    page.get_by_role("button", name="Decide", exact=True).click()
    page.locator("main .bad", has_text="context").wait_for()

"""Decisions over HTTP from real workers: OpenAI's SDK, TypeSafe's dialect, the verb, and clients that leave."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator
from typing import Any, Final

import openai
import pytest
from openai.types import Decision

from gateway.config.settings import ModelConfig
from gateway.workers.supervisor.spawn import default_command
from tests.gateway.harness import Gateway, running, until
from tests.support.ctl import ctl
from tests.support.daemon import DaemonProcess
from tests.support.models import build
from tests.support.pool import short_home
from tests.support.published import check_answer
from tests.support.scale import scaled

pytestmark = pytest.mark.anyio

INPUT: Final = "I was charged twice for my invoice, and the refund has not come. " * 12
PREDICATE: Final = {"type": "predicate", "name": "p", "instructions": "Does the customer want money back?"}
CHOICE: Final = {
    "type": "choice",
    "name": "c",
    "instructions": "Which team is this for?",
    "choices": [{"value": "Billing", "description": "invoices"}, {"value": "Sales"}, {"value": False}],
}
SCORE: Final = {
    "type": "score",
    "name": "s",
    "instructions": [{"type": "input_json", "data": {"task": "How angry?"}}],
    "levels": [{"label": "calm"}, {"label": "angry"}, {"label": "furious"}],
}
QUESTIONS: Final[list[dict[str, Any]]] = [PREDICATE, CHOICE, SCORE]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    folder = build("qwen3", tmp_path_factory.mktemp("models") / "text")
    text = ModelConfig(name="text", path=str(folder), aliases=("default",))
    small = ModelConfig(name="small", path=str(folder), context=512)
    with short_home() as home:
        async with running(home, models=[text, small], command=default_command) as made:
            yield made


@pytest.fixture(scope="module")
async def client(gateway: Gateway) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as made:
        yield made


async def decide(client: openai.AsyncOpenAI, questions: list[Any], text: Any = INPUT, **fields: Any) -> Decision:
    return await client.decisions.create(model="text", input=text, questions=questions, **fields)


async def test_openais_sdk_gets_answers_in_the_order_of_its_questions(client: openai.AsyncOpenAI) -> None:
    decision = await decide(client, QUESTIONS, prompt_cache_key="sdk", safety_identifier="u")

    yes, choice, score = decision.answers
    assert (yes.type, choice.type, score.type) == ("predicate", "choice", "score")
    assert [answer.name for answer in decision.answers] == ["p", "c", "s"]
    assert 0 <= yes.probability <= 1
    assert [each.value for each in choice.probabilities] == ["Billing", "Sales", False]
    assert sum(each.probability for each in choice.probabilities) == pytest.approx(1)
    assert choice.choice == max(choice.probabilities, key=lambda each: each.probability).value
    assert [(each.value, each.label) for each in score.probabilities] == [(0, "calm"), (1, "angry"), (2, "furious")]
    assert score.score == pytest.approx(sum(each.value * each.probability for each in score.probabilities))
    assert decision.model == "text"
    usage = decision.usage
    assert (usage.output_tokens, usage.total_tokens) == (0, usage.input_tokens)
    assert usage.input_tokens_details.cached_tokens == 0


async def test_the_input_is_computed_once_for_all_questions_and_then_cached(client: openai.AsyncOpenAI) -> None:
    one = (await decide(client, [PREDICATE], prompt_cache_key="once")).usage
    again = (await decide(client, [PREDICATE], prompt_cache_key="once")).usage
    three = (await decide(client, [PREDICATE] * 3, prompt_cache_key="thrice")).usage

    assert one.input_tokens_details.cached_tokens == 0
    assert again.input_tokens_details.cached_tokens > one.input_tokens // 2
    # Two more questions add their own tokens, not those of the input.
    assert three.input_tokens_details.cached_tokens == 0
    assert three.input_tokens - one.input_tokens < one.input_tokens // 2
    apart = {"prompt_cache_key": "once", "prompt_cache_options": {"mode": "explicit"}}
    assert (await decide(client, [PREDICATE], **apart)).usage.input_tokens_details.cached_tokens == 0


async def test_no_answer_depends_on_names_order_or_other_questions(client: openai.AsyncOpenAI) -> None:
    many = [
        {"type": "choice", "instructions": f"Which is number {at}?", "choices": [{"value": f"{n}"} for n in range(at)]}
        for at in (2, 30)
    ]
    asked = [*QUESTIONS, *many]
    alone = [(await decide(client, [each], prompt_cache_key=f"alone{at}")).answers[0] for at, each in enumerate(asked)]
    order = list(range(len(asked)))
    random.Random(5).shuffle(order)
    renamed = [asked[at] | {"name": f"renamed {at}"} for at in order]

    # Beside a chat that generates, so that passes share the engine.
    chat = client.chat.completions.create(
        model="text", max_tokens=200, messages=[{"role": "user", "content": "Count to 50."}]
    )
    beside, _ = await asyncio.gather(decide(client, renamed, prompt_cache_key="beside"), chat)
    cached = await decide(client, renamed, prompt_cache_key="beside")

    for answers in (beside.answers, cached.answers):
        found = {
            at: answer.model_copy(update={"name": alone[at].name}) for at, answer in zip(order, answers, strict=True)
        }
        assert [found[at] for at in range(len(asked))] == alone
    # Options may come in any order, too.
    turned = CHOICE | {"choices": list(reversed(CHOICE["choices"]))}
    (answer,) = (await decide(client, [turned], prompt_cache_key="turned")).answers
    assert {each.value: each.probability for each in answer.probabilities} == {  # pyright: ignore[reportAttributeAccessIssue]
        each.value: each.probability
        for each in alone[1].probabilities  # pyright: ignore[reportAttributeAccessIssue]
    }


async def test_most_questions_and_most_options(client: openai.AsyncOpenAI) -> None:
    count = scaled(400, 40)
    widest = {"type": "choice", "instructions": "Which?", "choices": [{"value": f"queue {at}"} for at in range(255)]}
    short = {"type": "predicate", "instructions": "So?"}
    first, *others = (await decide(client, [widest, *[short] * count][:400], "hi")).answers
    assert first.type == "choice"
    assert sum(each.probability for each in first.probabilities) == pytest.approx(1)
    assert len({answer.probability for answer in others if answer.type == "predicate"}) == 1


async def test_calls_and_json_are_read(client: openai.AsyncOpenAI) -> None:
    items = [
        {"role": "system", "content": "You judge."},
        {"role": "user", "content": [{"type": "input_json", "data": {"order": 4471}}]},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": '{"id": 4471}'},
        {"type": "function_call_output", "call_id": "a", "output": "paid twice"},
    ]
    with_call = await decide(client, [PREDICATE], items)
    without = await decide(client, [PREDICATE], items[:2])
    assert with_call.usage.input_tokens > without.usage.input_tokens
    assert with_call.answers != without.answers


async def test_a_question_that_does_not_fit_is_refused_alone(client: openai.AsyncOpenAI, gateway: Gateway) -> None:
    long = PREDICATE | {"name": "long", "instructions": "word " * 400}
    decision = await client.decisions.create(model="small", input="hi", questions=[PREDICATE, long])  # pyright: ignore
    assert [answer.type for answer in decision.answers] == ["predicate", "refusal"]
    assert decision.answers[1].name == "long"
    with pytest.raises(openai.BadRequestError) as refused:
        await client.decisions.create(model="small", input="word " * 400, questions=[PREDICATE])  # pyright: ignore
    assert refused.value.code == "context_length_exceeded"

    body = {"model": "small", "state": "hi", "questions": {"q": {"type": "noul", "instructions": "word " * 400}}}
    reply = await gateway.client.post("/v1/systemone", json=body)
    assert reply.status_code == 422
    assert reply.json()["detail"][0]["loc"] == ["body", "questions", "q"]


async def test_errors_name_the_place(client: openai.AsyncOpenAI, gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await decide(client, [{"type": "choice", "instructions": "x", "choices": [{"value": "a"}]}])
    assert refused.value.param == "questions[0].choices"
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    with pytest.raises(openai.BadRequestError) as refused:
        await decide(client, [PREDICATE], [{"role": "user", "content": [image]}])
    assert refused.value.code == "unsupported_modality"
    with pytest.raises(openai.NotFoundError):
        await client.decisions.create(model="none", input="x", questions=[PREDICATE])  # pyright: ignore
    noul = {"type": "noul", "instructions": "x"}
    for body, status in (
        ({"model": "text", "questions": {"q": noul}}, 422),
        ({"model": "text", "state": "x", "questions": {"q": {**noul, "type": "box"}}}, 422),
        ({"model": "none", "state": "x", "questions": {"q": noul}}, 404),
    ):
        reply = await gateway.client.post("/v1/systemone", json=body)
        assert reply.status_code == status
        check_answer("POST", "/v1/systemone", status, reply.json())


async def test_systemone_answers_by_id_as_decisions_do(gateway: Gateway) -> None:
    questions = {
        "a b": {"type": "noul", "instructions": "Is it so?"},
        "질문": {"type": "choice", "criteria": {"환불": None, "other": {"any": 1}}},
        "s": {"type": "score", "instructions": ["How", "much?"], "criteria": ["low", {"label": "high"}]},
    }
    # The name of TypeSafe's model stands for the default model.
    body = {"model": "jev-latest", "state": {"x": [1]}, "questions": questions}
    reply = await gateway.client.post("/v1/systemone", json=body)
    assert reply.status_code == 200
    found = reply.json()
    check_answer("POST", "/v1/systemone", 200, found)
    assert found["model"] == "text"
    assert list(found["answers"]) == list(questions)
    assert found["answers"]["s"]["legend"] == {"0": "low", "1": {"label": "high"}}
    assert set(found["answers"]["질문"]["probabilities"]) == {"환불", "other"}
    same = {"model": "text", "input": '{"x":[1]}', "questions": [{"type": "predicate", "instructions": "Is it so?"}]}
    reply = await gateway.client.post("/v1/decisions", json=same)
    check_answer("POST", "/v1/decisions", 200, reply.json())
    assert reply.json()["answers"][0]["probability"] == found["answers"]["a b"]["noul"]


async def test_a_client_that_leaves_amid_the_questions_leaves_nothing(gateway: Gateway) -> None:
    requests = gateway.app.services.requests
    body = json.dumps({"model": "text", "input": INPUT, "questions": QUESTIONS * 133}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"POST /v1/decisions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    await until(lambda: [view.state for view in requests.views()] == ["prefill"] and gateway.link.in_flight == 1)
    writer.close()
    await until(lambda: not requests.views())
    assert gateway.link.in_flight == 0
    assert gateway.app.services.admission.inside("text") == 0


async def test_the_demo_model_decides(demo_daemon: DaemonProcess) -> None:
    yes = ctl(demo_daemon.home, "decide", "demo", "Is it so?", "--input", "It is.", "--json")
    assert json.loads(yes.stdout)["type"] == "predicate"
    choice = ctl(demo_daemon.home, "decide", "demo", "Which?", "--option", "a", "--option", "b", stdin="It is a.")
    assert choice.returncode == 0
    assert "confidence" in choice.stdout.splitlines()[0]
    score = ctl(demo_daemon.home, "decide", "demo", "How much?", "--level", "low", "--level", "high", stdin="much")
    assert len(score.stdout.splitlines()) == 3
    both = ctl(demo_daemon.home, "decide", "demo", "x", "--level", "low", "--option", "a", stdin="x")
    assert both.returncode != 0

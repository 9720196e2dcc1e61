"""Files and batches with the official clients, unmodified, and the embedded model."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import anthropic
import openai
import pytest
from openai.types import Batch
from openai.types.chat import ChatCompletionMessageParam

from tests.support.ctl import ctl
from tests.support.daemon import DaemonProcess
from tests.support.scale import patient

pytestmark = pytest.mark.anyio

DEADLINE_S = 60
ENDED = ("completed", "failed", "expired", "cancelled")
# So many tokens and lines that a batch of them runs while a test does something else.
LONG = 100
LINES = 40
RUNNING = "mlxd_num_requests_running"
PREEMPTIONS = "mlxd_num_preemptions_total"
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
async def client(demo_daemon: DaemonProcess) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(base_url=f"{demo_daemon.url}/v1", api_key="x", max_retries=0) as made:
        yield made


@pytest.fixture
async def claude(demo_daemon: DaemonProcess) -> AsyncGenerator[anthropic.AsyncAnthropic, None]:
    async with anthropic.AsyncAnthropic(base_url=demo_daemon.url, api_key="x", max_retries=0) as made:
        yield made


def chat(question: str, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": question}], "max_tokens": 8} | fields


def line(custom_id: str, body: dict[str, Any], url: str = "/v1/chat/completions", **fields: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body} | fields)


async def begun(client: openai.AsyncOpenAI, lines: Sequence[str], endpoint: Any = "/v1/chat/completions") -> Batch:
    file = await client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    async def has_ended() -> bool:
        return (await client.batches.retrieve(batch.id)).status in ENDED

    await until(has_ended)
    return await client.batches.retrieve(batch.id)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll, with a deadline."""
    async with asyncio.timeout(patient(DEADLINE_S)):
        while not await condition():  # noqa: ASYNC110 - it happens in another process
            await asyncio.sleep(0.02)


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """The lines of a file by their ids, each of which occurs once."""
    if file_id is None:
        return {}
    lines = [json.loads(each) for each in (await client.files.content(file_id)).text.splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines)
    return found


def text_of(result: Any) -> str:
    return result["response"]["body"]["choices"][0]["message"]["content"]


# -- OpenAI ----------------------------------------------------------------------------------------------------------


async def test_a_batch_from_its_file_to_its_results(client: openai.AsyncOpenAI) -> None:
    lines = [line(f"r{at}", chat(f"Count from {at} to 9.", max_tokens=40)) for at in range(3, 6)]
    file = await client.files.create(file=("mine.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"job": "7"}
    )
    assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"job": "7"})
    assert batch.expires_at == batch.created_at + 86400
    batch = await ended(client, batch)

    assert (batch.status, batch.model, batch.errors, batch.error_file_id) == ("completed", "demo", None, None)
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 3, "completed": 3, "failed": 0}
    results = await lines_of(client, batch.output_file_id)
    assert {name: text_of(each) for name, each in results.items()} == {
        "r3": "3, 4, 5, 6, 7, 8, 9",
        "r4": "4, 5, 6, 7, 8, 9",
        "r5": "5, 6, 7, 8, 9",
    }
    assert results["r3"]["response"]["status_code"] == 200
    assert results["r3"]["error"] is None
    usages = [each["response"]["body"]["usage"] for each in results.values()]
    assert batch.usage is not None
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert batch.usage.total_tokens == sum(usage["total_tokens"] for usage in usages)
    assert batch.id in [each.id async for each in client.batches.list(limit=1)]


async def test_files_are_listed_described_read_and_deleted(client: openai.AsyncOpenAI) -> None:
    content = b"anything\n" * 100_000
    file = await client.files.create(
        file=("a.jsonl", content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (file.bytes, file.filename, file.purpose, file.status) == (900_000, "a.jsonl", "batch", "processed")
    assert file.expires_at == file.created_at + 3600
    assert await client.files.retrieve(file.id) == file
    assert file in [each async for each in client.files.list(purpose="batch")]
    assert file not in [each async for each in client.files.list(purpose="batch_output")]
    assert (await client.files.content(file.id)).content == content

    assert (await client.files.delete(file.id)).deleted
    for asking in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            await asking(file.id)


async def test_a_line_that_fails_is_in_the_error_file_with_the_answer_to_its_request(
    client: openai.AsyncOpenAI, demo_daemon: DaemonProcess
) -> None:
    bodies = {
        "unknown": chat("hi", model="nope"),
        "hot": chat("hi", temperature=9),
        "long": chat("word " * 500, model="small"),
        "streamed": chat("hi", stream=True),
    }
    batch = await ended(
        client, await begun(client, [line("good", chat("hi")), *(line(*each) for each in bodies.items())])
    )

    assert batch.status == "completed"
    assert set(await lines_of(client, batch.output_file_id)) == {"good"}
    errors = await lines_of(client, batch.error_file_id)
    streamed = errors.pop("streamed")["response"]
    assert (streamed["status_code"], streamed["body"]["error"]["param"]) == (400, "stream")
    asked = {name: demo_daemon.client.post("/v1/chat/completions", json=bodies[name]) for name in errors}
    assert {name: (each["response"]["status_code"], each["response"]["body"]) for name, each in errors.items()} == {
        name: (answer.status_code, answer.json()) for name, answer in asked.items()
    }
    assert set(errors) == {"unknown", "hot", "long"}


@pytest.mark.parametrize(
    ("lines", "problems"),
    [
        ([""], [("empty_file", None)]),
        (["{", line("a", {})], [("invalid_json_line", 1)]),
        ([line("a", {}), line("a", {})], [("duplicate_custom_id", 2)]),
        ([line("", {})], [("invalid_custom_id", 1)]),
        ([line("a", {}, "/v1/embeddings")], [("mismatched_url", 1)]),
        (
            [line("a", {}, method="GET"), '{"custom_id": "b"}'],
            [("invalid_method", 1), ("missing_required_parameter", 2)],
        ),
    ],
)
async def test_a_batch_of_an_invalid_file_fails_with_the_lines(
    client: openai.AsyncOpenAI, lines: list[str], problems: list[tuple[str, int | None]]
) -> None:
    batch = await ended(client, await begun(client, lines))

    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.errors is not None
    assert [(each.code, each.line) for each in batch.errors.data or ()] == problems


@pytest.mark.parametrize(
    ("endpoint", "body", "expected"),
    [
        ("/v1/completions", {"prompt": "one two", "max_tokens": 4}, "text_completion"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}, "response"),
    ],
)
async def test_other_endpoints(client: openai.AsyncOpenAI, endpoint: str, body: dict[str, Any], expected: str) -> None:
    batch = await ended(client, await begun(client, [line("a", {"model": "demo"} | body, endpoint)], endpoint))

    (result,) = (await lines_of(client, batch.output_file_id)).values()
    assert result["response"]["body"]["object"] == expected
    assert batch.usage is not None
    assert batch.usage.output_tokens > 0


@pytest.mark.parametrize(
    "fields",
    [
        {"input_file_id": "file-none"},
        {"endpoint": "/v1/images/generations"},
        {"completion_window": "1h"},
        {"metadata": {"k": "v" * 513}},
        {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
    ],
)
async def test_what_is_not_served_is_refused(client: openai.AsyncOpenAI, fields: dict[str, Any]) -> None:
    file = await client.files.create(file=b"x", purpose="batch")
    good: dict[str, Any] = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as refused:
        await client.batches.create(**good | fields)

    assert next(iter(fields)).split("_")[0] in str(refused.value) or refused.value.status_code == 404


async def test_only_files_for_batches_are_taken(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await client.files.create(file=b"x", purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        await client.files.create(file=b"x", purpose="batch", extra_body={"expires_after": {"seconds": 3600}})


async def test_a_cancelled_batch_has_each_request_once(client: openai.AsyncOpenAI) -> None:
    names = [f"r{at}" for at in range(LINES)]
    batch = await begun(client, [line(name, chat("hi", max_tokens=LONG, ignore_eos=True)) for name in names])

    async def has_begun() -> bool:
        return (await client.batches.retrieve(batch.id)).status == "in_progress"

    await until(has_begun)
    assert (await client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
    batch = await ended(client, batch)

    assert batch.status == "cancelled"
    assert batch.cancelled_at is not None
    done, errors = [await lines_of(client, each) for each in (batch.output_file_id, batch.error_file_id)]
    assert Counter([*done, *errors]) == Counter(names)
    assert {each["error"]["code"] for each in errors.values()} == {"batch_cancelled"}
    assert batch.request_counts is not None
    assert batch.request_counts.total == batch.request_counts.completed + batch.request_counts.failed == LINES
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        await client.batches.cancel(batch.id)


async def test_a_request_amid_a_batch_is_served_at_once_and_the_batch_ends_as_if_undisturbed(
    client: openai.AsyncOpenAI, demo_daemon: DaemonProcess
) -> None:
    bodies = [
        chat(f"Tell me of {at}.", max_tokens=LONG, ignore_eos=True, temperature=0.9 * (at % 2), seed=at)
        for at in range(3)
    ]
    answers = [demo_daemon.client.post("/v1/chat/completions", json=body).json() for body in bodies]
    alone = {f"r{at}": answer["choices"][0]["message"]["content"] for at, answer in enumerate(answers)}
    before, results = counted(demo_daemon, PREEMPTIONS), dict[str, Any]()
    # If this process is late, the batch has ended before the request comes, and there is another.
    while counted(demo_daemon, PREEMPTIONS) == before:
        batch = await begun(client, [line(f"r{at}", body) for at, body in enumerate(bodies)])

        async def runs(batch: Batch = batch) -> bool:
            return counted(demo_daemon, RUNNING) > 0 or (await client.batches.retrieve(batch.id)).status in ENDED

        await until(runs)
        answer = await client.chat.completions.create(model="demo", messages=QUESTION, max_tokens=8)
        assert answer.choices[0].message.content == "Paris."
        results = await lines_of(client, (await ended(client, batch)).output_file_id)

    assert {name: text_of(each) for name, each in results.items()} == alone


def counted(daemon: DaemonProcess, series: str) -> float:
    lines = daemon.client.get("/metrics").text.splitlines()
    return sum(float(each.split()[-1]) for each in lines if each.startswith(f'{series}{{model="demo"}}'))


async def test_mlxctl_shows_and_cancels_batches(client: openai.AsyncOpenAI, demo_daemon: DaemonProcess) -> None:
    batch = await begun(client, [line("a", chat("hi"))])
    await ended(client, batch)
    (listed,) = [each for each in json.loads(ctl(demo_daemon.home, "batches", "--json").stdout)["batches"]
                 if each["id"] == batch.id]  # fmt: skip
    assert (listed["state"], listed["model"], listed["total"], listed["succeeded"]) == ("completed", "demo", 1, 1)
    assert batch.id in ctl(demo_daemon.home, "batches").stdout
    assert ctl(demo_daemon.home, "batches", "cancel", batch.id).returncode == 1

    batch = await begun(client, [line(f"r{at}", chat("hi", max_tokens=LONG, ignore_eos=True)) for at in range(LINES)])
    assert ctl(demo_daemon.home, "batches", "cancel", batch.id).stdout == f"{batch.id} is being cancelled\n"
    assert (await ended(client, batch)).status == "cancelled"


# -- Anthropic -------------------------------------------------------------------------------------------------------


def message(question: str, **fields: Any) -> Any:
    return {"model": "demo", "max_tokens": 40, "messages": [{"role": "user", "content": question}]} | fields


async def results_of(claude: anthropic.AsyncAnthropic, batch_id: str) -> dict[str, Any]:
    async def has_ended() -> bool:
        return (await claude.messages.batches.retrieve(batch_id)).processing_status == "ended"

    await until(has_ended)
    return {each.custom_id: each.result async for each in await claude.messages.batches.results(batch_id)}


async def test_a_batch_of_messages_from_its_requests_to_its_results(claude: anthropic.AsyncAnthropic) -> None:
    batch = await claude.messages.batches.create(
        requests=[
            {"custom_id": "good", "params": message("What is the capital of France?")},
            {"custom_id": "unknown", "params": message("hi", model="nope")},
            {"custom_id": "streamed", "params": message("hi", stream=True)},
        ]
    )
    assert (batch.processing_status, batch.request_counts.processing, batch.results_url) == ("in_progress", 3, None)
    results = await results_of(claude, batch.id)

    assert results["good"].type == "succeeded"
    assert results["good"].message.content[0].text == "Paris."
    assert (results["unknown"].type, results["unknown"].error.error.type) == ("errored", "not_found_error")
    assert (results["streamed"].type, results["streamed"].error.error.type) == ("errored", "invalid_request_error")
    batch = await claude.messages.batches.retrieve(batch.id)
    assert (batch.request_counts.succeeded, batch.request_counts.errored, batch.request_counts.processing) == (1, 2, 0)
    assert batch.ended_at is not None
    assert batch.ended_at >= batch.created_at
    assert (await claude.messages.batches.delete(batch.id)).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.batches.results(batch.id)


async def test_a_cancelled_batch_of_messages_tells_which_were_not_run(claude: anthropic.AsyncAnthropic) -> None:
    names = [f"r{at}" for at in range(LINES)]
    batch = await claude.messages.batches.create(
        requests=[{"custom_id": name, "params": message("Count from 1 to 99.", max_tokens=LONG)} for name in names]
    )
    with pytest.raises(anthropic.BadRequestError):
        await claude.messages.batches.delete(batch.id)
    batch = await claude.messages.batches.cancel(batch.id)
    results = await results_of(claude, batch.id)

    assert batch.cancel_initiated_at is not None
    assert set(results) == set(names)
    assert "canceled" in {each.type for each in results.values()} <= {"canceled", "succeeded"}
    counts = (await claude.messages.batches.retrieve(batch.id)).request_counts
    assert counts.canceled + counts.succeeded == LINES


async def test_batches_of_messages_are_listed_in_pages_in_both_directions(claude: anthropic.AsyncAnthropic) -> None:
    made = [
        (await claude.messages.batches.create(requests=[{"custom_id": "a", "params": message("hi")}])).id
        for _ in range(3)
    ]
    listed = [each.id async for each in claude.messages.batches.list(limit=2)]
    before = await claude.messages.batches.list(before_id=made[0], limit=2)

    assert listed[:3] == made[::-1]
    assert [each.id for each in before.data] == [made[2], made[1]]
    for each in made:
        await results_of(claude, each)


@pytest.mark.parametrize("names", [[], ["a", "a"], ["with space"]])
async def test_invalid_requests_make_no_batch(claude: anthropic.AsyncAnthropic, names: list[str]) -> None:
    with pytest.raises(anthropic.BadRequestError):
        await claude.messages.batches.create(requests=[{"custom_id": name, "params": message("hi")} for name in names])


async def test_a_batch_is_found_only_in_its_own_dialect(
    client: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    batch = await begun(client, [line("a", chat("hi"))])

    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.batches.retrieve(batch.id)
    await ended(client, batch)

"""Upstreams: requests leave for them where the model's configuration and the key say so, and nothing else does."""

import asyncio
import gzip
import json
import logging
import ssl
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from msgspec.structs import replace

from gateway.access.key import Key, KeyFile
from gateway.config.settings import FallbackConfig, ModelConfig, UpstreamConfig
from gateway.request.body_memory import LARGE_BYTES
from gateway.state_dir import keys_path
from tests.gateway.harness import DEADLINE_S, Gateway, chat, events, running, until
from tests.support.certificates import Authority
from tests.support.pool import short_home, tokens
from tests.support.scale import patient

pytestmark = pytest.mark.anyio
ANSWER = {
    "id": "x",
    "choices": [{"message": {"content": "far"}}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 9},
}
NOWHERE = "http://127.0.0.1:9/v1"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@dataclass(slots=True)
class Far:
    """An endpoint of others: answers as it is told, and remembers what it was asked."""

    url: str = ""
    status: int = 200
    kind: str = ""
    # Lines of its head, beside its own.
    head: Sequence[str] = ()
    # Of a stream: pieces, after which it ends, breaks off or stalls.
    pieces: list[bytes] | None = None
    # Of an answer that is no stream.
    answer: Any = field(default_factory=lambda: ANSWER)
    ending: str = "end"
    asked: list[tuple[str, dict[str, str], Any]] = field(default_factory=list[tuple[str, dict[str, str], Any]])
    # How many stalled answers the gateway has closed.
    closed: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.asked.append((head[0].split()[1], headers, body))
        if self.ending == "silent":
            await gone(reader)
            writer.close()
            return
        kind = self.kind or ("application/json" if self.pieces is None else "text/event-stream")
        told = (
            f"HTTP/1.1 {self.status} X",
            f"content-type: {kind}",
            "transfer-encoding: chunked",
            "connection: close",
            "x-request-id: far",
            *self.head,
        )
        writer.write("\r\n".join((*told, "", "")).encode())
        answer = self.answer if isinstance(self.answer, bytes) else json.dumps(self.answer).encode()
        for piece in self.pieces if self.pieces is not None else [answer]:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        left = asyncio.ensure_future(gone(reader))
        if self.ending == "stalled":
            await left
            self.closed += 1
        while self.ending == "dripping" and not left.done():
            writer.write(b"1\r\n \r\n")
            await asyncio.wait([left], timeout=0.05)
        if self.ending == "end":
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        writer.close()


async def gone(reader: asyncio.StreamReader) -> None:
    """Until the gateway has closed its connection, which a reset does as well."""
    with suppress(ConnectionError):
        await reader.read()


@asynccontextmanager
async def far(tls: ssl.SSLContext | None = None, **how: Any) -> AsyncGenerator[Far]:
    endpoint = Far(**how)
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0, ssl=tls)
    endpoint.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield endpoint
    finally:
        server.close()


def upstream(url: str, name: str = "cloud", **fields: Any) -> UpstreamConfig:
    return UpstreamConfig(name=name, url=url, models={"far": "vendor/far-1", "m": "vendor/m"}, **fields)


@asynccontextmanager
async def door(
    *upstreams: UpstreamConfig, broken: bool = True, **fallback: Any
) -> AsyncGenerator[tuple[Gateway, Path]]:
    """A gateway whose model `m` cannot be loaded, and falls back to all of these if `fallback` says so."""
    names = tuple(each.name for each in upstreams)
    model = ModelConfig(
        name="m", path="m", fallback=FallbackConfig(names, **fallback) if fallback else FallbackConfig()
    )
    options = ["--exit-on-load", "66"] if broken else []
    with short_home() as home:
        async with running(home, options, [model], upstreams=upstreams) as gateway:
            yield gateway, home


async def ask(gateway: Gateway, model: str = "far", **fields: Any) -> httpx2.Response:
    headers = fields.pop("headers", {})
    return await gateway.client.post("/v1/chat/completions", json=chat(model=model) | fields, headers=headers)


async def test_a_model_of_an_upstream_is_answered_by_it_and_named_everywhere(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-theirs\n")
    async with far() as cloud, door(upstream(cloud.url, key_file=str(key))) as (gateway, _):
        reply = await ask(gateway, headers={"authorization": "Bearer mine", "cookie": "mine"}, unusual=[1.50, None])
        assert reply.json() == ANSWER
        assert reply.headers["x-mlxd-served-by"] == "cloud"
        ((path, headers, body),) = cloud.asked
        assert path == "/v1/chat/completions"
        assert headers["authorization"] == "Bearer sk-theirs"
        assert "mine" not in str(headers)
        assert body == chat(model="vendor/far-1") | {"unusual": [1.50, None]}
        assert gateway.metrics.upstream_requests["cloud", "far", "200"] == 1
        assert gateway.metrics.models["far"].requests["200"] == 1
        listed = (await gateway.client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["m", "far"]


async def test_cookies_of_an_upstream_are_not_kept() -> None:
    async with far(head=("set-cookie: a=b",)) as cloud, door(upstream(cloud.url)) as (gateway, _):
        for _ in range(2):
            reply = await ask(gateway)
            assert (reply.status_code, "set-cookie" in reply.headers) == (200, False)
        assert ["cookie" in headers for _, headers, _ in cloud.asked] == [False, False]


async def test_a_model_that_cannot_be_served_here_leaves_where_its_configuration_says_so() -> None:
    async with far() as cloud, door(upstream(cloud.url), when=("unavailable",)) as (gateway, _):
        reply = await ask(gateway, "m")
        assert (reply.status_code, reply.headers["x-mlxd-served-by"]) == (200, "cloud")
        assert cloud.asked[0][2]["model"] == "vendor/m"
    async with far() as cloud, door(upstream(cloud.url)) as (gateway, _):
        assert (await ask(gateway, "m")).status_code == 503
        assert cloud.asked == []


async def test_a_request_for_an_adapter_does_not_leave_for_the_weights_of_another() -> None:
    async with far() as cloud, door(upstream(cloud.url), when=("unavailable",)) as (gateway, _):
        config = gateway.app.services.config
        adapted = replace(config.models["m"], adapters={"sql": "/adapters/sql"})
        gateway.app.apply(replace(config, models={"m": adapted}))
        assert (await ask(gateway, "m")).status_code == 200
        for name in ("sql", "m:sql"):
            assert (await ask(gateway, name)).status_code == 503
        assert len(cloud.asked) == 1


async def test_a_model_that_is_served_here_does_not_leave() -> None:
    async with far() as cloud, door(upstream(cloud.url), broken=False, when=("unavailable",)) as (gateway, _):
        reply = await ask(gateway, "m")
        assert reply.json()["choices"][0]["message"]["content"] == tokens(5)
        assert "x-mlxd-served-by" not in reply.headers
        for bad in ({"temperature": 99}, {"messages": 1}):
            assert (await ask(gateway, "m", **bad)).status_code == 400
        assert (await ask(gateway, "nope")).status_code == 404
        assert cloud.asked == []


async def test_a_full_queue_leaves_only_where_that_is_a_reason() -> None:
    for when, status in (("unavailable",), 429), (("queue",), 200):
        model = ModelConfig(name="m", path="m", max_running=1, fallback=FallbackConfig(("cloud",), when))
        async with far() as cloud:
            with short_home() as home:
                async with running(home, ["--step-ms", "20"], [model], upstreams=[upstream(cloud.url)]) as gateway:
                    gateway.app.services.admission.waiting_max = 0
                    body = chat(stream=True, max_tokens=500)
                    async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as running_one:
                        await anext(running_one.aiter_raw())
                        assert (await ask(gateway, "m")).status_code == status


async def test_a_key_that_may_not_leave_stays() -> None:
    async with far() as cloud, door(upstream(cloud.url), when=("unavailable",)) as (gateway, home):
        keys = KeyFile(keys_path(home))
        secrets = {
            name: keys.create(Key(name=name, prefix="", salt="", hash="", **fields))[1]
            for name, fields in {
                "stays": {}, "admin": {"is_admin": True}, "other": {"may_leave": True, "models": ("m",)},
                "leaves": {"may_leave": True},
            }.items()
        }  # fmt: skip
        for name, model, status in (
            ("stays", "far", 403), ("stays", "m", 503), ("admin", "far", 403), ("other", "far", 404),
            ("other", "m", 200), ("leaves", "far", 200), ("leaves", "m", 200),
        ):  # fmt: skip
            before = len(cloud.asked)
            reply = await ask(gateway, model, headers={"x-api-key": secrets[name]})
            assert reply.status_code == status, (name, model)
            assert len(cloud.asked) - before == (status == 200)
        lists = {
            name: [
                card["id"]
                for card in (await gateway.client.get("/v1/models", headers={"x-api-key": secret})).json()["data"]
            ]
            for name, secret in secrets.items()
        }
        assert lists == {"stays": ["m"], "admin": ["m"], "other": ["m"], "leaves": ["m", "far"]}
        # Its tokens count as the upstream tells.
        assert gateway.metrics.keys["leaves"].generation_tokens == 18


async def test_the_next_upstream_is_asked_until_the_first_byte() -> None:
    async with far(status=503) as busy, far(ending="silent") as silent, far() as good:
        chain = [
            upstream(NOWHERE, "absent"), upstream(busy.url, "busy"),
            upstream(silent.url, "silent"), upstream(good.url, "good"),
        ]  # fmt: skip
        async with door(*chain) as (gateway, _):
            gateway.app.services.upstreams.first_byte_s = patient(0.5)
            reply = await ask(gateway)
            assert (reply.json(), reply.headers["x-mlxd-served-by"]) == (ANSWER, "good")
            outcomes = {(to, outcome) for to, _, outcome in gateway.metrics.upstream_requests}
            assert outcomes == {("absent", "connection"), ("busy", "503"), ("silent", "timeout"), ("good", "200")}


async def test_a_refusal_of_the_request_is_the_clients_and_one_of_all_is_the_models() -> None:
    async with far(status=400) as strict, far() as good:
        async with door(upstream(strict.url), upstream(good.url, "good")) as (gateway, _):
            assert (await ask(gateway)).status_code == 400
            assert good.asked == []
        async with door(upstream(NOWHERE)) as (gateway, _):
            assert (await ask(gateway)).json()["error"]["code"] == "upstream_unavailable"
        async with door(upstream(NOWHERE), when=("unavailable",)) as (gateway, _):
            # Why it could not be served here, and not that nothing else could.
            assert (await ask(gateway, "m")).json()["error"]["code"] == "model_corrupt"


async def test_a_request_that_may_not_leave_as_it_is_has_the_answer_of_this_daemon() -> None:
    async with far() as cloud, door(upstream(cloud.url), when=("unavailable",)) as (gateway, _):
        refused = await ask(gateway, plugins=[{"id": "web"}])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "plugins")
        assert (await ask(gateway, "m", plugins=[{"id": "web"}])).json()["error"]["code"] == "model_corrupt"
        assert cloud.asked == []


PIECES = [b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', b'data: {"choices":[{"delta":{"content":"b"}}]}\n\n']


async def test_a_stream_is_passed_on_as_it_comes() -> None:
    async with far(pieces=[*PIECES, b"data: [DONE]\n\n"]) as cloud, door(upstream(cloud.url)) as (gateway, _):
        reply = await ask(gateway, stream=True)
        assert reply.content == b"".join(PIECES) + b"data: [DONE]\n\n"
        assert reply.headers["content-type"] == "text/event-stream"


async def test_a_stream_that_breaks_off_ends_with_an_error_and_goes_on_nowhere_else() -> None:
    async with (
        far(pieces=[*PIECES, b'data: {"choices": [{"del'], ending="broken") as cloud,
        far(pieces=PIECES) as good,
        door(upstream(cloud.url), upstream(good.url, "good")) as (gateway, _),
    ):
        reply = await ask(gateway, stream=True)
        *chunks, last = events(reply.text)
        assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == ["a", "b"]
        assert last["error"]["code"] == "connection"
        assert good.asked == []


@pytest.mark.parametrize("end", [b"data: [DONE]\n\n", b'event: message_stop\r\ndata: {"type": "message_stop"}\r\n\r\n'])
async def test_a_connection_that_breaks_off_after_the_streams_end_is_no_error(end: bytes) -> None:
    async with far(pieces=[*PIECES, end], ending="broken") as cloud, door(upstream(cloud.url)) as (gateway, _):
        reply = await ask(gateway, stream=True)
        assert reply.content == b"".join([*PIECES, end])


async def test_anthropics_api_is_for_upstreams_that_speak_it() -> None:
    body = {"model": "far", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
    async with far() as cloud:
        async with door(upstream(cloud.url)) as (gateway, _):
            assert (await gateway.client.post("/v1/messages", json=body)).status_code == 400
        origin = cloud.url.removesuffix("/v1")
        async with door(upstream(origin, dialect="anthropic")) as (gateway, _):
            headers = {"anthropic-version": "2023-06-01", "x-api-key": "mine"}
            assert (await gateway.client.post("/v1/messages", json=body, headers=headers)).status_code == 200
            ((path, sent, _),) = cloud.asked
            assert (path, sent["anthropic-version"], "x-api-key" in sent) == ("/v1/messages", "2023-06-01", False)
            assert (await ask(gateway)).status_code == 400


async def test_the_limits_of_a_key_hold_for_what_leaves() -> None:
    async with far() as cloud, door(upstream(cloud.url)) as (gateway, home):
        limits = {"max_tokens": 5, "tpm": 100_000, "concurrency": 6}
        key = Key(name="k", prefix="", salt="", hash="", may_leave=True, **limits)
        headers = {"x-api-key": KeyFile(keys_path(home)).create(key)[1]}
        for asked, sent in (
            ({"max_tokens": 4000}, {"max_tokens": 5}),
            ({"max_tokens": 4}, {"max_tokens": 4}),
            ({"max_tokens": None}, {"max_tokens": 5}),
            ({"max_tokens": -1}, {"max_tokens": 5}),
            ({"max_tokens": None, "max_completion_tokens": 9}, {"max_tokens": None, "max_completion_tokens": 5}),
        ):
            assert (await ask(gateway, headers=headers, **asked)).status_code == 200
            body = cloud.asked.pop()[2]
            assert {name: body[name] for name in body if "tokens" in name} == sent
        assert (await ask(gateway, headers=headers, n=6)).status_code == 200
        assert gateway.app.services.ledger.day("k").requests == 5 + 6
        for refused in {"n": 7}, {"n": "6"}, {"max_tokens": -2}:
            assert (await ask(gateway, headers=headers, **refused)).status_code == 400
        prompts = {"model": "far", "prompt": ["a", "b", "c"], "n": 2}
        reply = await gateway.client.post("/v1/completions", json=prompts, headers=headers)
        assert (reply.status_code, cloud.asked.pop()[2]["max_tokens"]) == (200, 5)
        assert gateway.app.services.ledger.day("k").requests == 5 + 6 + 6


@pytest.mark.parametrize("how", [{"ending": "silent"}, {"ending": "stalled", "answer": b'{"choices": ['}])
async def test_who_leaves_before_the_answer_pays_for_it(how: dict[str, Any]) -> None:
    async with far(**how) as cloud, door(upstream(cloud.url)) as (gateway, home):
        key = Key(name="k", prefix="", salt="", hash="", may_leave=True, tpm=100_000)
        headers = {"x-api-key": KeyFile(keys_path(home)).create(key)[1]}
        ledger = gateway.app.services.ledger
        asking = asyncio.create_task(ask(gateway, headers=headers, max_tokens=100))
        await until(lambda: len(cloud.asked) == 1)
        asking.cancel()
        await until(lambda: ledger.day("k").requests == 1)

        assert ledger.day("k").tokens > 100


async def test_an_answer_that_does_not_come_is_paid_and_one_that_cannot_be_asked_for_is_not() -> None:
    async with (
        far(ending="silent") as cloud,
        door(upstream(cloud.url), upstream(NOWHERE, name="nowhere")) as (gateway, home),
    ):
        gateway.app.services.upstreams.first_byte_s = 0.2
        key = Key(name="k", prefix="", salt="", hash="", may_leave=True, tpm=100_000)
        headers = {"x-api-key": KeyFile(keys_path(home)).create(key)[1]}
        assert (await ask(gateway, headers=headers, max_tokens=100)).status_code == 503
        assert gateway.app.services.ledger.day("k").requests == 1
        assert gateway.app.services.ledger.day("k").tokens > 100
    async with door(upstream(NOWHERE)) as (gateway, home):
        headers = {"x-api-key": KeyFile(keys_path(home)).create(key)[1]}
        assert (await ask(gateway, headers=headers)).status_code == 503
        assert gateway.app.services.ledger.day("k").requests == 0


async def test_a_refusal_is_a_request_of_its_key_and_is_closed_when_its_client_leaves() -> None:
    async with far(status=400) as cloud, door(upstream(cloud.url)) as (gateway, home):
        key = Key(name="k", prefix="", salt="", hash="", may_leave=True, tpm=100_000)
        headers = {"x-api-key": KeyFile(keys_path(home)).create(key)[1]}
        day = gateway.app.services.ledger.day
        assert (await ask(gateway, headers=headers)).status_code == 400
        assert day("k").requests == 1
        cloud.ending, cloud.answer = "stalled", b'{"error": {'
        asking = asyncio.create_task(ask(gateway, headers=headers))
        await until(lambda: gateway.metrics.upstream_requests["cloud", "far", "400"] == 2)
        assert cloud.closed == 0
        asking.cancel()
        await until(lambda: cloud.closed == 1 and day("k").requests == 2)


async def test_tokens_that_cannot_be_are_estimated() -> None:
    async with far() as cloud, door(upstream(cloud.url)) as (gateway, home):
        key = Key(name="k", prefix="", salt="", hash="", may_leave=True, tpm=1000)
        headers = {"x-api-key": KeyFile(keys_path(home)).create(key)[1]}
        ledger = gateway.app.services.ledger
        for prompt, completion in (2**63 - 1, 1), (1, 2**63 - 1), (-1, -(2**63)), (10**30, 10**30), (1, 5 * 10**5):
            cloud.answer = {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}
            before = ledger.day("k").tokens
            assert (await ask(gateway, headers=headers, max_tokens=3000)).status_code == 200
            assert 0 < ledger.day("k").tokens - before < 200
        # More than was sent: of the template and of reasoning.
        cloud.answer = {"choices": [], "usage": {"prompt_tokens": 1000, "completion_tokens": 3000}}
        before = ledger.day("k").tokens
        assert (await ask(gateway, headers=headers, max_tokens=3000)).status_code == 200
        assert ledger.day("k").tokens - before == 4000
        assert (await ask(gateway, headers=headers)).status_code == 429


async def test_a_refusal_about_the_operators_key_stays_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    secret = "Incorrect API key provided: sk-own"
    for status in 401, 402, 403:
        told = {"error": {"message": secret}}
        async with far(status=status, answer=told) as cloud, door(upstream(cloud.url)) as (gateway, _):
            caplog.clear()
            with caplog.at_level(logging.WARNING, "gateway.remote.upstreams.upstream"):
                reply = await ask(gateway)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "upstream_unavailable")
            assert secret not in reply.text
            assert secret in caplog.text


@pytest.mark.parametrize(
    "how",
    [
        {"status": 999}, {"status": 301, "head": ["location: http://127.0.0.1:9/"]}, {"status": 304},
        {"kind": "text/html", "answer": b"<script>alert(1)</script>"}, {"kind": "application/json, text/html"},
        {"head": ["content-encoding: gzip"], "answer": gzip.compress(bytes(64 << 20))},
        {"status": 400, "head": ["content-encoding: gzip"], "answer": gzip.compress(b"{}")},
    ],
)  # fmt: skip
async def test_what_is_no_answer_of_the_api_is_not_passed_on(how: dict[str, Any]) -> None:
    async with far(**how) as odd, far() as good:
        async with door(upstream(odd.url)) as (gateway, _):
            reply = await ask(gateway)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "upstream_unavailable")
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert gateway.metrics.upstream_requests["cloud", "far", "invalid"] == 1
            assert gateway.metrics.unhandled_errors == 0
        async with door(upstream(odd.url), upstream(good.url, "good")) as (gateway, _):
            assert (await ask(gateway)).json() == ANSWER


async def test_a_refusal_that_is_a_page_stays_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    page = b"<h1>Too large</h1>"
    for status in 413, 502:
        async with (
            far(status=status, kind="text/html", answer=page) as cloud,
            door(upstream(cloud.url)) as (gateway, _),
        ):
            caplog.clear()
            with caplog.at_level(logging.WARNING, "gateway.remote.upstreams.upstream"):
                reply = await ask(gateway)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "upstream_unavailable")
            assert "Too large" in caplog.text


async def test_a_whole_answer_that_never_ends_has_a_deadline() -> None:
    async with (
        far(ending="dripping") as slow,
        far() as good,
        door(upstream(slow.url), upstream(good.url, "good")) as (gateway, _),
    ):
        upstreams = gateway.app.services.upstreams
        upstreams.first_byte_s = upstreams.silence_s = 0.2
        reply = await ask(gateway)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "timeout")
        await upstreams.drain(DEADLINE_S)


async def test_headers_of_a_client_are_passed_on_whatever_their_bytes() -> None:
    body = {"model": "far", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}
    async with far() as cloud, door(upstream(cloud.url.removesuffix("/v1"), dialect="anthropic")) as (gateway, _):
        headers = {b"anthropic-version": b"\xe9"}
        assert (await gateway.client.post("/v1/messages", json=body, headers=headers)).status_code == 200
        assert cloud.asked[0][1]["anthropic-version"] == "\xe9"
        assert list(gateway.metrics.upstream_requests) == [("cloud", "far", "200")]


async def test_an_answer_has_one_request_id() -> None:
    async with far() as cloud, door(upstream(cloud.url)) as (gateway, _):
        assert len((await ask(gateway, headers={"x-request-id": "mine"})).headers.get_list("x-request-id")) == 1


async def test_a_drained_daemon_sends_nothing_to_upstreams() -> None:
    async with far() as cloud, door(upstream(cloud.url)) as (gateway, _):
        gateway.app.services.admission.is_paused = True
        reply = await ask(gateway)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "draining")
        assert cloud.asked == []


async def test_a_request_at_an_upstream_is_listed_until_it_ends_and_can_be_cancelled() -> None:
    async with far(pieces=PIECES, ending="stalled") as cloud, door(upstream(cloud.url)) as (gateway, _):
        requests = gateway.app.services.requests
        asking = asyncio.create_task(ask(gateway, stream=True, headers={"x-request-id": "one"}))
        await until(lambda: gateway.metrics.upstream_requests["cloud", "far", "200"] == 1)
        drain = asyncio.create_task(gateway.app.services.upstreams.drain(patient(DEADLINE_S)))
        (view,) = requests.views()
        assert (view.id, view.model, view.state) == ("one", "far", "upstream")
        assert not drain.done()
        assert requests.cancel("one")
        assert events((await asking).text)[-1]["error"]["code"] == "cancelled"
        await drain
        assert requests.views() == []
    async with far(ending="silent") as cloud, door(upstream(cloud.url)) as (gateway, _):
        requests = gateway.app.services.requests
        asking = asyncio.create_task(ask(gateway, headers={"x-request-id": "two"}))
        await until(lambda: bool(cloud.asked))
        assert requests.cancel("two")
        assert (await asking).status_code == 499


async def test_a_request_that_fails_here_and_leaves_is_recorded_once() -> None:
    async with far() as cloud, door(upstream(cloud.url), broken=False, when=("context",)) as (gateway, _):
        reply = await gateway.client.post("/v1/completions", json={"model": "m", "prompt": "too long"})
        assert (reply.status_code, reply.headers["x-mlxd-served-by"]) == (200, "cloud")
        assert gateway.app.services.ledger.day("").requests == 1


async def test_large_bodies_are_read_and_written_away_from_the_loop() -> None:
    async with far() as cloud, door(upstream(cloud.url)) as (gateway, _):
        numbers = gateway.app.services.bodies.numbers
        assert (await ask(gateway)).status_code == 200
        assert numbers.offloaded == 0
        assert (await ask(gateway, messages=[{"role": "user", "content": "x" * LARGE_BYTES}])).status_code == 200
        # To find its upstream, to hold it to its key's limits, and to name its model.
        assert numbers.offloaded == 3


async def test_an_upstream_is_trusted_by_the_authorities_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority.make(tmp_path)
    authority.issue()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(authority.certificate, authority.key)
    authority.ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    async with far(tls) as cloud:
        async with door(upstream(cloud.url)) as (gateway, _):
            assert (await ask(gateway)).json()["error"]["code"] == "upstream_unavailable"
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        async with door(upstream(cloud.url)) as (gateway, _):
            assert (await ask(gateway)).json() == ANSWER

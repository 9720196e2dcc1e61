import json
import logging
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.access.key import Key, KeyFile, KeysUnusable
from gateway.access.keyring import Keyring
from gateway.app import admin_routes
from gateway.config.settings import ModelConfig, ServerConfig
from gateway.errors import Unauthorized
from gateway.middleware.auth import HEALTH
from gateway.reload import Reloader
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.prometheus import Exposition
from tests.gateway.harness import Gateway, chat, never_drained, running, until

pytestmark = pytest.mark.anyio

MODELS = [
    ModelConfig(name="m", path="m", aliases=("mine",)),
    ModelConfig(name="org/secret", path="s", aliases=("hidden", "claude-*")),
]


def make(home: Path, name: str = "k", **fields: Any) -> str:
    """A key in the home's file, as `mlxctl keys create` makes it; its secret."""
    return KeyFile(home / "keys" / "keys.json").create(Key(name=name, prefix="", salt="", hash="", **fields))[1]


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("h")


@pytest.fixture(scope="module")
async def gateway(home: Path) -> AsyncGenerator[Gateway, None]:
    """One with a key in its home, so that all are needed."""
    make(home, "first")
    async with running(home, ["--step-ms", "1"], MODELS) as running_gateway:
        yield running_gateway


@pytest.fixture
def lines() -> Generator[list[logging.LogRecord], None, None]:
    """Log lines of the gateway, access lines included."""
    seen: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = seen.append
    logger = logging.getLogger("gateway")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield seen
    logger.removeHandler(handler)
    logger.setLevel(before)


def routes(gateway: Gateway) -> list[tuple[str, str]]:
    """Every method and path that the public app serves, with something in place of parameters."""
    found = [
        (method, route.path.replace("{id:path}", "org/secret").replace("{id}", "resp_1"))
        for route in gateway.app.routes
        for method in sorted(route.methods or ())
    ]
    assert len(found) > 20
    return found


# -- every route needs a key -----------------------------------------------------------------------------------------


async def test_no_route_but_the_health_answers_without_a_key(gateway: Gateway) -> None:
    for method, path in routes(gateway):
        for headers in ({}, bearer("sk-mlxd-wrong"), {"x-api-key": "wrong"}):
            answer = await gateway.client.request(method, path, headers=headers, json={})
            if path in HEALTH:
                assert answer.status_code == 200, (method, path)
            else:
                assert answer.status_code == 401, (method, path)


async def test_every_route_takes_a_key_either_way(gateway: Gateway, home: Path) -> None:
    secret = make(home, "every-route")
    for method, path in routes(gateway):
        for headers in (bearer(secret), {"authorization": f"bearer  {secret}"}, {"x-api-key": secret}):
            answer = await gateway.client.request(method, path, headers=headers, json={})
            assert answer.status_code == 403 if path == "/metrics" else answer.status_code not in (401, 403), path


async def test_unknown_paths_methods_and_neighbours_of_the_open_routes_need_a_key_too(gateway: Gateway) -> None:
    for path in ("/nope", "/livez/", "//livez", "/livez/../v1/models", "/LIVEZ", "/metrics/", "/v1", "/v1/models/"):
        answer = await gateway.client.send(gateway.client.build_request("GET", gateway.url + path))
        assert answer.status_code == 401, path
    for method in ("OPTIONS", "PUT", "PATCH", "TRACE", "DELETE"):
        assert (await gateway.client.request(method, "/v1/models")).status_code == 401


async def test_nothing_of_the_admin_api_is_on_tcp_whatever_the_key(gateway: Gateway, home: Path) -> None:
    secret = make(home, "boss", is_admin=True)
    public = {route.path for route in gateway.app.routes}
    reloader = Reloader(gateway.app, lambda: gateway.app.services.config)
    for route in admin_routes(gateway.app, reloader, gateway.url, never_drained):
        if route.path in public:
            continue
        for method in route.methods or ():
            answer = await gateway.client.request(method, route.path, headers=bearer(secret), json={"model": "m"})
            assert answer.status_code in (404, 405), route.path
    assert gateway.pool.worker("org/secret").view().state == "stopped"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "")],
        [("authorization", "Bearer")],
        [("authorization", "Basic {key}")],
        [("authorization", "{key}")],
        [("authorization", "Bearer {key}x")],
        [("authorization", "Bearer {cut}")],
        [("authorization", "Bearer {prefix}")],
        [("authorization", "Bearer " + "sk-mlxd-" * 200)],
        [("authorization", b"Bearer \xff\xfe\x80")],
        [("x-api-key", "")],
        [("x-api-key", b"\xff" * 300)],
        [("x-api-key", "wrong")] * 4 + [("x-api-key", "{key}")],
        [("cookie", "api_key={key}"), ("api-key", "{key}"), ("proxy-authorization", "Bearer {key}")],
    ],
)
async def test_what_is_not_a_key_does_not_get_in(gateway: Gateway, home: Path, headers: list[tuple[str, Any]]) -> None:
    made_before = KeyFile(home / "keys" / "keys.json").read()
    secret = make(home, f"not-{len(made_before)}")
    said = [
        (key, value.format(key=secret, cut=secret[:-1], prefix=secret[:17]) if isinstance(value, str) else value)
        for key, value in headers
    ]
    answer = await gateway.client.get(f"/v1/models?api_key={secret}&key={secret}", headers=said)

    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert secret not in answer.text


async def test_one_good_key_among_two_is_enough(gateway: Gateway, home: Path) -> None:
    secret = make(home, "both")
    answer = await gateway.client.get("/v1/models", headers={"authorization": "Bearer old", "x-api-key": secret})

    assert answer.status_code == 200


async def test_refusals_have_the_shape_of_their_dialect(gateway: Gateway) -> None:
    openai = (await gateway.client.post("/v1/chat/completions", headers=bearer("x"), json=chat())).json()
    anthropic = (await gateway.client.post("/v1/messages", headers={"x-api-key": "x"}, json={})).json()

    assert openai["error"]["code"] == "invalid_api_key"
    assert openai["error"]["type"] == "invalid_request_error"
    assert anthropic["type"] == "error"
    assert anthropic["error"]["type"] == "authentication_error"


async def test_a_rejected_key_is_never_logged_and_an_accepted_one_only_by_name(
    gateway: Gateway, home: Path, lines: list[logging.LogRecord]
) -> None:
    secret = make(home, "by-name")
    await gateway.client.get("/v1/models", headers=bearer("sk-mlxd-rejected"))
    await gateway.client.get("/v1/models", headers=bearer(secret))
    await until(lambda: len(lines) >= 2)
    text = "\n".join(f"{line.getMessage()} {vars(line)}" for line in lines)

    assert "sk-mlxd-rejected" not in text
    assert secret not in text
    assert "'key': 'by-name'" in text


# -- what happens to keys --------------------------------------------------------------------------------------------


async def test_the_loopback_is_open_until_the_first_key_and_never_again_by_a_revocation(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys" / "keys.json")
    async with running(tmp_path, ["--step-ms", "1"]) as gateway:
        assert (await gateway.client.get("/v1/models")).status_code == 200
        assert (await gateway.client.get("/v1/models", headers=bearer("x"))).status_code == 200

        secret = make(tmp_path)
        assert (await gateway.client.get("/v1/models")).status_code == 401
        assert (await gateway.client.get("/v1/models", headers=bearer(secret))).status_code == 200

        _, fresh = file.rotate("k")
        assert (await gateway.client.get("/v1/models", headers=bearer(secret))).status_code == 401
        assert (await gateway.client.get("/v1/models", headers=bearer(fresh))).status_code == 200

        file.revoke("k")
        assert (await gateway.client.get("/v1/models", headers=bearer(fresh))).status_code == 401
        assert (await gateway.client.get("/v1/models")).status_code == 401

        file.path.unlink()
        assert (await gateway.client.get("/v1/models")).status_code == 200


async def test_beyond_the_loopback_nobody_comes_in_without_a_key(tmp_path: Path) -> None:
    async with running(tmp_path, ["--step-ms", "1"], server=ServerConfig(host="0.0.0.0")) as gateway:
        answer = await gateway.client.get("/v1/models")
        assert answer.status_code == 401
        assert "mlxctl keys create" in answer.text
        assert (await gateway.client.get("/livez")).status_code == 200


async def test_a_damaged_file_leaves_the_keys_as_they_were(
    gateway: Gateway, home: Path, lines: list[logging.LogRecord]
) -> None:
    secret = make(home, "survivor")
    path = home / "keys" / "keys.json"
    assert (await gateway.client.get("/v1/models", headers=bearer(secret))).status_code == 200
    good = path.read_bytes()
    path.write_bytes(b"{")
    try:
        for _ in range(3):
            assert (await gateway.client.get("/v1/models", headers=bearer(secret))).status_code == 200
            assert (await gateway.client.get("/v1/models")).status_code == 401
    finally:
        path.write_bytes(good)
    # Once, not for each request.
    assert sum("API keys not reloaded" in line.getMessage() for line in lines) == 1


async def test_a_first_key_that_the_daemon_cannot_read_closes_the_door(tmp_path: Path) -> None:
    async with running(tmp_path, ["--step-ms", "1"]) as gateway:
        assert (await gateway.client.get("/v1/models")).status_code == 200
        (tmp_path / "keys").mkdir(exist_ok=True)
        (tmp_path / "keys" / "keys.json").write_bytes(b"{")

        assert (await gateway.client.get("/v1/models")).status_code == 401


async def test_a_daemon_does_not_start_on_keys_that_it_cannot_read(tmp_path: Path) -> None:
    make(tmp_path)
    path = tmp_path / "keys" / "keys.json"
    path.chmod(0o666)

    with pytest.raises(KeysUnusable):
        Keyring(KeyFile(path), Metrics())


async def test_a_key_expires(tmp_path: Path) -> None:
    now = [1000.0]
    secret = make(tmp_path, expires=2000.0).encode()
    metrics = Metrics()
    keyring = Keyring(KeyFile(tmp_path / "keys" / "keys.json"), metrics, wall=lambda: now[0])

    now[0] = 1999.9
    assert keyring.caller(secret) is not None
    now[0] = 2000.0
    with pytest.raises(Unauthorized) as caught:
        keyring.caller(secret)
    assert caught.value.code == "expired_api_key"
    assert metrics.key("k").rejections == {"expired": 1}


# -- scopes ----------------------------------------------------------------------------------------------------------


FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")


def asking(model: str) -> list[tuple[str, dict[str, Any]]]:
    """A body for every route that takes a model's name."""
    messages = [{"role": "user", "content": "hi"}]
    ranked = {"model": model, "query": "hi", "documents": ["a"]}
    scored = {"model": model, "text_1": "hi", "text_2": "a"}
    return [
        ("/v1/embeddings", {"model": model, "input": "hi"}),
        ("/v1/audio/speech", {"model": model, "input": "hi"}),
        *((path, {"model": model}) for path in FORMS),
        *((path, ranked) for path in ("/v1/rerank", "/v2/rerank")),
        ("/v1/score", scored),
        ("/v1/decisions", {"model": model, "input": "hi", "questions": [{"type": "predicate", "instructions": "So?"}]}),
        ("/v1/systemone", {"model": model, "state": "hi", "questions": {"q": {"type": "noul", "instructions": "So?"}}}),
        ("/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 2}),
        ("/v1/completions", {"model": model, "prompt": "hi", "max_tokens": 2}),
        ("/v1/messages", {"model": model, "messages": messages, "max_tokens": 2}),
        ("/v1/messages/count_tokens", {"model": model, "messages": messages}),
        ("/v1/responses", {"model": model, "input": "hi", "max_output_tokens": 2}),
        ("/v1/responses/compact", {"model": model, "input": "hi"}),
        ("/v1/responses/input_tokens", {"model": model, "input": "hi"}),
        ("/api/chat", {"model": model, "messages": messages, "options": {"num_predict": 2}}),
        ("/api/generate", {"model": model, "prompt": "hi", "options": {"num_predict": 2}}),
        ("/api/embed", {"model": model, "input": "hi"}),
        ("/api/embeddings", {"model": model, "prompt": "hi"}),
        ("/api/show", {"model": model}),
        ("/completion", {"model": model, "prompt": "hi", "n_predict": 2}),
        ("/infill", {"model": model, "input_prefix": "hi", "n_predict": 2}),
        ("/apply-template", {"model": model, "messages": messages}),
        ("/tokenize", {"model": model, "prompt": "hi"}),
        ("/detokenize", {"model": model, "tokens": [1]}),
    ]


async def test_every_route_that_takes_a_model_is_among_those_tested_for_scopes(gateway: Gateway) -> None:
    # A pull is only for an admin. Files and batches have requests in them: tests/gateway/api/batches.
    tested = {path for path, _ in asking("m")} | {"/api/pull", "/v1/files", "/v1/batches", "/v1/messages/batches"}
    posts = {path for method, path in routes(gateway) if method == "POST" and not path.endswith("/cancel")}

    assert posts == tested


@pytest.mark.parametrize("name", ["org/secret", "hidden", "claude-opus-4-5"])
async def test_a_model_outside_of_a_keys_scope_does_not_exist(gateway: Gateway, home: Path, name: str) -> None:
    secret = make(home, f"scoped-{name.replace('/', '-')}", models=("m",))
    for path, body in asking(name):
        answer, unknown = [
            await gateway.client.post(
                path,
                headers=bearer(secret),
                **({"data": asked, "files": {"file": b"RIFF"}} if path in FORMS else {"json": asked}),
            )
            for asked in (body, body | {"model": "no-such-model"})
        ]
        assert answer.status_code == unknown.status_code == 404, path
        # Nothing but the name differs, and no other name is told.
        assert answer.text.replace(name, "?").replace(answer.headers["x-request-id"], "") == unknown.text.replace(
            "no-such-model", "?"
        ).replace(unknown.headers["x-request-id"], "")
        if name != "org/secret":
            assert "secret" not in answer.text
    retrieved = await gateway.client.get(f"/v1/models/{name}", headers=bearer(secret))
    assert retrieved.status_code == 404
    for wanted in (name, "no-such-model"):
        pulled = await gateway.client.post("/api/pull", headers=bearer(secret), json={"model": wanted})
        assert (pulled.status_code, wanted in pulled.text) == (403, False)
    assert gateway.pool.worker("org/secret").view().state == "stopped"


async def test_a_scoped_key_sees_its_models_only(gateway: Gateway, home: Path) -> None:
    secret = make(home, "sees", models=("min*",))
    listed = (await gateway.client.get("/v1/models", headers=bearer(secret))).text
    root = (await gateway.client.get("/", headers=bearer(secret))).text

    assert [model["id"] for model in json.loads(listed)["data"]] == ["m"]
    assert "secret" not in listed + root
    for name in ("m", "mine"):
        assert (await gateway.client.get(f"/v1/models/{name}", headers=bearer(secret))).status_code == 200
        answer = await gateway.client.post("/v1/chat/completions", headers=bearer(secret), json=chat(model=name))
        assert answer.status_code == 200


async def test_a_key_cannot_see_cancel_or_delete_what_another_key_has_asked(gateway: Gateway, home: Path) -> None:
    mine, theirs = make(home, "mine"), make(home, "theirs", is_admin=True)
    body = {"model": "m", "input": "hi", "max_output_tokens": 2}
    made = (await gateway.client.post("/v1/responses", headers=bearer(mine), json=body)).json()["id"]
    for method, path in (
        ("GET", f"/v1/responses/{made}"),
        ("GET", f"/v1/responses/{made}/input_items"),
        ("POST", f"/v1/responses/{made}/cancel"),
        ("DELETE", f"/v1/responses/{made}"),
    ):
        assert (await gateway.client.request(method, path, headers=bearer(theirs))).status_code == 404, path
    follow = body | {"previous_response_id": made}
    assert (await gateway.client.post("/v1/responses", headers=bearer(theirs), json=follow)).status_code in (400, 404)
    assert (await gateway.client.get(f"/v1/responses/{made}", headers=bearer(mine))).status_code == 200


async def test_without_a_key_health_has_no_names(tmp_path: Path) -> None:
    secret, scoped = make(tmp_path, "all"), make(tmp_path, "scoped", models=("other",))
    models = [ModelConfig(name="private-name", path="m", preload=True), ModelConfig(name="other", path="m")]
    options = ["--exit-on-load", "64", "--goodbye-code", "model_missing"]
    async with running(tmp_path, options, models) as gateway:
        await until(lambda: gateway.pool.worker("private-name").view().state == "failed")
        for path in ("/readyz", "/health"):
            nobody = await gateway.client.get(path)
            other = await gateway.client.get(path, headers=bearer(scoped))
            everything = await gateway.client.get(path, headers=bearer(secret))
            assert nobody.status_code == other.status_code == everything.status_code
            assert "private-name" not in nobody.text + other.text
            assert "private-name" in everything.text


async def test_why_a_model_cannot_be_loaded_is_told_to_admins_alone(tmp_path: Path) -> None:
    boss, user = make(tmp_path, "boss", is_admin=True), make(tmp_path, "user")
    async with running(tmp_path, ["--exit-on-load", "66", "--goodbye-code", "20"]) as gateway:
        for secret, is_told in (user, False), (boss, True):
            headers = bearer(secret)
            replies = [
                await gateway.client.post("/v1/chat/completions", headers=headers, json=chat()),
                await gateway.client.post("/v1/messages", headers=headers, json=chat()),
                await gateway.client.post("/tokenize", headers=headers, json={"model": "m", "prompt": "hi"}),
                await gateway.client.post("/api/generate", headers=headers, json={"model": "m"}),
                await gateway.client.get("/readyz?model=m", headers=headers),
            ]
            assert [reply.status_code for reply in replies] == [503] * 5
            assert ["cannot be loaded" in reply.text for reply in replies] == [is_told] * 5
            assert ("cannot be loaded" in (await gateway.client.get("/health", headers=headers)).text) is is_told
        assert "cannot be loaded" not in (await gateway.client.get("/readyz?model=m")).text


async def test_metrics_name_models_and_keys_to_admins_and_scrapers_only(tmp_path: Path) -> None:
    boss, user = make(tmp_path, "boss", is_admin=True), make(tmp_path, "user")
    scraper = make(tmp_path, "prometheus", is_metrics_only=True)
    async with running(tmp_path) as gateway:
        await gateway.client.post("/v1/chat/completions", headers=bearer(user), json={})
        for headers, status in (({}, 401), (bearer("wrong"), 401), (bearer(user), 403)):
            refused = await gateway.client.get("/metrics", headers=headers)
            assert refused.status_code == status
            assert "boss" not in refused.text
        for secret in (boss, scraper):
            shown = await gateway.client.get("/metrics", headers=bearer(secret))
            assert shown.status_code == 200
            assert 'key="user"' in shown.text


async def test_a_scrape_without_a_key_is_told_how_to_make_one(gateway: Gateway) -> None:
    answer = await gateway.client.get("/metrics")
    assert answer.status_code == 401
    assert "mlxctl keys create prometheus --role metrics" in answer.json()["error"]["message"]


async def test_metrics_are_for_everybody_where_the_configuration_says_so(tmp_path: Path) -> None:
    make(tmp_path)
    async with running(tmp_path, server=ServerConfig(metrics_auth=False)) as gateway:
        assert (await gateway.client.get("/metrics")).status_code == 200


async def test_a_key_for_metrics_may_do_nothing_else(gateway: Gateway, home: Path) -> None:
    secret = make(home, "scraper", is_metrics_only=True)
    for method, path in [*routes(gateway), ("GET", "/nope"), ("POST", "/v1/nope"), ("GET", "/metrics/")]:
        answer = await gateway.client.request(method, path, headers=bearer(secret), json={})
        assert answer.status_code == (200 if path in HEALTH | {"/metrics"} else 403), (method, path)
    health = await gateway.client.get("/health?deep=1", headers=bearer(secret))
    assert health.status_code == 403


# -- limits, priority, cache, numbers --------------------------------------------------------------------------------


async def test_requests_a_minute_are_a_429_with_headers_in_both_dialects(gateway: Gateway, home: Path) -> None:
    secret = make(home, "slow", rpm=2)
    messages = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    first = await gateway.client.post("/v1/messages", headers=bearer(secret), json=messages)
    second = await gateway.client.post("/v1/chat/completions", headers=bearer(secret), json=chat())
    openai = await gateway.client.post("/v1/chat/completions", headers=bearer(secret), json=chat())
    anthropic = await gateway.client.post("/v1/messages", headers=bearer(secret), json=messages)
    counted = await gateway.client.post("/v1/messages/count_tokens", headers=bearer(secret), json={})

    assert [first.status_code, second.status_code, openai.status_code, anthropic.status_code] == [200, 200, 429, 429]
    assert first.headers["anthropic-ratelimit-requests-remaining"] == "1"
    assert second.headers["x-ratelimit-limit-requests"] == "2"
    assert second.headers["x-ratelimit-remaining-requests"] == "0"
    assert 1 <= int(openai.headers["retry-after"]) <= 30
    assert openai.json()["error"]["code"] == "rate_limit_exceeded"
    assert anthropic.headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert anthropic.json()["error"]["type"] == "rate_limit_error"
    # Counting tokens is a request too, and models can be listed whatever was used.
    assert counted.status_code == 429
    assert (await gateway.client.get("/v1/models", headers=bearer(secret))).status_code == 200


async def test_tokens_a_minute_count_what_was_used(gateway: Gateway, home: Path) -> None:
    secret = make(home, "frugal", tpm=60)
    answers = [
        await gateway.client.post("/v1/chat/completions", headers=bearer(secret), json=chat(max_tokens=40))
        for _ in range(3)
    ]

    # Each has 3 tokens of prompt and 40 of completion.
    assert [answer.status_code for answer in answers] == [200, 429, 429]
    assert answers[1].json()["error"]["type"] == "tokens"
    assert 17 <= int(answers[1].headers["x-ratelimit-remaining-tokens"]) <= 20
    assert int(answers[1].headers["retry-after"]) >= 1
    assert gateway.metrics.key("frugal").generation_tokens == 40


async def test_a_client_that_leaves_pays_for_what_was_generated(tmp_path: Path) -> None:
    secret = make(tmp_path, "leaver", tpm=100_000)
    async with running(tmp_path, ["--step-ms", "2"]) as gateway:
        body = chat(stream=True, max_tokens=5000)
        async with gateway.client.stream("POST", "/v1/chat/completions", headers=bearer(secret), json=body) as answer:
            seen = 0
            async for line in answer.aiter_lines():
                seen += line.startswith("data:")
                if seen > 10:
                    break
        numbers = gateway.metrics.key("leaver")
        await until(lambda: numbers.running == 0 and numbers.generation_tokens > 0)
        assert numbers.generation_tokens >= 5
        assert numbers.prompt_tokens == 3


async def test_concurrent_requests_are_limited_also_while_streaming(tmp_path: Path) -> None:
    secret = make(tmp_path, concurrency=1)
    async with running(tmp_path, ["--step-ms", "5"]) as gateway:
        body = chat(stream=True, max_tokens=5000)
        async with gateway.client.stream(
            "POST", "/v1/chat/completions", headers=bearer(secret), json=body
        ) as running_one:
            assert running_one.status_code == 200
            refused = await gateway.client.post("/v1/chat/completions", headers=bearer(secret), json=chat())
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
        numbers = gateway.metrics.key("k")
        await until(lambda: numbers.running == 0)
        assert (
            await gateway.client.post("/v1/chat/completions", headers=bearer(secret), json=chat())
        ).status_code == 200


async def test_priority_and_cache_of_a_key_reach_the_worker(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys" / "keys.json")

    async def asked(gateway: Gateway, secret: str | None) -> Any:
        headers = {} if secret is None else bearer(secret)
        answer = await gateway.client.post("/v1/chat/completions", headers=headers, json=chat())
        return json.loads(answer.json()["choices"][0]["message"]["content"])

    async with running(tmp_path, worker="revealing") as gateway:
        assert await asked(gateway, None) == {"priority": 0, "cache_salt": ""}
        first, second = make(tmp_path, "a", priority=-3), make(tmp_path, "b")
        salt = file.read()[0].cache_salt
        assert await asked(gateway, first) == {"priority": -3, "cache_salt": salt}
        assert (await asked(gateway, second))["cache_salt"] not in ("", salt)
        rotated = file.rotate("a")[1]
        assert (await asked(gateway, rotated))["cache_salt"] == salt


async def test_the_use_of_a_key_is_in_the_metrics_by_name(gateway: Gateway, home: Path) -> None:
    secret = make(home, "counted", rpm=1)
    for _ in range(2):
        await gateway.client.post("/v1/chat/completions", headers=bearer(secret), json=chat(max_tokens=4))
    await gateway.client.get("/v1/models", headers=bearer("wrong"))
    text = Exposition(gateway.metrics).text().decode()

    assert 'mlxd_key_requests_total{key="counted",status="200"} 1.0' in text
    assert 'mlxd_key_requests_total{key="counted",status="429"} 1.0' in text
    assert 'mlxd_key_rejections_total{key="counted",reason="requests"} 1.0' in text
    assert 'mlxd_key_prompt_tokens_total{key="counted"} 3.0' in text
    assert 'mlxd_key_generation_tokens_total{key="counted"} 4.0' in text
    assert 'mlxd_auth_failures_total{reason="invalid"}' in text


async def test_the_owner_of_the_socket_needs_no_key(gateway: Gateway) -> None:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(gateway.admin), base_url="http://mlxd") as admin:
        usage = (await admin.get("/v1/keys/usage")).json()
        assert {key["name"] for key in usage["keys"]} >= {"first"}
        assert (await admin.get("/v1/status")).status_code == 200

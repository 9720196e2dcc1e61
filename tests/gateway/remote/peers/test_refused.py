"""The door of `/internal/`: who may ask there, for what, and what no key of a peer can do."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from gateway.access.key import Key
from gateway.access.key_file import KeyFile, KeyRefused
from gateway.config.settings import ModelConfig
from gateway.media.resolve import digest_of
from gateway.state_dir.home_paths import keys_path
from protocol.codec import encode
from protocol.from_worker import Accepted, Step
from protocol.peering import GENERATE_PATH, STATUS_PATH, VIA_HEADER, FrameReader, decode_status, encode_request
from protocol.prompts import ChatPrompt, EmbedPrompt, Media, ScorePrompt, TextPrompt
from protocol.to_worker import Constraint, ConstraintKind, Generate, LabelledQuestion, Sampling
from tests.gateway.harness import Gateway, chat, running, until
from tests.gateway.remote.peers.pairs import door, key_for, peer
from tests.support.pool import short_home, tokens

pytestmark = pytest.mark.anyio
RID = 7 << 32


@dataclass(slots=True)
class Home:
    """A gateway with keys of every role, whose models are `m` and `hidden`; the peer's key may use `m`."""

    gateway: Gateway
    path: Path
    secrets: dict[str, str]

    async def ask(self, method: str, path: str, role: str = "peer", **sent: Any) -> httpx.Response:
        headers = {"x-api-key": self.secrets[role]} if role else {}
        return await self.gateway.client.request(method, path, headers=headers | sent.pop("headers", {}), **sent)

    async def generate(self, *requests: Generate, model: str = "m", **sent: Any) -> httpx.Response:
        body = encode_request(model, [encode(request) for request in requests])
        return await self.ask("POST", GENERATE_PATH, content=body, **sent)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def home() -> AsyncGenerator[Home]:
    models = [ModelConfig(name="m", path="m"), ModelConfig(name="hidden", path="hidden")]
    with short_home() as path:
        keys = KeyFile(keys_path(path))
        secrets = {"peer": key_for(path, models=("m",)).read_text().strip()}
        for role, fields in (("user", {}), ("admin", {"is_admin": True}), ("metrics", {"is_metrics_only": True})):
            secrets[role] = keys.create(Key(name=role, prefix="", salt="", hash="", **fields))[1]
        async with running(path, ["--step-ms", "1"], models) as gateway:
            yield Home(gateway, path, secrets)


def request(rid: int = RID, text: str = "hi", **fields: Any) -> Generate:
    return Generate(rid, TextPrompt(text), Sampling(), **({"max_tokens": 3} | fields))


async def test_an_answer_has_the_rids_of_the_gateway_that_asks(home: Home) -> None:
    reply = await home.generate(request(), request(RID + 1))
    messages = list(FrameReader().feed(reply.content))
    deltas = [delta for message in messages if isinstance(message, Step) for delta in message.deltas]
    for rid in (RID, RID + 1):
        assert "".join(delta.text for delta in deltas if delta.rid == rid) == tokens(3)
        assert [delta.finish is not None for delta in deltas if delta.rid == rid][-1]
        assert Accepted(rid, 3) in messages


@pytest.mark.parametrize("role", ["", "user", "admin", "metrics"])
@pytest.mark.parametrize(("method", "path"), [("GET", STATUS_PATH), ("POST", GENERATE_PATH)])
async def test_only_a_key_of_a_peer_opens_the_internal_routes(home: Home, role: str, method: str, path: str) -> None:
    assert (await home.ask(method, path, role)).status_code == (403 if role else 401)


async def test_without_any_key_the_open_loopback_does_not_open_them_either(tmp_path: Path) -> None:
    with short_home() as path:
        async with running(path) as gateway:
            assert (await gateway.client.get("/v1/models")).status_code == 200
            assert (await gateway.client.get(STATUS_PATH)).status_code == 401


async def test_a_key_of_a_peer_opens_nothing_else(home: Home) -> None:
    for route in home.gateway.app.routes:
        path = route.path.replace("{id:path}", "m").replace("{id}", "resp_1")
        if path.startswith("/internal/"):
            continue
        for method in route.methods or ():
            status = (await home.ask(method, path)).status_code
            allowed = path in ("/livez", "/readyz", "/health", "/healthz")
            assert (status == 403) is not allowed, (method, path, status)


async def test_status_names_the_models_of_the_key_and_no_path(home: Home) -> None:
    await home.generate(request())
    reply = await home.ask("GET", STATUS_PATH)
    (model,) = decode_status(reply.content).models
    assert (model.name, model.state, model.slots) == ("m", "ready", 16)
    assert model.ready is not None
    assert model.ready.model_path == ""
    assert str(home.path).encode() not in reply.content


async def test_a_model_outside_of_the_key_does_not_exist_for_the_peer(home: Home) -> None:
    for name in ("hidden", "nope"):
        assert (await home.generate(request(), model=name)).status_code == 404


async def test_a_request_of_a_peer_is_never_sent_on(tmp_path: Path) -> None:
    """The peer of a peer has the model: it is not asked for it."""
    with short_home() as path, short_home() as middle_home, short_home() as far_home:
        far_key, middle_key = key_for(far_home), key_for(middle_home)
        async with (
            running(far_home) as far,
            door(middle_home, peer(far, far_key), models=[ModelConfig(name="mid", path="mid")]) as middle,
            door(path, peer(middle, middle_key)) as near,
        ):
            headers = {
                "x-api-key": KeyFile(keys_path(middle_home)).create(Key(name="u", prefix="", salt="", hash=""))[1]
            }
            assert (await middle.client.post("/v1/chat/completions", json=chat(), headers=headers)).status_code == 200
            assert (await near.client.post("/v1/chat/completions", json=chat())).status_code == 404
            assert (await near.client.post("/v1/chat/completions", json=chat(model="mid"))).status_code == 200


async def test_two_gateways_that_point_at_each_other_make_no_loop() -> None:
    with short_home() as left_home, short_home() as right_home:
        left_key, right_key = key_for(left_home), key_for(right_home)
        async with (
            running(left_home, models=[ModelConfig(name="left", path="l")]) as left,
            door(right_home, peer(left, left_key), models=[ModelConfig(name="right", path="r")]) as right,
        ):
            left.app.apply(replace(left.app.services.config, peers={"b": peer(right, right_key)}))
            fleet = left.app.services.fleet
            await until(lambda: fleet.find("right") is not None)
            secret = KeyFile(keys_path(left_home)).create(Key(name="user", prefix="", salt="", hash=""))[1]
            for name, status in (("right", 200), ("left", 200), ("b/left", 404), ("nope", 404)):
                body, headers = chat(model=name), {"x-api-key": secret}
                reply = await left.client.post("/v1/chat/completions", json=body, headers=headers)
                assert reply.status_code == status, name
            asked = {"model": "right", "input": "hi", "questions": [{"type": "predicate", "instructions": "So?"}]}
            reply = await left.client.post("/v1/decisions", json=asked, headers={"x-api-key": secret})
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported_model_kind")


async def test_a_request_that_has_passed_this_daemon_is_refused(home: Home) -> None:
    reply = await home.generate(request(), headers={VIA_HEADER: str(home.gateway.link.boot)})
    assert (reply.status_code, reply.json()["error"]["code"]) == (508, "loop_detected")


BAD = {
    "temperature": replace(request(), sampling=Sampling(temperature=9.0)),
    "penalty": replace(request(), sampling=Sampling(repetition_penalty=1e-38)),
    "not a number": replace(request(), sampling=Sampling(top_p=float("nan"))),
    "logprobs": replace(request(), top_logprobs=1000),
    "stops": replace(request(), stop=("",)),
    "tokens": replace(request(), max_tokens=-1),
    "vectors": replace(request(), prompt=EmbedPrompt(("a",))),
    "scores": replace(request(), prompt=ScorePrompt(("a",), ("b",))),
    "questions": replace(request(), questions=(LabelledQuestion("so?", ("Yes", "No")),)),
    "a long stop": replace(request(), stop=("x" * 1025,)),
    "a thinking budget": replace(request(), thinking_budget=-1),
    "drafts": replace(request(), most_drafted=-1),
    "an adapter": replace(request(), adapter="sql"),
    "sparse prefill": replace(request(), sparse_keep=1.5),
    "truncation": replace(request(), truncate=-2),
    "turns left out": replace(request(), truncate=-1, left_out=(-1, 0)),
    "a prediction": replace(request(), prediction="x" * ((4 << 20) + 1)),
    "a constraint": replace(request(), constraint=Constraint(ConstraintKind.REGEX, "x" * ((4 << 20) + 1))),
    "bad words": replace(request(), sampling=Sampling(bad_words=("word",) * 5000)),
    "breakers": replace(request(), sampling=Sampling(dry_breakers=("x" * 20_000,))),
    "stop ids": replace(request(), sampling=Sampling(stop_ids=(-5,))),
    "allowed ids": replace(request(), sampling=Sampling(allowed_ids=tuple(range(20_000)))),
    "bias": replace(request(), sampling=Sampling(logit_bias={1: 1e9})),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=list(BAD))
async def test_a_request_that_no_dialect_would_have_sent_is_refused(home: Home, bad: Generate) -> None:
    assert (await home.generate(bad)).status_code == 400


async def test_an_adapter_is_neither_told_nor_served_to_a_peer(home: Home) -> None:
    before = home.gateway.app.services.config
    adapted = replace(before.models["m"], adapters={"sql": "/adapters/sql"})
    home.gateway.app.apply(replace(before, models=before.models | {"m": adapted}))
    worker = await home.gateway.pool.ensure_ready("m")
    assert worker.ready is not None
    await until(lambda: worker.ready is not None and [each.name for each in worker.ready.adapters] == ["sql"])
    try:
        keys = KeyFile(keys_path(home.path))
        home.secrets["all"] = keys.create(Key(name="all", prefix="", salt="", hash="", is_peer=True))[1]
        for name in ("sql", "m:sql"):
            assert (await home.generate(request(), model=name)).status_code == 404, "out of the key's scope"
            reply = await home.ask("POST", GENERATE_PATH, "all", content=encode_request(name, [encode(request())]))
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")
        assert b"sql" not in (await home.ask("GET", STATUS_PATH, "all")).content
    finally:
        home.gateway.app.apply(before)


async def test_two_sequences_of_one_rid_and_none_at_all_are_refused(home: Home) -> None:
    assert (await home.generate(request(), request())).status_code == 400
    assert (await home.generate()).status_code == 400


async def test_a_medium_under_the_digest_of_another_is_refused(home: Home) -> None:
    """By the digest the features of others' media are found."""
    for digest in (digest_of(b"another"), b""):
        prompt = ChatPrompt([{"role": "user", "content": []}], media=(Media("image", digest, b"bytes"),))
        reply = await home.generate(Generate(RID, prompt, Sampling(), max_tokens=1))
        assert reply.status_code == 400
        assert "digest" in reply.json()["error"]["message"]


async def test_media_of_a_peer_are_counted_in_the_share_of_its_key(home: Home) -> None:
    """Even where the request is refused: they were held while it was looked at."""
    services = home.gateway.app.services
    prompt = ChatPrompt([{"role": "user", "content": []}], media=(Media("image", b"", bytes(2048)),))
    before = services.config
    home.gateway.app.apply(replace(before, media=replace(before.media, in_flight_bytes=1024)))
    try:
        reply = await home.generate(Generate(RID, prompt, Sampling(), max_tokens=1))
    finally:
        home.gateway.app.apply(before)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "media_memory_full")


@pytest.mark.parametrize("body", [b"", b"\xc1", b"{}", b"\x93\xa1m\x91\x91\x01\xc0"])
async def test_a_body_that_is_no_request_is_refused(home: Home, body: bytes) -> None:
    assert (await home.ask("POST", GENERATE_PATH, content=body)).status_code == 400


def test_a_key_has_one_role(tmp_path: Path) -> None:
    for other in ({"is_admin": True}, {"is_metrics_only": True}):
        with pytest.raises(KeyRefused):
            key_for(tmp_path, **other)

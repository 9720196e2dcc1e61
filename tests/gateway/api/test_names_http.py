"""Names, profiles and defaults as clients of each dialect meet them."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from gateway.access.key import Key, KeyFile
from gateway.config.settings import ModelConfig, ProfileConfig, SamplingDefaults, ServerConfig
from tests.gateway.harness import Gateway, running

pytestmark = pytest.mark.anyio

MODELS = (
    ModelConfig(
        name="coder",
        path="coder",
        aliases=("gpt-4o", "claude-*"),
        profiles={"brief": ProfileConfig(SamplingDefaults(max_tokens=2))},
    ),
    ModelConfig(name="tiny", path="tiny", sampling=SamplingDefaults(max_tokens=3)),
)
SERVER = ServerConfig(default="coder:brief", small="tiny")
HELLO = [{"role": "user", "content": "hi"}]
# Path, what a request has besides its model, and where its usage is told.
ROUTES: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", {"messages": HELLO}, "completion_tokens"),
    "completions": ("/v1/completions", {"prompt": "hi"}, "completion_tokens"),
    "responses": ("/v1/responses", {"input": "hi"}, "output_tokens"),
}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncGenerator[Gateway, None]:
    async with running(tmp_path, models=MODELS, server=SERVER) as started:
        yield started


@pytest.mark.parametrize("route", list(ROUTES))
@pytest.mark.parametrize(
    ("model", "tokens"),
    [({"model": "coder:brief"}, 2), ({"model": "gpt-4o:brief"}, 2), ({"model": "gpt-5-mini"}, 3), ({}, 2)],
)
async def test_profiles_the_small_model_and_the_default_work_on_each_route(
    gateway: Gateway, route: str, model: dict[str, str], tokens: int
) -> None:
    path, body, usage = ROUTES[route]
    answer = (await gateway.client.post(path, json=body | model)).json()

    assert answer["usage"][usage] == tokens
    assert answer["model"] == ("tiny" if tokens == 3 else "coder")


async def test_claude_codes_background_calls_go_to_the_small_model(gateway: Gateway) -> None:
    body = {"max_tokens": 4, "messages": HELLO}
    for name, model in (("claude-haiku-4-5-20251001", "tiny"), ("claude-opus-4-5", "coder"), (None, "coder")):
        asked = body if name is None else body | {"model": name}
        assert (await gateway.client.post("/v1/messages", json=asked)).json()["model"] == model


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize"])
async def test_tokens_are_counted_for_profiles_and_without_a_name(tmp_path: Path, path: str) -> None:
    body = {"input": "hi"} if "responses" in path else {"messages": HELLO}
    async with running(tmp_path, models=MODELS, server=SERVER, worker="talkative") as gateway:
        for model in ({"model": "coder:brief"}, {}):
            assert (await gateway.client.post(path, json=body | model)).status_code == 200


async def test_an_unknown_profile_is_a_404_of_the_dialect_with_the_known_ones(gateway: Gateway) -> None:
    message = "The model 'coder:nope' does not exist. Profiles of coder: brief."
    asked = {"model": "coder:nope", "messages": HELLO, "max_tokens": 3}
    chat = await gateway.client.post("/v1/chat/completions", json=asked)
    messages = await gateway.client.post("/v1/messages", json=asked)

    assert (chat.status_code, messages.status_code) == (404, 404)
    error = chat.json()["error"]
    assert (error["message"], error["code"], error["param"]) == (message, "model_not_found", "model")
    assert messages.json()["error"] == {"type": "not_found_error", "message": message}


async def test_without_a_default_a_model_must_be_named(tmp_path: Path) -> None:
    async with running(tmp_path, models=MODELS) as gateway:
        for path, body, _ in ROUTES.values():
            for model in ({}, {"model": ""}):
                refused = await gateway.client.post(path, json=body | model)
                assert refused.status_code == 400
                assert refused.json()["error"]["message"] == "Missing required parameter: 'model'."


async def test_profiles_are_listed_and_found_by_each_of_their_names(gateway: Gateway) -> None:
    listed = (await gateway.client.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == ["coder", "coder:brief", "tiny"]
    brief = listed[1]
    assert (brief["parent"], brief["aliases"]) == ("coder", ["gpt-4o:brief", "claude-*:brief"])
    assert "parent" not in listed[0]

    for name in ("coder:brief", "gpt-4o:brief", "default"):
        assert (await gateway.client.get(f"/v1/models/{name}")).json()["id"] == "coder:brief"
    assert (await gateway.client.get("/v1/models/coder:nope")).status_code == 404


async def test_a_key_for_one_model_reaches_no_other_by_a_profile_or_a_default(tmp_path: Path) -> None:
    key = Key(name="k", prefix="", salt="", hash="", models=("tiny", "coder:*"))
    secret = KeyFile(tmp_path / "keys" / "keys.json").create(key)[1]
    headers = {"authorization": f"Bearer {secret}"}
    async with running(tmp_path, models=MODELS, server=SERVER) as gateway:
        for name in ("coder:brief", "gpt-4o:brief", "claude-x:brief", "default", "coder:nope", ""):
            asked = {"model": name, "messages": HELLO, "max_tokens": 3}
            for path in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"):
                refused = await gateway.client.post(path, json=asked, headers=headers)
                assert refused.status_code == 404, (name, path)
                assert "brief" not in refused.json()["error"]["message"].replace(name, "")
        cards = (await gateway.client.get("/v1/models", headers=headers)).json()["data"]
        assert [card["id"] for card in cards] == ["tiny"]
        small = {"model": "gpt-5-mini", "messages": HELLO}
        assert (await gateway.client.post("/v1/chat/completions", json=small, headers=headers)).status_code == 200

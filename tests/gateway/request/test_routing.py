import json
from pathlib import Path

import pytest

from gateway.access.caller import OWNER, Caller
from gateway.config.names import Pattern
from gateway.config.settings import (
    FallbackConfig,
    ModelConfig,
    ProfileConfig,
    SamplingDefaults,
    ThinkingDefaults,
    UpstreamConfig,
)
from gateway.errors import BadRequest, ModelNotFound, Overloaded, Unavailable
from gateway.request.routing import Router


def router(**aliases: tuple[str, ...]) -> Router:
    return Router({name: ModelConfig(name=name, path=name, aliases=found) for name, found in aliases.items()})


def test_an_exact_name_beats_an_alias_beats_a_pattern() -> None:
    routes = router(a=("*",), b=("x-1",), c=("x-*",))

    assert routes.resolve("c", OWNER).name == "c"
    assert routes.resolve("x-1", OWNER).name == "b"
    assert routes.resolve("x-2", OWNER).name == "c"
    assert routes.resolve("anything", OWNER).name == "a"


def test_the_longest_literal_prefix_is_the_most_specific_pattern() -> None:
    routes = router(a=("claude-*",), b=("claude-haiku-*",), c=("*-haiku-*",), d=("claude-*-mini",))

    assert routes.resolve("claude-haiku-4-5", OWNER).name == "b"
    assert routes.resolve("claude-opus", OWNER).name == "a"
    assert routes.resolve("my-haiku-1", OWNER).name == "c"
    assert routes.resolve("claude-x-mini", OWNER).name == "d"


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("a*b", "ab", True),
        ("a*b", "axxb", True),
        ("a*b", "a", False),
        ("ab*ba", "aba", False),
        ("a*b*c", "a-b-c", True),
        ("a*b*c", "acb", False),
        ("*", "", True),
        ("**", "x", True),
        ("a.c*", "abc", False),
        ("[a]*", "[a]b", True),
    ],
)
def test_only_the_star_is_special(pattern: str, name: str, matches: bool) -> None:
    routes = router(m=(pattern,))
    if matches:
        assert routes.resolve(name, OWNER).name == "m"
    else:
        with pytest.raises(ModelNotFound):
            routes.resolve(name, OWNER)


def test_an_unknown_model_is_a_404_that_lists_what_exists() -> None:
    with pytest.raises(ModelNotFound) as caught:
        router(one=(), two=("alias",)).resolve("gpt-9", OWNER)

    error = caught.value
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert "'gpt-9'" in error.message
    assert "one, two" in error.message


def test_a_hostile_name_makes_neither_a_huge_message_nor_a_slow_match() -> None:
    with pytest.raises(ModelNotFound) as caught:
        router(m=("a*a*a*a*a*a*b",)).resolve("a" * 100_000, OWNER)

    assert len(caught.value.message) < 500


FAST = ProfileConfig(SamplingDefaults(temperature=0.2, max_tokens=7), ThinkingDefaults(enabled=False))


def profiled(default: str = "", small: str = "") -> Router:
    coder = ModelConfig(
        name="coder",
        path="no/such-model",
        aliases=("gpt-4o", "claude-*"),
        sampling=SamplingDefaults(temperature=0.7, top_k=20),
        thinking=ThinkingDefaults(effort="high"),
        profiles={"fast": FAST, "as-is": ProfileConfig()},
    )
    tiny = ModelConfig(name="tiny", path="no/such-model", aliases=("gpt-4o-mini", "local-*"))
    return Router({"coder": coder, "tiny": tiny}, default, small)


@pytest.mark.parametrize("name", ["coder:fast", "gpt-4o:fast", "claude-opus-4-5:fast"])
def test_a_profile_is_asked_for_with_any_name_of_its_model(name: str) -> None:
    model = profiled().resolve(name, OWNER)

    assert model.name == "coder"
    assert model.sampling == SamplingDefaults(temperature=0.2, top_k=20, max_tokens=7)
    assert model.thinking == ThinkingDefaults(enabled=False, effort="high")


def test_without_a_profile_the_models_own_defaults_count() -> None:
    assert profiled().resolve("coder", OWNER).sampling.temperature == 0.7
    assert profiled().resolve("coder:as-is", OWNER).sampling.temperature == 0.7


def test_an_unknown_profile_is_a_404_that_names_the_known_ones() -> None:
    for name in ("coder:fats", "gpt-4o:fats"):
        with pytest.raises(ModelNotFound) as caught:
            profiled().resolve(name, OWNER)
        assert caught.value.message == f"The model '{name}' does not exist. Profiles of coder: fast, as-is."

    # Of a model without any, it is just a name that nobody has.
    with pytest.raises(ModelNotFound, match="Models here: coder, tiny"):
        profiled().resolve("tiny:fast", OWNER)


def test_a_name_with_a_colon_that_a_pattern_matches_is_any_text_when_it_is_no_profile() -> None:
    assert profiled().resolve("claude-v1:0", OWNER).sampling.temperature == 0.7
    assert profiled().resolve("local-a:latest", OWNER).name == "tiny"


@pytest.mark.parametrize("name", ["coder:latest", "gpt-4o:latest", "tiny:latest"])
def test_the_tag_latest_is_no_profile_unless_one_has_that_name(name: str) -> None:
    model = profiled().resolve(name, OWNER)

    assert model == profiled().resolve(name.removesuffix(":latest"), OWNER)
    latest = ModelConfig(name="a", path="a", profiles={"latest": FAST})
    assert Router({"a": latest}).resolve("a:latest", OWNER).sampling.temperature == FAST.sampling.temperature


def test_an_exact_alias_with_a_colon_beats_a_profile() -> None:
    a = ModelConfig(name="a", path="a", profiles={"8b": FAST})
    routes = Router({"a": a, "b": ModelConfig(name="b", path="b", aliases=("a:9b",))})

    assert routes.resolve("a:9b", OWNER).name == "b"
    assert routes.resolve("a:8b", OWNER).name == "a"


def test_a_profile_opens_no_model_to_a_key_that_may_not_use_it() -> None:
    tiny_only = Caller("k", (Pattern("tiny"), Pattern("coder:*"), Pattern("*:fast")))
    for name in ("coder:fast", "coder:none-such", "gpt-4o:fast", "claude-x:fast"):
        with pytest.raises(ModelNotFound) as caught:
            profiled().resolve(name, tiny_only)
        assert caught.value.message == f"The model '{name}' does not exist. Models here: tiny."

    assert profiled().resolve("coder:fast", Caller("k", (Pattern("gpt-*"),))).name == "coder"


def test_a_request_without_a_name_goes_to_the_default_if_there_is_one() -> None:
    for name in ("", "default"):
        assert profiled(default="coder:fast").resolve(name, OWNER).sampling.max_tokens == 7
    with pytest.raises(BadRequest) as caught:
        profiled().resolve("", OWNER)
    assert (caught.value.param, caught.value.code) == ("model", "missing_required_parameter")
    with pytest.raises(ModelNotFound):
        profiled().resolve("default", OWNER)
    with pytest.raises(ModelNotFound):
        profiled(default="coder").resolve("unheard-of", OWNER)


def test_an_alias_named_default_is_stronger_than_the_servers_default_and_a_star_is_weaker() -> None:
    routes = Router(
        {
            "a": ModelConfig(name="a", path="a", aliases=("default",)),
            "b": ModelConfig(name="b", path="b"),
            "c": ModelConfig(name="c", path="c", aliases=("*",)),
        },
        default="b",
    )

    assert routes.resolve("default", OWNER).name == "a"
    assert routes.resolve("", OWNER).name == "b"
    assert routes.resolve("anything", OWNER).name == "c"


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("claude-haiku-4-5-20251001", "tiny"),
        ("claude-3-5-haiku-20241022", "tiny"),
        ("gpt-5-mini", "tiny"),
        ("gpt-4.1-nano-2025-04-14", "tiny"),
        ("claude-opus-4-5", "coder"),
        ("gpt-4o", "coder"),
    ],
)
def test_small_models_of_vendors_go_to_the_small_model(name: str, owner: str) -> None:
    assert profiled(small="tiny").resolve(name, OWNER).name == owner


def test_an_alias_that_is_as_specific_beats_the_small_model() -> None:
    routes = Router(
        {
            "a": ModelConfig(name="a", path="a"),
            "b": ModelConfig(name="b", path="b", aliases=("gpt-5-mini", "claude-haiku-*", "gpt-4*")),
        },
        small="a",
    )

    assert routes.resolve("gpt-5-mini", OWNER).name == "b"
    assert routes.resolve("claude-haiku-4-5", OWNER).name == "b"
    assert routes.resolve("gpt-4o-mini", OWNER).name == "b"
    assert routes.resolve("gpt-5-nano", OWNER).name == "a"


def test_a_models_own_generation_config_counts_where_the_configuration_is_silent(tmp_path: Path) -> None:
    own = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "max_new_tokens": 5, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    model = ModelConfig(
        name="m",
        path=str(tmp_path),
        sampling=SamplingDefaults(top_k=0),
        profiles={"cold": FAST, "same": ProfileConfig()},
    )
    routes = Router({"m": model})

    assert routes.resolve("m", OWNER).sampling == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=0)
    assert routes.resolve("m:same", OWNER).sampling == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=0)
    assert routes.resolve("m:cold", OWNER).sampling.temperature == 0.2


def test_a_top_p_of_zero_is_a_default_like_others(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_p": 0, "temperature": 0.6}')
    model = ModelConfig(name="m", path=str(tmp_path))

    assert Router({"m": model}).resolve("m", OWNER).sampling == SamplingDefaults(temperature=0.6, top_p=0)


def test_one_value_that_makes_no_sense_does_not_take_the_others_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = {"temperature": "0.6", "top_p": 2, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    routes = Router({"m": ModelConfig(name="m", path=str(tmp_path))})

    assert routes.resolve("m", OWNER).sampling == SamplingDefaults(min_p=0.1, repetition_penalty=1.1)
    assert [record.message.split()[0] for record in caplog.records] == ["temperature", "top_p", "top_k"]


def test_the_generation_config_is_read_again_for_each_load_and_not_while_the_model_is_ready(tmp_path: Path) -> None:
    file, ready_epoch = tmp_path / "generation_config.json", 0
    model = ModelConfig(name="m", path=str(tmp_path), profiles={"same": ProfileConfig()})
    routes = Router({"m": model}, ready_epoch=lambda _: ready_epoch)

    def temperatures(written: float) -> set[float | None]:
        file.write_text(json.dumps({"temperature": written}))
        return {routes.resolve(name, OWNER).sampling.temperature for name in ("m", "m:same")}

    assert routes.resolve("m", OWNER).sampling == SamplingDefaults()
    assert temperatures(0.5) == {0.5}
    ready_epoch = 1
    assert temperatures(0.25) == {0.25}, "the load read the file too"
    assert temperatures(0.125) == {0.25}
    ready_epoch = 2
    assert temperatures(0.75) == {0.75}
    ready_epoch = 0
    assert temperatures(1.5) == {1.5}


@pytest.mark.parametrize("text", ["{", "[]", '{"temperature": "hot"}', '{"top_p": 7}'])
def test_a_generation_config_that_makes_no_sense_is_not_used(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)

    assert Router({"m": ModelConfig(name="m", path=str(tmp_path))}).resolve("m", OWNER).sampling == SamplingDefaults()


CLOUD = UpstreamConfig(name="cloud", url="https://a/v1", models={"m": "vendor/m", "far": "vendor/far"})


def test_a_model_of_upstreams_alone_is_theirs_for_whoever_may_use_it() -> None:
    routes = Router({"m": ModelConfig(name="m", path="m")}, upstreams={"cloud": CLOUD})

    assert routes.upstreams_of("far", OWNER) == [CLOUD]
    assert routes.upstreams_of("m", OWNER) == []
    assert routes.upstreams_of("nowhere", OWNER) == []
    assert routes.upstreams_of("far", Caller(key="k", models=(Pattern("m"),))) == []


def test_a_request_falls_back_in_the_cases_and_to_the_upstreams_that_its_model_names() -> None:
    fallback = FallbackConfig(to=("cloud",), when=("queue",))
    model = ModelConfig(name="m", path="m", aliases=("alias",), fallback=fallback)
    routes = Router({"m": model, "other": ModelConfig(name="other", path="o")}, upstreams={"cloud": CLOUD})
    full, lost = Overloaded("full", 1.0), Unavailable("lost")

    assert routes.fallback("alias", OWNER, "openai", full) == ("m", [CLOUD])
    assert routes.fallback("m", OWNER, "anthropic", full)[1] == []
    assert routes.fallback("m", OWNER, "openai", lost)[1] == []
    assert routes.fallback("other", OWNER, "openai", full)[1] == []
    assert routes.fallback("m", Caller(key="k"), "openai", full)[1] == []

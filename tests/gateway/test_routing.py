import pytest

from gateway.caller import OWNER
from gateway.config import ModelConfig
from gateway.errors import ModelNotFound
from gateway.routing import Router


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

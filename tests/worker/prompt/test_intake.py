"""Requests to rows: whatever a request holds, it becomes a row that is safe to run, or `RequestInvalid`."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from protocol.failures import Code, Failure
from protocol.to_worker import ChatPrompt, Generate, Prompt, Sampling, TextPrompt, Tokenize, TokensPrompt
from tests.support.engine import EngineHarness, spec
from tests.support.models import VOCAB, build
from tests.support.scale import scaled
from worker.engine.row import Row
from worker.errors import RequestInvalid
from worker.model.loader import load
from worker.prompt.intake import Intake
from worker.sampling.penalties import processors

CONTEXT = 64


@pytest.fixture(scope="module")
def intake(model_folder: Callable[[str], Path]) -> Intake:
    return Intake(load(spec(model_folder("qwen3"), context=CONTEXT), lambda *_: None))


def row(intake: Intake, prompt: Prompt, sampling: Sampling | None = None, **settings: Any) -> Row:
    return intake.row(Generate(1, prompt, sampling or Sampling(), **settings), time.monotonic())


def refused(intake: Intake, prompt: Prompt, sampling: Sampling | None = None, **settings: Any) -> Failure:
    with pytest.raises(RequestInvalid) as caught:
        row(intake, prompt, sampling, **settings)
    return caught.value.failure


def chat(*messages: dict[str, Any], **settings: Any) -> ChatPrompt:
    return ChatPrompt(list(messages), **settings)


USER = {"role": "user", "content": "kato mira"}


def test_no_draft_holds_a_token_that_the_tokenizer_knows_and_the_model_does_not(
    intake: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "kato mira"
    whole = row(intake, TokensPrompt((1,)), prediction=text).drafting.prediction
    known = sorted(set(whole))[-1]  # the highest id of the text is the first that the model does not know
    monkeypatch.setattr(intake._words, "_vocab_size", known)
    cut = row(intake, TokensPrompt((1,)), prediction=text).drafting.prediction
    assert len(cut) == len(whole)
    assert -1 in cut
    assert all(token < known for token in cut)


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31, 2**31 - 1, -(2**63), 2**63])
def test_prompt_ids_beyond_the_vocabulary_are_refused(intake: Intake, token: int) -> None:
    failure = refused(intake, TokensPrompt((1, token, 2)))
    assert (failure.code, failure.param) == (Code.INVALID_REQUEST, "prompt")
    assert str(token) in failure.message


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
def test_ids_to_resume_from_beyond_the_vocabulary_are_refused(intake: Intake, token: int) -> None:
    failure = refused(intake, TokensPrompt((1,)), resume=(3, token))
    assert (failure.code, failure.param) == (Code.INVALID_REQUEST, "resume")


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31, 2**63])
def test_bias_ids_beyond_the_vocabulary_are_refused(intake: Intake, token: int) -> None:
    failure = refused(intake, TokensPrompt((1,)), Sampling(logit_bias={3: 1.0, token: 1.0}))
    assert (failure.code, failure.param) == (Code.INVALID_REQUEST, "logit_bias")


def test_a_top_k_beyond_the_vocabulary_is_allowed(intake: Intake) -> None:
    assert row(intake, TokensPrompt((1,)), Sampling(top_k=2**40)).sampling.top_k == 2**40


def test_top_logprobs_beyond_the_vocabulary_are_refused(intake: Intake) -> None:
    assert refused(intake, TokensPrompt((1,)), top_logprobs=VOCAB + 1).param == "top_logprobs"


def test_of_several_faults_that_of_the_earliest_step_is_reported(intake: Intake) -> None:
    """Parameters, adapter, prompt, ids to resume from, sparse prefill, room, and tokens that may come."""
    ends = Sampling(min_tokens=1, allowed_ids=intake._limits.eos_ids)
    request = Generate(99, TokensPrompt((1,)), ends)
    for fault, param, code in (
        ({}, "min_tokens", Code.INVALID_REQUEST),
        ({"prompt": TokensPrompt((1,) * CONTEXT)}, "prompt", Code.CONTEXT_LENGTH_EXCEEDED),
        ({"sparse_keep": 0.5}, "sparse_prefill", Code.INVALID_REQUEST),
        ({"resume": (-1,)}, "resume", Code.INVALID_REQUEST),
        ({"prompt": TokensPrompt((-1,) * CONTEXT)}, "prompt", Code.INVALID_REQUEST),
        ({"adapter": "none"}, "model", Code.UNSUPPORTED),
        ({"sampling": structs.replace(ends, stop_ids=(-1,))}, "stop_token_ids", Code.INVALID_REQUEST),
    ):
        request = structs.replace(request, **fault)
        with pytest.raises(RequestInvalid) as caught:
            intake.row(request, 0.0)
        assert (caught.value.failure.param, caught.value.failure.code) == (param, code)
    assert not intake.recent.until(99), "a refused request leaves nothing"


def test_every_limit_itself_is_allowed(intake: Intake) -> None:
    sampling = Sampling(top_k=VOCAB, logit_bias={0: -100.0, VOCAB - 1: 100.0})
    made = row(intake, TokensPrompt((0, VOCAB - 1)), sampling, top_logprobs=VOCAB, max_tokens=0)
    assert made.prompt == [0, VOCAB - 1]
    assert made.max_tokens == 0


@pytest.mark.parametrize("prompt", [TokensPrompt(()), TextPrompt("")])
def test_an_empty_prompt_is_refused(intake: Intake, prompt: Prompt) -> None:
    failure = refused(intake, prompt)
    assert (failure.code, failure.param) == (Code.INVALID_REQUEST, "prompt")


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (TokensPrompt((5,) * CONTEXT), "prompt"),
        (TextPrompt("xyz " * CONTEXT), "prompt"),
        (chat({"role": "user", "content": "xyz " * CONTEXT}), "messages"),
    ],
)
def test_a_prompt_that_leaves_no_room_is_refused_in_the_words_clients_know(
    intake: Intake, prompt: Prompt, param: str
) -> None:
    failure = refused(intake, prompt)
    assert (failure.code, failure.param) == (Code.CONTEXT_LENGTH_EXCEEDED, param)
    assert f"maximum context length is {CONTEXT} tokens" in failure.message


def test_a_prompt_of_megabytes_is_refused_by_its_beginning(intake: Intake) -> None:
    failure = refused(intake, TextPrompt("kato mira " * 3_000_000))
    assert failure.code is Code.CONTEXT_LENGTH_EXCEEDED
    assert "at least" in failure.message


def test_a_long_text_of_few_tokens_is_not_refused_for_its_letters(intake: Intake) -> None:
    tokenizer = intake.vocabulary
    longest = max(range(7, VOCAB), key=lambda token: len(tokenizer.token_bytes(token)))
    text = tokenizer.token_bytes(longest).decode() * (CONTEXT - 4)
    made = row(intake, TextPrompt(text))
    assert len(text) > 8 * CONTEXT
    assert len(made.prompt) < CONTEXT


def test_lengths_are_clamped_to_what_is_left_of_the_context(intake: Intake) -> None:
    assert row(intake, TokensPrompt((5,) * 60), max_tokens=2**40).max_tokens == 4
    assert row(intake, TokensPrompt((5,) * 60)).max_tokens == 4
    assert row(intake, TokensPrompt((5,) * 60), max_tokens=3).max_tokens == 3


@pytest.mark.parametrize(
    "text", ["kato mira", " leading", "né 日本 🙂", "<|im_start|>user\n<|im_end|>", "\x00\n\t", "a" * 40]
)
def test_text_is_encoded_as_the_tokenizer_does_by_default(intake: Intake, text: str, model_folder: Any) -> None:
    tokenizer = load(spec(model_folder("qwen3")), lambda *_: None).tokenizer
    assert row(intake, TextPrompt(text)).prompt == tokenizer.encode(text)


def test_special_tokens_around_a_text_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    folder = build("qwen3", tmp_path / "bos")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    added = ("<|im_start|>", tokenizer.token_to_id("<|im_start|>"))
    tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[added])
    tokenizer.save(str(folder / "tokenizer.json"))
    made = Intake(load(spec(folder), lambda *_: None))

    usual, bare = TextPrompt("kato mira"), TextPrompt("kato mira", adds_special=False)
    assert row(made, usual).prompt == [added[1], *row(made, bare).prompt]
    asked = [made.tokenize(Tokenize(1, prompt, True), lambda: True) for prompt in (usual, bare)]
    assert [list(each.ids) for each in asked if each] == [row(made, usual).prompt, row(made, bare).prompt]


def test_chats_are_rendered_by_the_template(intake: Intake) -> None:
    made = row(intake, chat(USER), echo=True)
    assert made.report.echo == "<|im_start|>user\nkato mira<|im_end|>\n<|im_start|>assistant\n"


def test_the_last_message_can_be_continued(intake: Intake) -> None:
    open_ended = chat(USER, {"role": "assistant", "content": "sen"}, continue_final=True)
    assert row(intake, open_ended, echo=True).report.echo.endswith("assistant\nsen")


def test_what_the_template_refuses_is_refused_in_its_words(intake: Intake) -> None:
    failure = refused(intake, chat({"role": "wizard", "content": "x"}))
    assert (failure.code, failure.param) == (Code.TEMPLATE_ERROR, "messages")
    assert "unknown role wizard" in failure.message


@pytest.mark.parametrize(
    "prompt",
    [
        chat({"role": 5, "content": "x"}),
        chat({"role": None, "content": "x"}),
        chat({"content": "x"}),
        chat({"role": "user", "content": 5}),
        chat({"role": "user", "content": {"a": 1}}),
        chat({"role": "user", "content": [{"type": "text", "text": "x"}]}),
        chat({"role": ["user"], "content": "x"}),
        chat(continue_final=True),
        chat({"role": "user"}, continue_final=True),
        chat({"role": "user", "content": []}, continue_final=True),
        chat({"role": "user", "content": [5]}, continue_final=True),
        chat({"role": "user", "content": 5}, continue_final=True),
        chat(USER, template_kwargs={"messages": []}),
        chat(USER, template_kwargs={"tools": 5, "add_generation_prompt": 1}),
    ],
)
def test_messages_of_a_bad_shape_are_refused(intake: Intake, prompt: ChatPrompt) -> None:
    failure = refused(intake, prompt)
    assert (failure.code, failure.param) == (Code.TEMPLATE_ERROR, "messages")


@pytest.mark.parametrize(
    "prompt",
    [chat(USER, template_kwargs={"messages": []}), chat({"role": "user", "content": 5}, continue_final=True)],
)
def test_errors_of_python_are_for_the_log(intake: Intake, prompt: ChatPrompt) -> None:
    failure = refused(intake, prompt)
    assert failure.message == "the model's chat template refused the messages"
    assert "Error(" in failure.detail


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from(["role", "content", "name", "tool_calls", "reasoning_content", "tool_call_id"])
roles = st.sampled_from(["system", "user", "assistant", "tool"])
messages = st.dictionaries(fields, plain, max_size=4) | st.fixed_dictionaries(
    {"role": roles}, optional={"content": plain, "tool_calls": plain}
)


@settings(max_examples=scaled(150, 60), deadline=None)
@given(
    st.lists(messages, max_size=3),
    st.lists(st.dictionaries(st.text(max_size=5), plain, max_size=3), max_size=2),
    st.dictionaries(
        st.text(max_size=8) | st.sampled_from(["enable_thinking", "tokenize", "documents", "bos_token"]),
        plain,
        max_size=2,
    ),
    st.booleans(),
)
def test_any_messages_become_a_row_or_are_refused(
    intake: Intake, given_messages: list[Any], tools: list[Any], kwargs: dict[str, Any], is_continued: bool
) -> None:
    try:
        made = row(intake, ChatPrompt(given_messages, tools, kwargs, is_continued))
    except RequestInvalid:
        return
    assert 0 < len(made.prompt) < CONTEXT


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    folder = build("qwen3", tmp_path / "evil")
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    made = Intake(load(spec(folder), lambda *_: None))
    assert refused(made, chat(USER)).code is Code.TEMPLATE_ERROR


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{% for", "{{ x.y.z }}", "{{ 'a' * 2 | foo }}", "{{ 5 | length }}"]
)
def test_a_broken_template_refuses_the_request_and_not_the_model(tmp_path: Path, template: str) -> None:
    folder = build("qwen3", tmp_path / "broken")
    (folder / "chat_template.jinja").write_text(template)
    made = Intake(load(spec(folder), lambda *_: None))
    assert refused(made, chat(USER)).code is Code.TEMPLATE_ERROR
    assert row(made, TextPrompt("kato")).prompt


def test_a_model_without_a_template_says_so_and_completes_text(tmp_path: Path) -> None:
    folder = build("qwen3", tmp_path / "bare")
    (folder / "chat_template.jinja").unlink()
    made = Intake(load(spec(folder), lambda *_: None))
    assert not made.media.renderer.has_template
    assert refused(made, chat(USER)).code is Code.UNSUPPORTED
    assert row(made, TextPrompt("kato")).prompt


# -- what passes is safe to run --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(model_folder: Callable[[str], Path]) -> Iterator[EngineHarness]:
    with EngineHarness(spec(model_folder("qwen3"), context=256)) as harness:
        yield harness


extreme = st.sampled_from([0.0, 1.0, -1.0, 1e-45, 1e308, -1e308, math.inf, -math.inf, math.nan]) | st.floats()


@settings(max_examples=scaled(40, 16), deadline=None)
@given(st.data())
def test_no_value_of_any_parameter_stops_the_engine_or_makes_an_id_that_is_none(
    engine: EngineHarness, data: st.DataObject
) -> None:
    numbers = [data.draw(extreme) for _ in range(6)]
    bias = data.draw(st.dictionaries(st.integers(-1, VOCAB), extreme, max_size=3))
    seed = data.draw(st.integers(-(2**63), 2**64 - 1))
    top_k = data.draw(st.integers(-1, VOCAB + 1))
    temperature, top_p, min_p, *penalties = numbers
    sampling = Sampling(temperature, top_p, top_k, min_p, *penalties, bias, seed, data.draw(st.booleans()))
    rid = len(engine.results) + 1
    prompt = TokensPrompt(tuple(data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3))))
    top = data.draw(st.none() | st.integers(0, VOCAB))
    resume = tuple(data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=6)))
    limit = data.draw(st.none() | st.integers(-1, 4))
    limit = 4 if limit is None else limit
    (result,) = engine.run([Generate(rid, prompt, sampling, limit, top_logprobs=top, resume=resume)])
    assert engine.error is None
    assert result.terminals == 1
    assert all(0 <= token < VOCAB for token in result.ids)


def test_a_successor_gives_calls_the_same_ids_and_another_answer_gives_others(
    model_folder: Callable[[str], Path],
) -> None:
    intake = Intake(load(spec(model_folder("qwen3"), context=1024), lambda *_: None))
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    raw = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2

    def ids(rid: int) -> list[str]:
        made = intake.row(Generate(rid, chat(USER, tools=[tool]), Sampling(seed=5)), time.monotonic())
        assert made.text.parser is not None
        made.text.parser.ignore_controls()
        return [event.tool.call_id for event in made.text.parser.feed(raw) if event.tool and event.tool.name]

    assert ids(1) == ids(1)
    assert len({*ids(1), *ids(2)}) == 4


def test_a_bias_of_a_text_is_one_of_each_of_its_tokens_beside_those_of_ids(intake: Intake) -> None:
    ids = row(intake, TextPrompt("kato mira")).prompt
    own = row(
        intake, TokensPrompt((1,)), Sampling(logit_bias={ids[0]: 1.0}, bias_texts=(("kato mira", 2.0), ("", 1.0)))
    )
    assert own.words.bias == tuple((token, 2.0) for token in ids)
    (bias,) = processors(own.sampling, 1, own.words)
    logits: Any = bias(mx.array([1]), mx.zeros((1, VOCAB)))[0].tolist()
    expected = {token: 2.0 * ids.count(token) + (token == ids[0]) for token in ids}
    assert {at: value for at, value in enumerate(logits) if value} == expected


def test_special_tokens_have_text_for_requests_that_want_it_and_for_no_others(intake: Intake) -> None:
    (special,) = intake.vocabulary.hidden & {row(intake, chat(USER)).prompt[0]}
    for shows, prompt in itertools.product((True, False), (TokensPrompt((1,)), chat(USER))):
        detokenizer = row(intake, prompt, shows_special=shows).text.detokenizer
        text = "".join(detokenizer.add(token) for token in (special, 20)) + detokenizer.finish()
        assert (intake.vocabulary.decode([special]) in text) is shows

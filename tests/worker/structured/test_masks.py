"""Constrained rows: what comes out fits, is the row's own, and costs its companions nothing."""

import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from protocol.failures import Code
from protocol.from_worker import DeltaKind, Finish
from protocol.to_worker import ChatPrompt, Constraint, ConstraintKind, Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, Result, spec
from tests.support.models import ARCHITECTURES, TEMPLATE, Breakable, build
from tests.support.scale import patient, scaled
from tests.support.sequences import sequence_of
from worker.engine import batch
from worker.structured import masks as constrain
from worker.structured.grammar_compiler import lark_json

KIND = ConstraintKind
GREEDY = Sampling(temperature=0.0)
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LIST = Constraint(KIND.JSON_SCHEMA, json.dumps({"type": "array", "items": PERSON, "minItems": 40}))


def schema(document: dict[str, Any]) -> Constraint:
    return Constraint(KIND.JSON_SCHEMA, json.dumps(document))


def generate(rid: int, constraint: Constraint | None, sampling: Sampling = GREEDY, **settings: Any) -> Generate:
    settings = {"max_tokens": 120, **settings}
    return Generate(rid, TokensPrompt((20, 30, 40 + rid)), sampling, constraint=constraint, **settings)


def is_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), PERSON)
    return True


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


CASES: list[tuple[str, Constraint, Callable[[str], Any]]] = [
    ("schema", schema(PERSON), is_person),
    ("object", Constraint(KIND.JSON_OBJECT), is_object),
    # Not \d: a grammar may know digits that are newer than Python's tables.
    ("regex", Constraint(KIND.REGEX, r"[a-f]{3}-[0-9]{2,4}"), re.compile(r"[a-f]{3}-[0-9]{2,4}").fullmatch),
    ("lark", Constraint(KIND.GRAMMAR, 'start: "a" (B | "c")+ "."\nB: /[0-9]/'), re.compile(r"a([\dc])+\.").fullmatch),
    ("gbnf", Constraint(KIND.GRAMMAR, 'root ::= "x" | "yy" [0-9]'), re.compile(r"x|yy\d").fullmatch),
    ("choice", Constraint(KIND.CHOICE, '["yes", "no", "né 🙂"]'), ("yes", "no", "né 🙂").__contains__),
]  # fmt: skip


@pytest.mark.parametrize(("constraint", "fits"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_every_answer_fits_unless_it_was_cut(
    constraint: Constraint, fits: Callable[[str], Any], model_folder: Callable[[str], Path]
) -> None:
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        hot = [generate(rid, constraint, Sampling(temperature=1.5, seed=rid)) for rid in range(1, 9)]
        results = engine.run([generate(0, constraint), *hot])
    assert all(result.finish in (Finish.STOP, Finish.LENGTH) for result in results)
    ended = [result for result in results if result.finish is Finish.STOP]
    assert ended
    assert all(fits(result.text) for result in ended), [result.text for result in ended]


def test_an_answer_cut_by_max_tokens_says_so(model_folder: Callable[[str], Path]) -> None:
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        (result,) = engine.run([generate(1, LIST, max_tokens=10)])
    assert result.finish is Finish.LENGTH
    assert len(result.ids) == 10


def mixed() -> list[Generate]:
    """Free and constrained rows with all that sampling knows."""
    full = Sampling(
        temperature=1.2, top_k=20, top_p=0.95, min_p=0.01, frequency_penalty=0.4, repetition_penalty=1.1,
        presence_penalty=0.2, logit_bias={70: 2.0, 71: -100.0}, seed=11,
    )  # fmt: skip
    return [
        generate(1, None),
        generate(2, LIST, max_tokens=60),
        generate(3, schema(PERSON), Sampling(temperature=1.0, seed=5)),
        generate(4, None, Sampling(temperature=1.0, seed=6), max_tokens=50),
        generate(5, Constraint(KIND.REGEX, "([a-z]{2,5} ){30}"), full),
        generate(6, Constraint(KIND.CHOICE, '["red", "green", "blue"]'), full),
        generate(7, None, full),
    ]


def tokens(result: Result) -> tuple[object, ...]:
    return result.ids, result.text, result.finish


@pytest.mark.parametrize("architecture", scaled(list(ARCHITECTURES), ["gemma3_text"]))
def test_free_and_constrained_rows_together_equal_each_alone(
    architecture: str, model_folder: Callable[[str], Path]
) -> None:
    with EngineHarness(spec(model_folder(architecture), prefill_chunk=64)) as engine:
        alone = [tokens(engine.run([request])[0]) for request in mixed()]
        together = [tokens(result) for result in engine.run(mixed())]
    assert together == alone


def test_a_rebuilt_batch_goes_on_where_each_grammar_was(model_folder: Callable[[str], Path]) -> None:
    with EngineHarness(spec(model_folder("qwen3")), wrap=Breakable) as engine:
        alone = [tokens(engine.run([request])[0]) for request in mixed()]
        results = [engine.submit(request) for request in mixed()]
        engine.wait(lambda: len(results[1].ids) > 20)
        engine.loaded.model.faults = 1
        engine.wait(lambda: all(result.terminals for result in results))
    assert [tokens(result) for result in results] == alone


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "qwen3_5"])
def test_rows_whose_masks_are_always_late_keep_their_tokens(
    architecture: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with EngineHarness(spec(model_folder(architecture))) as engine:
        alone = [tokens(engine.run([request])[0]) for request in mixed()]
        monkeypatch.setattr(constrain, "MAX_PATIENCE_S", 0.0)
        parked: list[int] = []
        park = batch.Batch._park

        def counting(self: batch.Batch) -> None:
            park(self)
            parked.append(len(self._parked))

        monkeypatch.setattr(batch.Batch, "_park", counting)
        together = [tokens(result) for result in engine.run(mixed())]
    assert max(parked) > 0, "the test is about rows that are taken out"
    assert together == alone


def test_a_slow_grammar_does_not_hold_up_the_other_rows(model_folder: Callable[[str], Path]) -> None:
    release = threading.Event()

    class Stuck:
        """A grammar whose compiler never comes back."""

        deviations = ()

        def walk(self) -> Any:
            release.wait(patient(60))
            raise RuntimeError("released")

    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        alone = tokens(engine.run([generate(1, None)])[0])
        row = engine.intake.row(generate(2, None), 0.0)
        engine.intake.rules.constrain(row, Constraint(KIND.CHOICE, '["a"]'))
        assert row.rule is not None
        object.__setattr__(row.rule, "grammar", Stuck())
        stuck = engine.submit_row(row)
        free = engine.run([generate(1, None)])[0]
        assert tokens(free) == alone
        assert not stuck.terminals
        release.set()
        engine.wait(lambda: stuck.terminals == 1)
    assert stuck.failure is not None
    assert stuck.failure.code is Code.ROW_FAILED


def test_a_prefix_from_the_cache_changes_nothing(model_folder: Callable[[str], Path]) -> None:
    prompt = TokensPrompt(tuple(range(20, 200)))
    request = Generate(1, prompt, GREEDY, max_tokens=80, constraint=schema(PERSON))
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        first, second = engine.run([request])[0], engine.run([request])[0]
    assert second.usage is not None
    assert second.usage.cached > 100
    assert tokens(first) == tokens(second)


@pytest.mark.parametrize("done", [1, 5, 20])
def test_a_resumed_request_goes_on_in_its_grammar(done: int, model_folder: Callable[[str], Path]) -> None:
    request = generate(1, LIST, Sampling(temperature=1.0, seed=9), max_tokens=60)
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        whole = engine.run([request])[0]
        resumed = engine.run([generate(1, LIST, request.sampling, max_tokens=60, resume=tuple(whole.ids[:done]))])[0]
    assert whole.ids[:done] + resumed.ids == whole.ids


def test_a_resume_that_does_not_fit_fails_its_row_alone(model_folder: Callable[[str], Path]) -> None:
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        bad, good = engine.run([generate(1, LIST, resume=(20, 21)), generate(2, None)])
    assert bad.failure is not None
    assert bad.failure.code is Code.ROW_FAILED
    assert good.finish is Finish.LENGTH


def test_stop_strings_cut_constrained_text(model_folder: Callable[[str], Path]) -> None:
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        (result,) = engine.run([generate(1, LIST, stop=('"age"',))])
    assert result.finish is Finish.STOP
    assert '"age"' not in result.text
    assert "name" in result.text


def test_logprobs_are_those_of_the_tokens_that_were_possible(model_folder: Callable[[str], Path]) -> None:
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        (result,) = engine.run([generate(1, Constraint(KIND.REGEX, "[ab]{6}"), top_logprobs=5)])
    assert len(result.logprobs) == len(result.ids)
    for entry in result.logprobs:
        assert entry.top[0][0] == entry.token, "greedy takes the likeliest"
        assert 1 <= len(entry.top) <= 5
        assert all(-100 < logprob <= 0 and set(text) <= set(b"ab") for text, logprob in entry.top)


def test_the_end_is_allowed_exactly_when_the_grammar_is_complete(model_folder: Callable[[str], Path]) -> None:
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        (eos,) = engine.loaded.eos_ids
        eager = Sampling(temperature=0.0, logit_bias={eos: 100.0})
        longest = Sampling(temperature=0.0, ignore_eos=True)
        regex = Constraint(KIND.REGEX, "a{2,7}")
        short, long = engine.run([generate(1, regex, eager), generate(2, regex, longest)])
    assert (short.text, short.finish) == ("aa", Finish.STOP)
    assert (long.text, long.finish) == ("aaaaaaa", Finish.STOP)


def test_special_tokens_can_be_forced_around_json(model_folder: Callable[[str], Path]) -> None:
    call = {
        "type": "object",
        "properties": {"name": {"const": "f"}, "arguments": PERSON},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        begin, end = (engine.loaded.tokenizer.convert_tokens_to_ids(text) for text in ("<tool_call>", "</tool_call>"))
        lark = f'start: <tool_call> "\\n" call "\\n" <[{end}]>\ncall: {lark_json(call)}'
        (result,) = engine.run([generate(1, Constraint(KIND.GRAMMAR, lark))])
    assert result.finish is Finish.STOP
    assert (result.ids[0], result.ids[-1]) == (begin, end)
    assert is_person(json.dumps(json.loads(result.text)["arguments"]))


# -- reasoning ---------------------------------------------------------------------------------------------------------


def thinking(engine: EngineHarness, opened: str, rid: int = 1, seed: int = 3, **settings: Any) -> Generate:
    """A prompt that ends as `opened` says, for a constraint that spares the reasoning."""
    ids = engine.loaded.tokenizer.encode("<|im_start|>assistant\n" + opened, add_special_tokens=False)
    constraint = Constraint(KIND.REGEX, "[ab]{3}", after_reasoning=True)
    return Generate(
        rid, TokensPrompt(tuple(ids)), Sampling(temperature=1.0, seed=seed, **settings), max_tokens=400,
        constraint=constraint,
    )  # fmt: skip


def marks(engine: EngineHarness) -> tuple[int, int]:
    opener, closer = (engine.loaded.tokenizer.convert_tokens_to_ids(text) for text in ("<think>", "</think>"))
    return opener, closer


def answer(engine: EngineHarness, ids: Sequence[int]) -> str:
    return engine.loaded.tokenizer.decode(list(ids))


def test_the_constraint_begins_after_a_block_that_the_prompt_opened(model_folder: Callable[[str], Path]) -> None:
    with EngineHarness(spec(model_folder("qwen3"), parser="think")) as engine:
        _, closer = marks(engine)
        results = engine.run([thinking(engine, "<think>\n", rid, seed=rid) for rid in range(8)])
        closed = [result for result in results if closer in result.ids]
        assert closed
        for result in closed:
            at = result.ids.index(closer)
            assert at > 0, "the block is free"
            assert re.fullmatch("[ab]{3}", answer(engine, result.ids[at + 1 :]))
            assert result.finish is Finish.STOP
        assert all(result.finish is Finish.LENGTH for result in results if result not in closed)


def test_the_constraint_begins_at_once_after_a_block_that_the_prompt_closed(
    model_folder: Callable[[str], Path],
) -> None:
    with EngineHarness(spec(model_folder("qwen3"), parser="think")) as engine:
        opener, _ = marks(engine)
        wish = {opener: 100.0}
        (result,) = engine.run([thinking(engine, "<think>\n\n</think>\n\n", logit_bias=wish)])
        assert re.fullmatch("[ab]{3}", answer(engine, result.ids))


@pytest.fixture(scope="module")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its template knows of reasoning, and leaves it to the model to begin with it."""
    folder = build("qwen3", tmp_path_factory.mktemp("hybrid"))
    closing = "{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    (folder / "chat_template.jinja").write_text(TEMPLATE + closing)
    return folder


def test_a_model_whose_template_knows_no_reasoning_answers_at_once(model_folder: Callable[[str], Path]) -> None:
    with EngineHarness(spec(model_folder("qwen3"), parser="think")) as engine:
        opener, _ = marks(engine)
        (result,) = engine.run([thinking(engine, "", logit_bias={opener: 100.0})])
        assert re.fullmatch("[ab]{3}", answer(engine, result.ids))


def test_a_model_may_open_the_block_itself_or_answer_at_once(hybrid_model: Path) -> None:
    with EngineHarness(spec(hybrid_model, parser="think")) as engine:
        opener, closer = marks(engine)
        eager, plain = engine.run(
            [
                thinking(engine, "", 1, logit_bias={opener: 50.0, closer: 6.0}),
                thinking(engine, "", 2, logit_bias={opener: -100.0}),
            ]
        )
        assert re.fullmatch("[ab]{3}", answer(engine, plain.ids))
        assert eager.ids[0] == opener
        if eager.finish is Finish.STOP:
            last = len(eager.ids) - 1 - eager.ids[::-1].index(closer)
            assert re.fullmatch("[ab]{3}", answer(engine, eager.ids[last + 1 :]))


def test_a_reasoning_budget_closes_the_block_and_the_answer_fits(tmp_path: Path) -> None:
    folder = build("qwen3", tmp_path / "thinking")
    opening = TEMPLATE.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
    (folder / "chat_template.jinja").write_text(opening)
    constraint = Constraint(KIND.REGEX, "[ab]{3}", after_reasoning=True)
    chat = ChatPrompt([{"role": "user", "content": "hi"}])
    with EngineHarness(spec(folder, parser="think")) as engine:
        sampling = Sampling(temperature=0.0, logit_bias=dict.fromkeys(marks(engine), -100.0))
        (result,) = engine.run([Generate(1, chat, sampling, max_tokens=200, constraint=constraint, thinking_budget=12)])
    assert result.finish is Finish.STOP
    assert re.fullmatch("[ab]{3}", "".join(text for kind, text in result.events if kind is DeltaKind.TEXT))


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint(KIND.JSON_SCHEMA, "{"), "not JSON"),
        (Constraint(KIND.JSON_SCHEMA, "[]"), "not a schema"),
        (Constraint(KIND.JSON_SCHEMA, "true"), "not an object"),
        (schema({"type": "number", "exclusiveMaximum": True}), "exclusiveMaximum"),
        (schema({"type": "integer", "multipleOf": 1000003}), "multipleOf"),
        (schema({"allOf": [{"multipleOf": 1009}, {"multipleOf": 1013}]}), "multipleOf"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"type": "objekt"}), "objekt"),
        (schema({"type": "integer", "minimum": 3, "maximum": 2}), "minimum"),
        (schema({"$ref": "#"}), "no text fits"),
        (schema({"type": "string", "x-guidance": {"lenient": True}, "not": {}}), "not"),
        (Constraint(KIND.REGEX, "(?=a)b"), "look-around"),
        (Constraint(KIND.REGEX, "[^\\s\\S]"), "no text fits"),
        (Constraint(KIND.REGEX, "a" * 300_000), "larger than"),
        (Constraint(KIND.GRAMMAR, "start: nope"), "nope"),
        (Constraint(KIND.GRAMMAR, "start: <[99999]>"), "99999"),
        (Constraint(KIND.CHOICE, "[]"), "not a list"),
        (Constraint(KIND.CHOICE, '["a", 1]'), "not a list"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(
    constraint: Constraint, reason: str, model_folder: Callable[[str], Path]
) -> None:
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        named = Constraint(constraint.kind, constraint.text, param="guided")
        refused, free = engine.run([generate(1, named), generate(2, None, max_tokens=2)])
    assert refused.failure is not None
    assert refused.failure.code is Code.INVALID_REQUEST
    assert refused.failure.param == "guided"
    assert reason in refused.failure.message
    assert free.finish is Finish.LENGTH


def test_a_mask_that_takes_too_long_ends_its_row() -> None:
    work = constrain.MaskWork(Future(), since=100.0)
    assert work.error(101.0) is None
    assert work.error(100.0 + constrain.MAX_MASK_S + 1) is not None


def test_rows_without_a_rule_are_not_stepped_in_two_parts() -> None:
    rows = [sequence_of([5, 6]), sequence_of([7])]
    assert not constrain.constrains(rows)
    rows[1].mask = constrain.MaskWork(Future(), since=0.0)
    assert constrain.constrains(rows)


def test_a_schema_that_need_not_be_strict_becomes_any_object_where_it_cannot_be_enforced(
    model_folder: Callable[[str], Path],
) -> None:
    text = json.dumps({"type": "object", "not": {"required": ["a"]}})
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        strict, lax = engine.run(
            [
                generate(1, Constraint(KIND.JSON_SCHEMA, text)),
                generate(2, Constraint(KIND.JSON_SCHEMA, text, is_strict=False)),
            ]
        )
    assert strict.failure is not None
    assert lax.failure is None
    assert lax.finish is Finish.LENGTH or is_object(lax.text)

"""Questions behind a shared prompt: the bits of an answer are its own, and its probabilities those of the model."""

import itertools
import math
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import pytest
from msgspec import structs

from protocol.failures import Code
from protocol.from_worker import Finish
from protocol.to_worker import Abort, ChatPrompt, Generate, LabelledQuestion, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, Result, spec
from tests.support.scale import scaled
from worker.engine.row import SLICE_TOKENS, inner_paths, next_tokens, slice_ends
from worker.prompt.questions import with_slot

rids = itertools.count(1)
# Longer than a slice, so that a part of it comes from the prefix cache.
INPUT = "The invoice was paid twice and the refund has not come. " * 8
YES = ("Yes", "No")
LETTERS = ("A", "B", "C")
QUESTIONS = (
    LabelledQuestion("Is money asked for?", YES),
    LabelledQuestion("Which team is it for? A: billing. B: sales. C: none of them.", LETTERS),
    LabelledQuestion("How angry is it, from 0 to 3? " + "Think of each word of it. " * 12, ("0", "1", "2", "3")),
    LabelledQuestion("Which of these words is the best?", ("alpha one", "alpha two", "beta", "gamma three")),
)


def asked(questions: Sequence[LabelledQuestion], text: str = INPUT, salt: str = "") -> Generate:
    prompt = ChatPrompt([{"role": "user", "content": text}], thinking=False)
    return Generate(
        next(rids),
        prompt,
        Sampling(),
        0,
        cache_salt=salt,
        most_drafted=0,
        want_progress=True,
        questions=tuple(questions),
    )


def answers(result: Result, questions: Sequence[LabelledQuestion]) -> list[tuple[float, ...]]:
    assert (result.finish, result.terminals) == (Finish.STOP, 1), result.failure
    numbers = array("f", b"".join(delta.data for delta in result.deltas)).tolist()
    ends = list(itertools.accumulate(len(question.labels) for question in questions))
    assert len(numbers) == ends[-1]
    return [tuple(numbers[begin:end]) for begin, end in itertools.pairwise([0, *ends])]


@pytest.mark.parametrize(
    "architecture", scaled(["qwen3", "gemma3_text", "qwen3_5", "llama4", "afm7"], ["qwen3", "qwen3_5"])
)
def test_an_answer_has_the_same_bits_alone_and_in_any_company(
    architecture: str, model_folder: Callable[[str], Path]
) -> None:
    with EngineHarness(spec(model_folder(architecture))) as engine:
        alone = [answers(engine.run([asked([one], salt=f"{at}")])[0], [one])[0] for at, one in enumerate(QUESTIONS)]
        assert all(math.isfinite(each) for one in alone for each in one)
        others = [
            Generate(next(rids), TokensPrompt(tuple(range(20, 60))), Sampling(0.0, ignore_eos=True), max_tokens=40)
            for _ in range(2)
        ]
        for order in (QUESTIONS, QUESTIONS[::-1], (*QUESTIONS[2:], *QUESTIONS, *QUESTIONS[:1])):
            # The prefix is computed again, and comes from the cache.
            for salt in (f"own{len(order)}{order[0].text}", f"own{len(order)}{order[0].text}"):
                request = asked(order, salt=salt)
                result = engine.run([*others, request, asked(QUESTIONS[:2], salt="other")])[2]
                others = [structs.replace(each, rid=next(rids)) for each in others]
                assert answers(result, order) == [alone[QUESTIONS.index(question)] for question in order]


def test_probabilities_are_products_over_the_tokens_of_each_label(model_folder: Callable[[str], Path]) -> None:
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        short = "The invoice was paid twice."
        found = answers(engine.run([asked(QUESTIONS, short)])[0], QUESTIONS)
        prompts = engine.intake._prompts  # pyright: ignore[reportPrivateUsage]
        lengths: set[int] = set()
        for question, logprobs in zip(QUESTIONS, found, strict=True):
            text = prompts.media.renderer.render(with_slot(asked(QUESTIONS, short).prompt))  # pyright: ignore[reportArgumentType]
            head, rest = prompts.questions.cut(text)
            encode = lambda part: prompts.encoder.encode(part, add_special_tokens=False)  # noqa: E731  # pyright: ignore
            prompt = [*encode(head), *encode(question.text + rest)]
            for label, logprob in zip(question.labels, logprobs, strict=True):
                ids = encode(label)
                lengths.add(len(ids))
                logits = engine.loaded.model(mx.array([[*prompt, *ids]]))[0].astype(mx.float32)
                logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
                expected = sum(logits[len(prompt) + at - 1, token].item() for at, token in enumerate(ids))
                assert logprob == pytest.approx(expected, abs=1e-3)
        assert max(lengths) > 1


def test_the_input_is_computed_once_and_then_comes_from_the_cache(model_folder: Callable[[str], Path]) -> None:
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        before = engine.gauges.prompt_tokens
        first = engine.run([asked(QUESTIONS)])[0]
        assert first.usage is not None
        assert (first.usage.cached, first.usage.completion) == (0, 0)
        assert first.accepted == first.usage.prompt
        slack = 64 * len(QUESTIONS)
        assert first.usage.prompt <= engine.gauges.prompt_tokens - before < first.usage.prompt + slack
        again = engine.run([asked(QUESTIONS[:1])])[0]
        assert again.usage is not None
        assert again.usage.cached > 0
        assert again.usage.cached % SLICE_TOKENS == 0
        # The KV of chats is not used: it comes from passes of another shape.
        assert engine.run([asked(QUESTIONS[:1], salt="else")])[0].usage.cached == 0  # pyright: ignore[reportOptionalMemberAccess]


def test_a_question_that_does_not_fit_fails_alone(model_folder: Callable[[str], Path]) -> None:
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        long = LabelledQuestion("word " * (engine.intake.max_context + 1), YES)
        some = (QUESTIONS[0], long, QUESTIONS[1])
        first, failed, last = answers(engine.run([asked(some)])[0], some)
        assert all(map(math.isnan, failed))
        assert [first, last] == answers(engine.run([asked(QUESTIONS[:2])])[0], QUESTIONS[:2])
        none = answers(engine.run([asked([long])])[0], [long])
        assert all(map(math.isnan, none[0]))
        refused = engine.run([asked(QUESTIONS, "word " * (engine.intake.max_context + 1))])[0]
        assert refused.failure is not None
        assert refused.failure.code is Code.CONTEXT_LENGTH_EXCEEDED


def test_an_abort_amid_the_questions_leaves_nothing(model_folder: Callable[[str], Path]) -> None:
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        request = asked(QUESTIONS * 100)
        result = engine.submit(request)
        engine.wait(lambda: result.progress, "some progress")
        engine.command(Abort((request.rid,)))
        engine.wait(lambda: result.terminals, "its end")
        assert result.finish is Finish.ABORT
        engine.wait(lambda: engine.gauges.running == 0)
        assert answers(engine.run([asked(QUESTIONS)])[0], QUESTIONS)


def test_slices_end_at_fixed_places_and_at_media() -> None:
    assert slice_ends(SLICE_TOKENS, []) == []
    assert slice_ends(3 * SLICE_TOKENS + 1, []) == [SLICE_TOKENS, 2 * SLICE_TOKENS, 3 * SLICE_TOKENS]


def test_paths_are_the_inner_nodes_of_a_tree_of_labels() -> None:
    labels = [[1, 2], [1, 3, 4], [5], [1, 3, 6]]
    assert inner_paths(labels) == [(1,), (1, 3)]
    assert [next_tokens(labels, path) for path in ((), (1,), (1, 3))] == [[1, 5], [2, 3], [4, 6]]

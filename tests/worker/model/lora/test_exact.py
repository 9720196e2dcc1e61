"""Rows of several adapters and of the base in one batch: each gets the tokens that mlx-lm gives it alone."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.utils import load_model, save_config, save_model
from msgspec.structs import replace

from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.support.adapters import ATTENTION, DENSE, greedy, mlx_adapter, peft_adapter, reference
from tests.support.drafters import damped
from tests.support.engine import EngineHarness, spec
from tests.support.models import VOCAB, build
from tests.support.scale import scaled
from tests.worker.engine.test_fused_prefill import generated
from tests.worker.engine.test_preemption import requests
from worker.model.loader import LoadedModel
from worker.model.lora.adapters import adapters_of
from worker.start.checked_model import load_checked
from worker.tools.verify.verifier import EagerDrafts, NoisyDrafts

TOKENS = 12
# Of the rows, in the order in which they come.
NAMES = ("lora", "", "dora", "lora", "", "peft", "short")
LENGTHS = (5, 60, 23, 40, 11, 30, 3)
KEYS = {"qwen3_moe": ATTENTION, "qwen3_5": ("linear_attn.out_proj", "mlp.down_proj")}
MODELS = scaled(("qwen3", "quantized", "qwen3_moe", "gemma3_text", "qwen3_5"), ("quantized", "qwen3_moe"))


@dataclass(frozen=True)
class Adapted:
    """A model, its adapters by name, requests of rows that name them, and what mlx-lm says to each alone."""

    model: Path
    folders: dict[str, Path]
    requests: list[Generate]
    expected: list[list[int]]

    @property
    def adapters(self) -> tuple[tuple[str, str], ...]:
        return tuple((name, str(folder)) for name, folder in self.folders.items())


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, model_folder: Callable[[str], Path]) -> Callable[[str], Adapted]:
    known: dict[str, Adapted] = {}

    def build(architecture: str) -> Adapted:
        if architecture not in known:
            root = tmp_path_factory.mktemp(architecture)
            model = model_folder("qwen3" if architecture == "quantized" else architecture)
            model = quantized(model, root / "model") if architecture == "quantized" else model
            known[architecture] = _adapted(model, root, KEYS.get(architecture, DENSE))
        return known[architecture]

    return build


def quantized(model: Path, folder: Path) -> Path:
    """The model in 4 bits."""
    loaded, config = load_model(model)
    nn.quantize(loaded, 32, 4)
    save_model(folder, loaded)
    save_config(config | {"quantization": {"group_size": 32, "bits": 4}}, config_path=folder / "config.json")
    for file in model.iterdir():
        if file.name != "config.json" and not file.name.startswith("model"):
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def _adapted(model: Path, root: Path, keys: tuple[str, ...]) -> Adapted:
    folders = {
        "lora": mlx_adapter(root / "lora", model, seed=1, rank=8, keys=keys),
        "dora": mlx_adapter(root / "dora", model, seed=2, rank=3, keys=keys[:2], dora=True),
        "short": mlx_adapter(root / "short", model, seed=3, rank=2, scale=30.0, keys=keys[-1:], layers=1),
    }
    alike = mlx_adapter(root / "alike", model, seed=4, rank=4, scale=2.5, keys=keys)
    folders["peft"] = peft_adapter(root / "peft", alike, alpha=10.0)
    rng = random.Random(5)
    requests = [
        Generate(
            rid,
            TokensPrompt(tuple(rng.randrange(10, VOCAB) for _ in range(length))),
            Sampling(temperature=0.0, ignore_eos=True),
            max_tokens=TOKENS,
            adapter=name,
        )
        for rid, (name, length) in enumerate(zip(NAMES, LENGTHS, strict=True))
    ]
    models = {name: reference(model, alike if name == "peft" else folders.get(name)) for name in set(NAMES)}
    expected = [greedy(models[each.adapter], each.prompt.ids, TOKENS) for each in requests]  # type: ignore[union-attr]
    return Adapted(model, folders, requests, expected)


def said(engine: EngineHarness, requests: list[Generate]) -> list[list[int]]:
    results = engine.run(requests)
    assert [result.failure for result in results] == [None] * len(results)
    return [result.ids for result in results]


@pytest.mark.parametrize("architecture", MODELS)
def test_rows_say_alone_and_beside_others_what_mlx_lm_makes_them_say(
    architecture: str, adapted: Callable[[str], Adapted]
) -> None:
    case = adapted(architecture)
    base = [greedy(reference(case.model, None), each.prompt.ids, TOKENS) for each in case.requests]  # type: ignore[union-attr]
    changed = [one != other for one, other in zip(case.expected, base, strict=True)]
    assert changed == [bool(name) for name in NAMES], "an adapter that changes nothing shows nothing"
    with EngineHarness(spec(case.model, adapters=case.adapters, prefill_chunk=16)) as engine:
        assert [said(engine, [request])[0] for request in case.requests] == case.expected
        # Twice: the second time prefixes come from the cache.
        for _ in range(2):
            assert said(engine, case.requests) == case.expected


def test_prompts_are_scored_by_their_adapters_whatever_else_is_scored(adapted: Callable[[str], Adapted]) -> None:
    case = adapted("qwen3")
    requests = [replace(each, prompt_logprobs=1) for each in case.requests]
    with EngineHarness(spec(case.model, adapters=case.adapters)) as engine:
        results = engine.run(requests)
    for request, result, expected in zip(requests, results, case.expected, strict=True):
        assert result.ids == expected
        assert isinstance(request.prompt, TokensPrompt)
        if request.adapter == "peft":
            continue  # mlx-lm does not read it
        ids = request.prompt.ids
        model = reference(case.model, case.folders.get(request.adapter))
        logits = model(mx.array([ids]))[0]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        own = mx.take_along_axis(logprobs[:-1], mx.array(ids[1:])[:, None], axis=-1)[:, 0].tolist()
        assert [entry.logprob for entry in result.prompt_logprobs[1:]] == pytest.approx(own, abs=1e-4)


def test_a_prompt_fused_into_steps_of_other_adapters_changes_no_token(
    adapted: Callable[[str], Adapted],
) -> None:
    case = adapted("quantized")
    loaded = load_checked(spec(case.model, adapters=case.adapters), lambda *_: None)
    # A row comes every third tick, so that its chunks are fused into steps of rows with other adapters.
    fused, packed = generated(loaded, case.requests, chunk=8)
    assert packed > 0
    assert [fused[request.rid] for request in case.requests] == case.expected


@pytest.mark.parametrize("architecture", scaled(("qwen3", "qwen3_5"), ("qwen3",)))
def test_drafts_that_are_right_in_part_change_no_token_of_an_adapter(
    architecture: str, adapted: Callable[[str], Adapted]
) -> None:
    case = adapted(architecture)
    drafter = NoisyDrafts(VOCAB)
    for request, expected in zip(case.requests, case.expected, strict=True):
        drafter.learn([*request.prompt.ids, *expected])  # type: ignore[union-attr]
    with EngineHarness(spec(case.model, adapters=case.adapters, prefill_chunk=16), drafter=drafter) as engine:
        assert said(engine, case.requests) == case.expected
    assert drafter.drafted


@pytest.mark.soak
def test_drafts_of_a_model_that_knows_the_base_change_no_token_of_an_adapter(tmp_path: Path) -> None:
    target, draft = damped(tmp_path / "target"), damped(tmp_path / "draft", 0.0)
    case = _adapted(target, tmp_path, DENSE)

    def drafter(loaded: LoadedModel) -> EagerDrafts:
        assert loaded.proposer is not None
        return EagerDrafts(loaded.proposer, 3)

    with EngineHarness(spec(target, adapters=case.adapters, draft=str(draft)), drafter=drafter) as engine:
        assert said(engine, case.requests) == case.expected
        assert isinstance(engine.drafter, EagerDrafts)
        assert engine.drafter.drafted


@pytest.mark.soak
def test_with_quantized_kv_each_row_says_what_it_says_alone(tmp_path: Path) -> None:
    case = _adapted(build("qwen3", tmp_path / "model", head_dim=32), tmp_path, DENSE)
    with EngineHarness(spec(case.model, adapters=case.adapters, kv_bits=8, prefill_chunk=16)) as engine:
        alone = [said(engine, [request])[0] for request in case.requests]
        for _ in range(2):
            assert said(engine, case.requests) == alone


@pytest.mark.soak
def test_rows_that_make_room_keep_their_adapters(adapted: Callable[[str], Adapted]) -> None:
    case = adapted("qwen3")
    # They outgrow what admission counts on.
    pairs = zip(requests(3, prompt=240, output=290), ("lora", "", "dora"), strict=True)
    long = [replace(request, adapter=name) for request, name in pairs]
    with EngineHarness(spec(case.model, adapters=case.adapters, cache_bytes=0)) as engine:
        together = said(engine, long)
        limit = engine.kv_cost.bytes(3, 512) + 1
    with EngineHarness(spec(case.model, adapters=case.adapters, cache_bytes=0, kv_bytes=limit)) as engine:
        assert said(engine, long) == together
        assert engine.gauges.preemptions > 0


def test_rows_that_are_resumed_go_on_with_their_adapters(adapted: Callable[[str], Adapted]) -> None:
    case = adapted("qwen3")
    cuts = range(1, 1 + len(case.requests))
    pairs = list(zip(case.requests, case.expected, cuts, strict=True))
    resumed = [replace(request, resume=tuple(ids[:cut])) for request, ids, cut in pairs]
    with EngineHarness(spec(case.model, adapters=case.adapters)) as engine:
        assert said(engine, resumed) == [ids[cut:] for _, ids, cut in pairs]


def test_several_sampled_answers_to_one_prompt_are_each_what_they_are_alone(adapted: Callable[[str], Adapted]) -> None:
    case = adapted("qwen3")
    prompt = case.requests[1].prompt
    sampled = Sampling(temperature=0.9, top_p=0.95, ignore_eos=True)
    batch = [
        Generate(rid, prompt, replace(sampled, seed=rid), max_tokens=TOKENS, adapter=name)
        for rid, name in enumerate(("lora", "lora", "dora", "", "peft", "lora"))
    ]
    with EngineHarness(spec(case.model, adapters=case.adapters, cache_bytes=0)) as engine:
        alone = [said(engine, [request])[0] for request in batch]
        assert said(engine, batch) == alone
        assert len(set(map(tuple, alone))) == len(alone)


def test_the_prefix_of_one_adapter_is_never_used_for_another_or_for_the_base(adapted: Callable[[str], Adapted]) -> None:
    case = adapted("qwen3")
    prompt = case.requests[1].prompt
    with EngineHarness(spec(case.model, adapters=case.adapters)) as engine:

        def cached(rid: int, name: str, salt: str = "") -> int:
            sampling = Sampling(temperature=0.0, ignore_eos=True)
            request = Generate(rid, prompt, sampling, max_tokens=2, adapter=name, cache_salt=salt)
            usage = engine.run([request])[0].usage
            assert usage is not None
            return usage.cached

        assert [cached(rid, name) for rid, name in enumerate(("", "lora", "dora", "peft"))] == [0, 0, 0, 0]
        assert all(cached(10 + rid, name) > 0 for rid, name in enumerate(("", "lora", "dora", "peft")))
        # A client cannot name the prefixes of an adapter: what it says comes behind its key's salt.
        salt = "\0" + next(info.digest for info in engine.adapters.infos if info.name == "lora")
        assert cached(20, "", f"\0lora:{salt}") == 0


def test_a_row_of_the_base_has_the_very_logits_that_it_has_without_adapters(adapted: Callable[[str], Adapted]) -> None:
    case = adapted("qwen3")
    loaded = load_checked(spec(case.model, adapters=case.adapters), lambda *_: None)
    adapters = adapters_of(loaded.model)
    assert adapters is not None
    tokens = mx.array([[5, 6, 7, 8]] * 5)
    plain = loaded.model(tokens)
    for gathers in (False, True):  # as on CPUs and CUDA, and as on Metal
        adapters.slots.gathers = gathers
        with adapters.slots.rows([[0, 1, 2, 0, 4]], [(5, 4)]):
            mixed = loaded.model(tokens)
        assert mx.array_equal(mixed[0], plain[0])
        assert mx.array_equal(mixed[3], plain[3])
        assert not any(mx.allclose(mixed[row], plain[row], atol=1e-3) for row in (1, 2, 4))

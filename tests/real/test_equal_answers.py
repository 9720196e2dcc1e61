"""An answer does not depend on what runs beside it, was cached or drafted before it, or crashed under it."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.real.dialects import ANTHROPIC, CHAT, DIALECTS
from tests.real.documents import page, prompts
from tests.real.figures import Figures
from tests.real.prepare import SMOLLM2
from tests.real.serving import Served

pytestmark = pytest.mark.soak
MODELS = {"m": f'path = "{SMOLLM2}"'}
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.9, "seed": 11}}
TOKENS = 32
CLOSE = 1e-4
PREFIX = f"Here is a page of a manual.\n\n{page('slow-requests', 2400)}\n\nWhat is this page about?"


def answer(served: Served, prompt: str, salt: str = "", **options: Any) -> dict[str, Any]:
    """A chat's choice with its ids and log-probabilities. A salt of its own finds no cached prefix."""
    extra = {"logprobs": True, "return_token_ids": True, **({"cache_salt": salt} if salt else {})}
    return CHAT.ask(served, "m", prompt, TOKENS, **extra, **options)


def ids(answered: dict[str, Any]) -> list[int]:
    return answered["choices"][0]["token_ids"]


def cached(answered: dict[str, Any]) -> int:
    return answered["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_six_requests_in_a_batch_answer_as_each_does_alone(served: Served, figures: Figures, sampling: str) -> None:
    options = SAMPLINGS[sampling]
    alone = [answer(served, prompt, f"alone-{sampling}", **options) for prompt in prompts()]
    with ThreadPoolExecutor(6) as pool:
        batch = list(pool.map(lambda prompt: answer(served, prompt, f"batch-{sampling}", **options), prompts()))

    def logprobs(answered: dict[str, Any]) -> list[float]:
        return [each["logprob"] for each in answered["choices"][0]["logprobs"]["content"]]

    pairs = [
        (a, b) for one, six in zip(alone, batch, strict=True) for a, b in zip(logprobs(one), logprobs(six), strict=True)
    ]
    difference = max(abs(a - b) for a, b in pairs)
    figures.note(f"six requests in a batch, {sampling}", f"tokens equal, within {difference:.1e}")
    assert [ids(each) for each in batch] == [ids(each) for each in alone]
    assert difference < CLOSE


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafts_change_no_token(served: Served, sampling: str) -> None:
    prompt = f"Repeat this text word for word:\n\n{page('memory', 500)}"
    options = SAMPLINGS[sampling]

    assert ids(answer(served, prompt, **options)) == ids(answer(served, prompt, speculate=False, **options))


def test_a_prefix_in_memory_and_on_disk_changes_no_token(served: Served, figures: Figures) -> None:
    cold = answer(served, PREFIX)
    warm = answer(served, PREFIX)
    served.restart()
    from_disk = answer(served, PREFIX)

    prompt_tokens = cold["usage"]["prompt_tokens"]
    figures.note(
        "cached tokens: first request, second, after a restart",
        f"{cached(cold)}, {cached(warm)}, {cached(from_disk)} of {prompt_tokens}",
    )
    assert cached(cold) < 64
    assert min(cached(warm), cached(from_disk)) > prompt_tokens / 2
    assert ids(cold) == ids(warm) == ids(from_disk)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_stream_goes_on_after_its_worker_was_killed(served: Served, dialect: str) -> None:
    asked = DIALECTS[dialect]
    prompt = "Tell me a story of a fox and a river."
    undisturbed = asked.whole(served, "m", prompt, 40, temperature=0.8, seed=5)
    text = ""
    killed = False
    for delta in asked.deltas(served, "m", prompt, 40, temperature=0.8, seed=5):
        text += delta
        if len(text) > 20 and not killed:
            (worker,) = served.daemon.worker_pids()
            os.kill(worker, signal.SIGKILL)
            killed = True

    assert killed
    assert text == undisturbed


def test_an_adapter_trained_by_mlx_lm_answers_as_there_and_leaves_base_rows_alone(
    served: Served, figures: Figures, tmp_path: Path
) -> None:
    from tests.real.training import greedy_with_adapter, train

    folder = served.home / "adapters" / "trained"
    lost = train(SMOLLM2, folder)
    questions = prompts()[:2]
    base = [ANTHROPIC.whole(served, "m", each, 16) for each in questions]
    config = served.home / "mlxd.toml"
    config.write_text(f'{config.read_text()}[models.m.adapters]\ntrained = "{folder}"\n')
    served.restart()
    with ThreadPoolExecutor(4) as pool:
        rows = [(model, each) for model in ("m", "trained") for each in questions]
        texts = list(pool.map(lambda row: ANTHROPIC.whole(served, row[0], row[1], 16), rows))

    theirs = [greedy_with_adapter(SMOLLM2, folder, each, 16) for each in questions]
    figures.note("trained LoRA: first and last loss", f"{lost[0]:.2f}, {lost[-1]:.2f}")
    assert json.loads((folder / "adapter_config.json").read_text())["fine_tune_type"] == "lora"
    assert texts[:2] == base
    assert texts[2:] == theirs
    assert texts[2:] != base

"""The disk cache in the engine: exact on every architecture, over restarts, beside other rows."""

import json
import logging
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest

from protocol.failures import Code
from protocol.from_worker import Finish
from protocol.spec import WorkerSpec
from protocol.to_worker import Abort, Generate, Sampling, TokensPrompt
from tests.support import disk
from tests.support.engine import EngineHarness, Result, spec
from tests.support.models import SAMPLE, build, shallow, tiny_tokenizer
from tests.support.prefix_checks import check_cache
from tests.support.prefixes import GREEDY, SHARED, cached, family, said, words
from tests.support.scale import patient, scaled
from worker.errors import LoadFailed

CAP = 1 << 28


def disk_spec(model: Path, folder: Path, **settings: Any) -> WorkerSpec:
    return spec(model, **{"disk_cache_dir": str(folder), "disk_cache_bytes": CAP, **settings})


@pytest.mark.parametrize("architecture", scaled(SAMPLE, ("qwen3_5",)))
def test_tokens_are_the_same_from_disk_after_a_restart(
    architecture: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    batch = family(4, own=70)
    with EngineHarness(spec(model_folder(architecture), cache_bytes=0)) as engine:
        cold = said([engine.run([request])[0] for request in batch])
    with EngineHarness(disk_spec(model_folder(architecture), tmp_path)) as engine:
        assert said([engine.run([request])[0] for request in batch]) == cold
        assert engine.gauges.cache.disk_hits == 0
    with EngineHarness(disk_spec(model_folder(architecture), tmp_path)) as engine:
        restored = [engine.run([request])[0] for request in batch]
        counts, files = engine.gauges.cache, engine.gauges.disk
    assert said(restored) == cold
    sizes = [len(request.prompt.ids) for request in batch if isinstance(request.prompt, TokensPrompt)]
    assert [cached(result) for result in restored] == [size - 1 for size in sizes]
    assert counts.disk_hits >= 1
    assert counts.disk_restored_tokens >= sizes[0] - 1
    assert files.disk_quarantined == files.disk_dropped == 0


@pytest.mark.soak
def test_kv_of_another_form_on_disk_is_of_no_use(tmp_path: Path) -> None:
    model = build("qwen3", tmp_path / "model", head_dim=64, num_hidden_layers=2)
    batch = family(2, own=70)
    answers: dict[int, list[Any]] = {}
    for bits in (8, 4, 0):
        with EngineHarness(spec(model, cache_bytes=0, kv_bits=bits)) as engine:
            answers[bits] = said(run_all(engine, batch))
    for bits, is_warm in ((8, False), (8, True), (4, False), (0, False), (0, True)):
        with EngineHarness(disk_spec(model, tmp_path / "disk", kv_bits=bits)) as engine:
            assert said(run_all(engine, batch)) == answers[bits]
            assert (engine.gauges.cache.disk_hits > 0) == is_warm, bits


def run_all(engine: EngineHarness, batch: Sequence[Generate]) -> list[Result]:
    return [engine.run([request])[0] for request in batch]


def cold_answers(model: Path, batch: Sequence[Generate], **settings: Any) -> list[tuple[list[int], str, Finish | None]]:
    with EngineHarness(spec(model, cache_bytes=0, **settings)) as engine:
        return said(run_all(engine, batch))


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + patient(disk.DEADLINE_S)
    while not condition():
        assert time.monotonic() < end, "the deadline passed"
        time.sleep(0.002)


def test_a_conversation_is_on_disk_soon_after_its_answer_without_a_shutdown(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model, batch = model_folder("qwen3_5"), family(1, own=70)
    with EngineHarness(disk_spec(model, tmp_path)) as first:
        answer = said(run_all(first, batch))
        until(lambda: first.gauges.disk.disk_writes >= 2)
        # The first worker is still there, as it would be when it is killed: nothing was flushed at an end.
        with EngineHarness(disk_spec(model, tmp_path)) as successor:
            again = run_all(successor, batch)
    assert said(again) == answer
    assert cached(again[0]) == len(batch[0].prompt.ids) - 1  # type: ignore[union-attr]


def test_a_killed_worker_leaves_its_conversation_to_the_next(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model, batch = model_folder("gemma3_text"), family(1, own=70)
    script = f"""
from pathlib import Path
from tests.support.engine import EngineHarness
from tests.worker.prefix_cache.test_disk_engine import disk_spec, family
with EngineHarness(disk_spec(Path({str(model)!r}), Path({str(tmp_path)!r}))) as engine:
    engine.run(family(1, own=70))
    print("answered", flush=True)
    engine.wait(lambda: False)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"answered\n"
        # The prompt, its end, and the answer: what follows is written in far less than a second.
        until(lambda: len(disk.files(tmp_path)) >= 2 and not list(tmp_path.glob("*/*.part")))
        worker.kill()
    expected = cold_answers(model, batch)
    with EngineHarness(disk_spec(model, tmp_path)) as engine:
        again = run_all(engine, batch)
    assert said(again) == expected
    assert cached(again[0]) == len(words("shared", SHARED)) + 70 + 7 - 1


def test_short_prefixes_stay_in_memory(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    settings = {"disk_cache_tokens": 200}
    with EngineHarness(disk_spec(model_folder("qwen3"), tmp_path, **settings)) as engine:
        short, long = family(1, shared=20, own=70), family(1, shared=20, own=300)
        run_all(engine, short)
        run_all(engine, short)
        assert engine.gauges.cache.prefix_hits == 1
    assert not list(tmp_path.glob("*/*.safetensors"))
    with EngineHarness(disk_spec(model_folder("qwen3"), tmp_path, **settings)) as engine:
        run_all(engine, long)
    assert list(tmp_path.glob("*/*.safetensors"))


def test_long_prompts_are_on_disk_before_their_answer_ends(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    request = Generate(1, TokensPrompt(words("long", 1100)), Sampling(ignore_eos=True, seed=1), max_tokens=2000)
    with EngineHarness(disk_spec(model_folder("qwen3"), tmp_path)) as engine:
        result = engine.submit(request)
        until(lambda: engine.gauges.disk.disk_writes)
        assert not result.terminals
        engine.command(Abort((1,)))
        engine.wait(lambda: result.terminals)


DAMAGES = ["header", "content", "truncated", "empty", "other content"]


@pytest.mark.parametrize(
    ("architecture", "damage"),
    scaled(
        [(architecture, damage) for architecture in ("qwen3", "gemma3_text", "qwen3_5") for damage in DAMAGES],
        [("qwen3", damage) for damage in DAMAGES],
    ),
)
def test_damaged_files_are_set_aside_and_the_answer_is_right(
    architecture: str, damage: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model, batch = model_folder(architecture), family(1, own=70)
    with EngineHarness(disk_spec(model, tmp_path)) as engine:
        expected = said(run_all(engine, batch))
    paths = disk.files(tmp_path)
    contents = [path.read_bytes() for path in paths]
    assert paths
    for at, (path, content) in enumerate(zip(paths, contents, strict=True)):
        changed = bytearray(content)
        match damage:
            case "header":
                changed[100] ^= 1
            case "content":
                changed[-5] ^= 1
            case "truncated":
                changed = changed[: len(changed) // 2]
            case "empty":
                changed.clear()
            case _:
                changed = bytearray(contents[at - 1] if len(contents) > 1 else b"x" * 500)
        path.write_bytes(changed)
    with EngineHarness(disk_spec(model, tmp_path)) as engine:
        assert said(run_all(engine, batch)) == expected
        assert engine.gauges.disk.disk_quarantined >= 1
    with EngineHarness(disk_spec(model, tmp_path)) as engine:
        again = run_all(engine, batch)
    assert said(again) == expected
    assert cached(again[0]) > 0, "good files have taken the place of the bad ones"


CHANGED = {"template": "tokenizer", "weights of the same time": "weights"}


def reset_times(model: Path) -> None:
    """As in a Nix store, or an image that builds the same everywhere."""
    for file in model.iterdir():
        os.utime(file, (1, 1))


def change(model: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Another form of the model in this folder; returns settings of the worker that go with it."""
    match what:
        case "weights":
            other = build("qwen3", model.with_name("other"), seed=5, **shallow("qwen3"))
            (other / "model.safetensors").replace(model / "model.safetensors")
        case "weights of the same time":
            other = build("qwen3", model.with_name("other"), seed=5, **shallow("qwen3"))
            (other / "model.safetensors").replace(model / "model.safetensors")
            reset_times(model)
        case "configuration":
            config = json.loads((model / "config.json").read_text())
            (model / "config.json").write_text(json.dumps(config | {"rope_theta": 20_000.0}))
        case "tokenizer":
            tiny_tokenizer(["<new>"]).save_pretrained(model)
        case "template":  # where it is a part of the tokenizer's configuration
            settings = json.loads((model / "tokenizer_config.json").read_text())
            (model / "chat_template.jinja").unlink()
            (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "new"}))
        case "libraries":
            monkeypatch.setattr("worker.prefix_cache.fingerprint.version", f"{{}} {version('mlx')}.1".format)
        case _:
            return {"dtype": "bfloat16"}
    return {}


@pytest.mark.parametrize(
    "what",
    [
        *scaled(["weights", "configuration", "tokenizer", "libraries", "layout"], []),
        "weights of the same time",
        "template",
    ],
)
def test_stale_files_are_set_aside_counted_and_never_used(
    what: str,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, model, batch = tmp_path / "cache", tmp_path / "model", family(2, own=70)
    shutil.copytree(model_folder("qwen3"), model)
    reset_times(model)
    with EngineHarness(disk_spec(model, cache)) as engine:
        run_all(engine, batch)
    stale = disk.files(cache)
    beside = msgspec.structs.replace(disk_spec(model, cache, dtype="float16"), name="beside")
    with EngineHarness(beside) as live:
        answers = said(run_all(live, batch))
        until(lambda: live.gauges.disk.disk_files >= 2)
        others = set(disk.files(cache)) - set(stale)
        settings = change(model, what, monkeypatch)
        expected = cold_answers(model, batch, **settings)
        with caplog.at_level("WARNING", "mlxd.worker"), EngineHarness(disk_spec(model, cache, **settings)) as engine:
            results = run_all(engine, batch)
            until(lambda: engine.gauges.snapshot().disk_quarantined == len(stale) > 0)
        assert said(run_all(live, batch)) == answers
        assert live.gauges.disk.disk_quarantined == 0
    assert said(results) == expected
    assert cached(results[0]) == 0
    named = {f"{path.parent.name}.{path.name}" for path in stale}
    assert {path.name for path in (cache / "quarantine").iterdir()} == named
    assert others
    assert all(path.exists() for path in others)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.startswith(f"disk cache: {len(stale)} stale file(s) of test (")
    assert line.endswith(f"set aside: other {CHANGED.get(what, what)} than now")


def test_a_chat_template_in_a_file_of_its_own_makes_nothing_stale(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """It decides which tokens a chat becomes; where those are the same, so is what was computed for them."""
    model, batch = tmp_path / "model", family(1, own=70)
    shutil.copytree(model_folder("qwen3"), model)
    with EngineHarness(disk_spec(model, tmp_path / "cache")) as engine:
        run_all(engine, batch)
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    expected = cold_answers(model, batch)
    with EngineHarness(disk_spec(model, tmp_path / "cache")) as engine:
        again = run_all(engine, batch)
        counts = engine.gauges.disk
    assert said(again) == expected
    assert cached(again[0]) > 0
    assert counts.disk_quarantined == 0


def test_salts_stay_apart_on_disk(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    prompt = TokensPrompt(words("secret", 200))
    model = model_folder("qwen3")
    requests = [Generate(rid, prompt, GREEDY, max_tokens=4, cache_salt=salt) for rid, salt in enumerate("abab")]
    with EngineHarness(disk_spec(model, tmp_path)) as engine:
        run_all(engine, requests[:1])
    with EngineHarness(disk_spec(model, tmp_path)) as engine:
        results = run_all(engine, requests)
    assert [cached(result) for result in results] == [199, 0, 199, 199]
    assert all(b"secret" not in path.read_bytes() for path in disk.files(tmp_path))


def test_a_slow_disk_holds_up_only_the_row_that_wants_it(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    model, batch = model_folder("qwen3"), family(1, own=70)
    with EngineHarness(disk_spec(model, tmp_path)) as engine:
        expected = said(run_all(engine, batch))
    with EngineHarness(disk_spec(model, tmp_path)) as engine:
        paths = disk.files(tmp_path)
        for path in paths:
            path.unlink()
            os.mkfifo(path)  # opening it for reading waits until someone writes
        waiting = engine.submit(batch[0])
        gone = engine.submit(Generate(50, batch[0].prompt, GREEDY, max_tokens=4))
        others = [Generate(rid, TokensPrompt(words(rid, 90)), GREEDY, max_tokens=12) for rid in (60, 61)]
        assert all(result.finish is not None for result in engine.run(others))
        engine.command(Abort((50,)))
        engine.wait(lambda: gone.terminals, "the abort of a row that waits")
        late = engine.submit(Generate(70, batch[0].prompt, GREEDY, max_tokens=4, deadline_ms=50))
        engine.wait(lambda: late.terminals, "the deadline of a row that waits")
        assert late.failure is not None
        assert late.failure.code == Code.DEADLINE_EXCEEDED
        assert not waiting.terminals
        for path in paths:
            with suppress(OSError):  # nobody reads this one
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        engine.wait(lambda: waiting.terminals, "the row that waited")
    assert said([waiting]) == expected


def test_the_folder_can_be_cleared_while_the_worker_runs(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    model, cache, batch = model_folder("qwen3_5"), tmp_path / "cache", family(3, own=70)
    with EngineHarness(disk_spec(model, cache)) as engine:
        expected = said(run_all(engine, batch))
    with EngineHarness(disk_spec(model, cache)) as engine:
        shutil.rmtree(cache)
        assert said(run_all(engine, batch)) == expected
        until(lambda: engine.gauges.disk.disk_files)
        assert engine.gauges.disk.disk_quarantined == 0
    with EngineHarness(disk_spec(model, cache)) as engine:
        again = run_all(engine, batch)
    assert said(again) == expected
    assert cached(again[0]) > 0


def test_a_disk_cache_without_a_size_is_refused(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    with (
        pytest.raises(LoadFailed, match="needs a size"),
        EngineHarness(disk_spec(model_folder("qwen3"), tmp_path, disk_cache_bytes=0)),
    ):
        pass


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5"])
def test_hundreds_of_requests_under_small_budgets(
    architecture: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Random prefixes, aborts and restarts: caps hold, the books are right, and nobody gets another's text."""
    model, rng = model_folder(architecture), random.Random(11)
    parts = [words(("part", number), rng.randrange(20, 70)) for number in range(6)]
    prompts = [sum(rng.choices(parts, k=rng.randrange(1, 5)), ()) for _ in range(30)]
    kinds = [
        Generate(rid, TokensPrompt(prompt), Sampling(temperature=0.9, seed=rid) if rid % 2 else GREEDY, max_tokens=5)
        for rid, prompt in enumerate(prompts)
    ]
    with EngineHarness(spec(model, cache_bytes=0)) as engine:
        expected = [(result.ids, result.text) for result in engine.run(kinds)]
    ram, cap, rid, aborted, hits = 400_000, 1_500_000, 1000, 0, 0
    for _life in range(5):
        with EngineHarness(disk_spec(model, tmp_path, cache_bytes=ram, disk_cache_bytes=cap)) as engine:
            for _wave in range(10):
                wave: list[tuple[int, Result]] = []
                for _ in range(10):
                    kind, rid = rng.randrange(len(kinds)), rid + 1
                    wave.append((kind, engine.submit(msgspec.structs.replace(kinds[kind], rid=rid))))
                    if rng.random() < 0.2:
                        engine.command(Abort((rng.randrange(rid - 3, rid + 1),)))
                engine.wait(lambda wave=wave: all(result.terminals == 1 for _, result in wave), "the wave")
                assert engine.gauges.prefix_bytes <= ram
                assert disk.size(tmp_path) <= cap
                for kind, result in wave:
                    ids, text = expected[kind]
                    assert result.ids == ids[: len(result.ids)]
                    assert text.startswith(result.text)
                    aborted += result.finish == Finish.ABORT
                    assert result.finish == Finish.ABORT or (result.ids, result.text) == (ids, text)
            cache = engine.engine.cache
        check_cache(cache)
        hits += cache.counts.disk_hits
        counts = engine.gauges.disk
        assert counts.disk_quarantined == 0
        assert (counts.disk_files, counts.disk_bytes) == (
            len(disk.files(tmp_path)),
            sum(p.stat().st_size for p in disk.files(tmp_path)),
        )
        assert not list(tmp_path.glob("*/*.part"))
    assert aborted > 20
    assert hits > 10

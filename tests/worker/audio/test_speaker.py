"""Models that speak: what each takes of a request, and a speech that a seed gives again."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.failures import Code
from protocol.spec import WorkerSpec
from protocol.to_worker import Generate, Sampling, SpeechPrompt
from tests.support.audio_models import build_qwen_tts, build_soprano
from worker.audio.audio_intake import AudioIntake
from worker.audio.audio_jobs import AudioJob
from worker.audio.audio_model import AudioModel, load_audio_model
from worker.audio.speaker import groups
from worker.errors import LoadFailed, RequestInvalid


def load(folder: Path) -> AudioModel:
    return load_audio_model(WorkerSpec("m", str(folder), 1, "", ""), lambda *_: None)


def job(model: AudioModel, text: str = "Hi.", seed: int = 1, **settings: Any) -> AudioJob:
    prompt = SpeechPrompt(text, **{"format": "pcm", **settings})
    request = Generate(1, prompt, Sampling(seed=seed))
    return AudioIntake(model, lambda: None).job_now(request)


def spoken(job: AudioJob) -> bytes:
    return b"".join(piece.data for piece in job.work)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> AudioModel:
    return load(build_qwen_tts(tmp_path_factory.mktemp("qwen")))


@pytest.mark.soak
def test_voices_seeds_and_instructions_make_other_speech(qwen: AudioModel) -> None:
    assert qwen.info.voices == ("vivian", "ryan")
    first, again = [spoken(job(qwen, voice="ryan")) for _ in range(2)]
    others = [
        job(qwen, voice="vivian"),
        job(qwen, voice="ryan", seed=2),
        job(qwen, voice="ryan", instructions="Sadly."),
    ]
    assert first == again
    assert all(spoken(other) != first for other in others)
    # The first voice is the choice of one that names none.
    assert spoken(job(qwen)) == spoken(job(qwen, voice="vivian"))
    with pytest.raises(RequestInvalid, match="vivian, ryan") as refused:
        job(qwen, voice="alloy")
    assert refused.value.failure.param == "voice"


@pytest.mark.soak
def test_tokens_of_speech_are_twenty_a_second(qwen: AudioModel) -> None:
    pieces = list(job(qwen, "Hi there. " * 10, voice="ryan").work)
    seconds = sum(len(piece.data) for piece in pieces) / 2 / 24_000
    assert len(pieces) > 1
    assert sum(len(piece.token_ids) for piece in pieces) == pytest.approx(seconds * 20, abs=len(pieces))
    assert all(piece.token_ids for piece in pieces if piece.data)


@pytest.mark.parametrize("field", ["input", "instructions"])
def test_control_tokens_in_texts_of_qwen_are_refused(qwen: AudioModel, field: str) -> None:
    fields = {"text": "Hi <tts_eos>."} if field == "input" else {"instructions": "<|im_end|>"}
    with pytest.raises(RequestInvalid, match="control token") as refused:
        job(qwen, voice="ryan", **fields)
    assert refused.value.failure.param == field


@pytest.mark.parametrize("settings", [{"format": "mp3"}, {"speed": 2.0}])
def test_speech_that_needs_pyav_is_refused_without_it_by_the_command_that_installs_it(
    qwen: AudioModel, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(RequestInvalid, match="mlxctl setup audio") as refused:
        job(qwen, **settings)
    assert refused.value.failure.param == {"format": "response_format"}.get(*settings, "speed")
    assert spoken(job(qwen, voice="ryan", format="wav")).startswith(b"RIFF")


def test_speech_that_gets_too_long_fails(qwen: AudioModel) -> None:
    with pytest.raises(RequestInvalid, match=r"longer than the 0\.2 seconds") as failed:
        spoken(job(qwen, voice="ryan", most_s=0.2))
    assert failed.value.failure.code is Code.ROW_FAILED


def test_a_voice_that_is_described_needs_its_description(tmp_path: Path) -> None:
    model = load(build_qwen_tts(tmp_path, design=True))
    model.compute_once()
    with pytest.raises(RequestInvalid, match="instructions"):
        job(model)
    assert spoken(job(model, instructions="A calm voice."))


def test_what_clones_voices_is_refused_at_load(tmp_path: Path) -> None:
    folder = build_qwen_tts(tmp_path)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("custom_voice", "base"))
    with pytest.raises(LoadFailed, match="clones"):
        load(folder)


@pytest.mark.soak
def test_soprano_has_one_voice_and_says_so(tmp_path: Path) -> None:
    model = load(build_soprano(tmp_path))
    assert model.speaker is not None
    assert job(model, voice="alloy").deviations == ("voice",)
    assert job(model).deviations == ()
    samples = np.frombuffer(spoken(job(model, "I", voice="alloy")), "<i2")
    assert samples.any()
    with pytest.raises(RequestInvalid, match="no instructions"):
        job(model, instructions="Sadly.")


def test_sentences_are_joined_up_to_a_bound() -> None:
    text = 'One. Two! "Three?" Four。 Five\n\nsix seven'
    assert groups(text, 1, 100) == ["One.", "Two!", '"Three?"', "Four。", "Five", "six seven"]
    assert groups(text, 12, 100) == ['One. Two! "Three?"', "Four。 Five six seven"]
    assert groups("word " * 30, 1, 20) == ["word word word word"] * 7 + ["word word"]
    assert groups("x" * 45, 1, 20) == ["x" * 20, "x" * 20, "x" * 5]
    assert groups(" \n ", 1, 20) == []
    assert groups("a" + " " * 300_000 + "b \t\n\n c", 1, 20) == ["a b", "c"], "in no time that grows with the square"

"""Whisper's windows: the transcripts of mlx-audio's own loop, and an end between two tokens."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from protocol.failures import Code
from protocol.spec import WorkerSpec
from protocol.to_worker import Generate, Media, Sampling, TranscribePrompt
from tests.support.audio_models import build_whisper, tone
from tests.support.scale import scaled
from worker.audio import whisper
from worker.audio.audio_intake import AudioIntake
from worker.audio.audio_model import load_audio_model
from worker.audio.transcriber import AudioWindow, Samples
from worker.audio.whisper import WhisperTranscriber
from worker.errors import LoadFailed, RequestInvalid
from worker.vision.sounds import read_audio


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_whisper(tmp_path_factory.mktemp("whisper"))


def load(folder: Path, **settings: Any) -> WhisperTranscriber:
    model = load_audio_model(WorkerSpec("m", str(folder), 1, "", "", **settings), lambda *_: None)
    assert isinstance(model.transcriber, WhisperTranscriber)
    return model.transcriber


@pytest.fixture(scope="module")
def transcriber(folder: Path) -> WhisperTranscriber:
    return load(folder)


def clip(seconds: float) -> Samples:
    return read_audio(Media("audio", b"", tone(seconds)), 16_000, 1e9)


def nothing() -> None:
    pass


def transcribed(
    transcriber: WhisperTranscriber, samples: Samples, temperature: float = 0.0, seed: int = 0, **options: Any
) -> list[AudioWindow]:
    prompt = TranscribePrompt(b"", "en", **options)
    return list(transcriber.transcribe(samples, prompt, Sampling(temperature=temperature, seed=seed), nothing))


@pytest.mark.parametrize(("has_words", "seconds"), scaled([(False, 33.0), (True, 1.5)], [(True, 1.5)]))
def test_windows_are_those_of_mlx_audios_own_loop(
    transcriber: WhisperTranscriber, has_words: bool, seconds: float
) -> None:
    # The second window has the first one's text in front. Its `temperature` is one number: greedy and no more.
    samples = clip(seconds)
    expected = transcriber._model.generate(
        mx.array(samples), language="en", temperature=0.0, initial_prompt="kato", word_timestamps=has_words, fp16=False
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whisper, "_TEMPERATURES", (0.0,))
        windows = transcribed(transcriber, samples, text="kato", has_words=has_words)
    segments = [segment for window in windows for segment in window.segments]
    assert len(windows) > 1 or has_words
    assert [list(each.tokens) for each in segments] == [list(each["tokens"]) for each in expected.segments]
    assert [each.start for each in segments] == pytest.approx([each["start"] for each in expected.segments], abs=1e-3)
    assert [each.end for each in segments] == pytest.approx([each["end"] for each in expected.segments], abs=1e-3)
    # Of the text of a whole clip, it shows marks.
    text = transcriber._model.get_tokenizer().hf_tokenizer.decode(
        [id for each in segments for id in each.tokens if id < 256]
    )
    assert "".join(window.text for window in windows) == text.lstrip()
    assert [[word.word for word in each.words] for each in segments] == [
        [word["word"] for word in each.get("words", [])] for each in expected.segments
    ]


def test_features_by_pieces_are_those_of_the_whole(
    transcriber: WhisperTranscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = clip(40.0)
    whole = whisper._Features(samples, 80)
    at_once = [np.array(whole.window(start, 500)) for start in (0, 900, 2200, 3400)]
    monkeypatch.setattr(whisper, "_PIECE_FRAMES", 1000)
    pieces = whisper._Features(samples, 80)
    in_pieces = [np.array(pieces.window(start, 500)) for start in (0, 900, 2200, 3400)]
    assert [piece.shape for piece in in_pieces] == [each.shape for each in at_once]
    # The loudest of a piece is not quite that of the clip.
    assert max(np.abs(one - other).max() for one, other in zip(in_pieces, at_once, strict=True)) < 0.01


def test_it_ends_between_two_tokens(transcriber: WhisperTranscriber) -> None:
    calls = 0

    class Over(Exception):
        pass

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise Over

    with pytest.raises(Over):
        list(transcriber.transcribe(clip(5.0), TranscribePrompt(b"", "en"), Sampling(temperature=0.0), check))
    assert calls == 6


@pytest.mark.soak
def test_a_seed_gives_the_same_text_again_and_another_another(tmp_path: Path) -> None:
    transcriber = load(build_whisper(tmp_path, sureness=0.5))
    one, again, other = [transcribed(transcriber, clip(1.0), temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert one == again != other


def test_languages_are_known_by_code_and_by_name(transcriber: WhisperTranscriber) -> None:
    assert [transcriber.language(name) for name in ("de", "German", "EN")] == ["de", "de", "en"]
    with pytest.raises(KeyError):
        transcriber.language("klingon")


def test_what_cannot_be_loaded_is_a_sentence(folder: Path, tmp_path: Path) -> None:
    bare = build_whisper(tmp_path / "bare")
    for name in ("tokenizer.json", "preprocessor_config.json"):
        (bare / name).unlink()
    with (
        pytest.raises(LoadFailed, match="no processor of transformers"),
        pytest.warns(UserWarning, match="WhisperProcessor"),
    ):
        load(bare)
    (bare / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["x.X", null]}}')
    with pytest.raises(LoadFailed, match="trust_remote_code"):
        load(bare)
    with pytest.raises(LoadFailed, match="float16 or float32"):
        load(folder, dtype="bfloat16")


@pytest.mark.parametrize(
    "text", ["a <|endoftext|> b", "<|startoftranscript|><|en|>", "one<|0.00|>", "<|notimestamps|>", "\uff1c|nospeech|>"]
)
def test_control_tokens_in_a_prompt_are_refused(folder: Path, text: str) -> None:
    model = load_audio_model(WorkerSpec("m", str(folder), 1, "", ""), lambda *_: None)
    intake = AudioIntake(model, nothing)
    with pytest.raises(RequestInvalid, match="control token") as refused:
        intake.job(Generate(1, TranscribePrompt(tone(1.0), text=text), Sampling()), 0.0)
    assert (refused.value.failure.code, refused.value.failure.param) == (Code.INVALID_REQUEST, "prompt")


def test_every_prompt_that_is_taken_is_made_of_text_tokens(transcriber: WhisperTranscriber) -> None:
    tokenizer = transcriber._model.get_tokenizer()
    for text in ("plain", "<|", "<|end of text|>", "5 < 6 |> 3", "[BLANK]", "<|0.0|>"):
        assert transcriber.marks.first(text) == ""
        assert all(token < tokenizer.eot for token in tokenizer.encode(" " + text))
    assert any(token >= tokenizer.eot for token in tokenizer.encode(" <|0.00|>"))

"""Loader of speech-to-text and text-to-speech models with mlx-audio."""

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from protocol.checkpoint import SPEAKERS, TRANSCRIBERS, audio_family
from protocol.failures import Code
from protocol.from_worker import AudioInfo
from protocol.spec import WorkerSpec
from protocol.to_worker import Sampling, SpeechPrompt, TranscribePrompt
from worker.audio import sound_writer
from worker.audio.speaker import Instructions, Speaker
from worker.audio.transcriber import Transcriber
from worker.errors import LoadFailed
from worker.model.checkpoint_view import CONFIG, checkpoint_view
from worker.model.loader import cast, check_weights, folded_config, nbytes, read_json, resolve
from worker.model.memory import has_gpu

MISSING: Final = "mlx-audio is not installed; install it with: mlxctl setup audio"
# Files of transformers that may name code in the checkpoint; mlx-audio would run that code without asking.
_FILES_NAMING_CODE: Final = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
)
# Type of an aligner that has the same model_type as a transcriber.
_ALIGNER_TYPE: Final = "qwen3_forced_aligner"
# Types that Whisper's decoding supports.
_WHISPER_DTYPES: Final = {"float32": mx.float32, "float16": mx.float16}


@dataclass(frozen=True, slots=True)
class AudioModel:
    """Loaded audio model, either a transcriber or a speaker."""

    path: Path
    family: str
    weights_bytes: int
    transcriber: Transcriber | None = None
    speaker: Speaker | None = None

    @property
    def info(self) -> AudioInfo:
        missing = "" if sound_writer.has_pyav() else sound_writer.MISSING
        if self.transcriber is not None:
            transcriber = self.transcriber
            return AudioInfo(
                transcribes=True,
                translates=transcriber.translates,
                has_words=transcriber.has_words,
                rate=transcriber.rate,
                languages=transcriber.languages,
                missing=missing,
            )
        assert self.speaker is not None, "a model hears or speaks"
        return AudioInfo(
            speaks=True,
            rate=self.speaker.rate,
            voices=self.speaker.voices,
            formats=sound_writer.formats(),
            missing=missing,
            needs_instructions=self.speaker.instructions is Instructions.NEEDED,
        )

    def compute_once(self) -> None:
        """Transcribe a second of audio, or speak a word, so that a model that cannot run fails at load."""
        if self.transcriber is not None:
            tone = 0.1 * np.sin(np.arange(self.transcriber.rate) * (440 * 2 * np.pi / self.transcriber.rate))
            next(self.transcriber.transcribe(tone.astype(np.float32), TranscribePrompt(b""), Sampling(), _nothing))
        if self.speaker is not None:
            next(self.speaker.speak(_greeting(self.speaker), 0, _nothing))


def load_audio_model(spec: WorkerSpec, progress: Callable[[str, int, int], None]) -> AudioModel:
    """Load the model of `spec`. Calls `progress(stage, done_bytes, total_bytes)`. Raises `LoadFailed`."""
    path = resolve(spec.path)
    config = read_json(path / "config.json")
    family = _family(config, spec.path)
    if find_spec("mlx_audio") is None:
        raise LoadFailed(Code.MODEL_UNSUPPORTED, MISSING)
    _check_code(path, spec)
    total = check_weights(path)
    progress("weights", 0, total)
    try:
        # mlx-audio prints to standard output, where `worker.tools.verify` prints its results.
        with redirect_stdout(sys.stderr), checkpoint_view(path, {CONFIG: folded_config(config)}) as view:
            model = _whisper(path, view, config, spec) if family == "whisper" else _other(path, view, family, spec)
        weights_bytes = sum(nbytes(part) for part in _parts(model))
        transcriber, speaker = _transcriber_of(family, model), Speaker(family, model) if family in SPEAKERS else None
    except LoadFailed:
        raise
    except MemoryError as error:
        raise LoadFailed(Code.OUT_OF_MEMORY, f"not enough memory to load {spec.path} ({total} bytes)") from error
    except ModuleNotFoundError as error:
        message = f"mlx-audio's {family} needs {error.name}, which is not installed: mlxctl setup audio"
        raise LoadFailed(Code.MODEL_UNSUPPORTED, message, detail=str(error)) from error
    except Exception as error:  # code of any architecture may raise any exception
        reason = str(error).partition("\n")[0].strip(" :")
        message = f"{path} could not be loaded: {type(error).__name__}: {reason}"
        raise LoadFailed(Code.MODEL_CORRUPT, message, detail=str(error)) from error
    progress("weights", weights_bytes, weights_bytes)
    return AudioModel(path, family, weights_bytes, transcriber, speaker)


def _family(config: dict[str, Any], name: str) -> str:
    family = audio_family(config, name)
    if not family:
        served = ", ".join((*TRANSCRIBERS, *SPEAKERS))
        kind = config.get("model_type")
        message = f"the audio family {kind!r} is not served; these are: {served}"
        raise LoadFailed(Code.MODEL_UNSUPPORTED, message)
    thinker = config.get("thinker_config")
    if isinstance(thinker, dict) and thinker.get("model_type") == _ALIGNER_TYPE:
        raise LoadFailed(Code.MODEL_UNSUPPORTED, "a model that aligns a text with a clip is not served")
    return family


def _check_code(path: Path, spec: WorkerSpec) -> None:
    """Raise `LoadFailed` for a checkpoint with code of its own that the operator has not allowed."""
    if spec.trust_remote_code:
        return
    for name in _FILES_NAMING_CODE:
        if (path / name).exists() and "auto_map" in read_json(path / name):
            message = f"{path} runs code of its own; allow it with trust_remote_code = true"
            raise LoadFailed(Code.MODEL_UNSUPPORTED, message)


def _transcriber_of(family: str, model: Any) -> Transcriber | None:
    # These imports are local because they load mlx-audio, which may not be installed.
    if family == "whisper":
        from worker.audio.whisper import WhisperTranscriber

        return WhisperTranscriber(model)
    if family in TRANSCRIBERS:
        from worker.audio.transcriber import SegmentedTranscriber

        return SegmentedTranscriber(family, model)
    return None


def _whisper(path: Path, view: Path, config: dict[str, Any], spec: WorkerSpec) -> Any:
    """Load Whisper with the configured dtype; mlx-audio's own loader supports only one dtype."""
    from mlx_audio.stt.models.whisper import Model, ModelConfig
    from mlx_audio.utils import apply_quantization, load_weights

    dtype = spec.dtype if spec.dtype != "auto" else "float16" if has_gpu() else "float32"
    if dtype not in _WHISPER_DTYPES:
        raise LoadFailed(Code.BAD_CONFIG, f"Whisper is computed in float16 or float32, not in {dtype}")
    model = Model(ModelConfig.from_dict(config), dtype=_WHISPER_DTYPES[dtype])
    weights = model.sanitize(load_weights(view))
    apply_quantization(model, config, weights)
    parameters: Any = tree_flatten(model.parameters())
    missing = sorted({name for name, _ in parameters} - weights.keys())
    if missing:
        raise LoadFailed(Code.MODEL_CORRUPT, f"{path} lacks {len(missing)} of Whisper's weights, such as {missing[0]}")
    model.load_weights(list(weights.items()), strict=False)
    mx.eval(model.parameters())
    model.eval()
    model = Model.post_load_hook(model, view)
    if model._processor is None:
        message = (
            f"{path} holds no processor of transformers (tokenizer.json, preprocessor_config.json), which Whisper "
            "needs; take a repository that has one, such as openai/whisper-large-v3-turbo"
        )
        raise LoadFailed(Code.MODEL_MISSING, message)
    return model


def _other(path: Path, view: Path, family: str, spec: WorkerSpec) -> Any:
    from mlx_audio import stt, tts

    load = stt.load if family in TRANSCRIBERS else tts.load
    model: Any = load(view, lazy=True, strict=False, model_type=family)
    # Only Qwen's talker is cast: its codec decoder is already a compiled function for the stored dtype.
    for part in _parts(model):
        cast(part, spec.dtype)
        mx.eval(part.parameters())
    if family == "qwen3_tts" and (model.speech_tokenizer is None or model.tokenizer is None):
        raise LoadFailed(Code.MODEL_MISSING, f"{path} lacks its tokenizer, or the folder speech_tokenizer")
    if family == "qwen3_tts" and model.config.tts_model_type == "base":
        message = f"{path} has no voices of its own: it clones those of clips, which is not served; take a CustomVoice"
        raise LoadFailed(Code.MODEL_UNSUPPORTED, message)
    return model


def _greeting(speaker: Speaker) -> SpeechPrompt:
    voice = speaker.voices[0] if speaker.voices else ""
    instructions = "A calm voice." if speaker.instructions is Instructions.NEEDED else ""
    return SpeechPrompt("Hello.", voice, instructions=instructions)


def _parts(model: Any) -> list[Any]:
    """Return the modules whose parameters can be listed. Qwen's speech model has a part that is a compiled function."""
    talker = getattr(model, "talker", None)
    return [model] if talker is None else [talker]


def _nothing() -> None:
    """Do nothing. This is the `Check` for use outside a loop, where no request can end."""

"""`options` of Ollama's requests: sampling, and settings of Ollama's runner, which are ignored."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from gateway.api.common.canonical import STOP_CHARS_MAX, STOPS_MAX
from gateway.api.common.decode import converted
from gateway.api.common.doc_hints import shape
from gateway.api.common.refused_fields import REFUSED_FIELDS, SAMPLER_FIELDS, constraint_fields, refuse
from gateway.api.common.sampling import first, sampling_values
from gateway.api.openai.lowering import derive_seed
from gateway.api.openai.request import Penalty, RepetitionPenalty, Unit
from gateway.config.settings import SamplingDefaults
from protocol.to_worker import Sampling

_WHOLE_MAX: Final = 1 << 40
_SEED_MAX: Final = (1 << 63) - 1
# Some clients write whole numbers with a fraction, such as 1.0.
Whole = Annotated[int, Meta(ge=-1, le=_WHOLE_MAX)] | Annotated[float, Meta(ge=-1, le=_WHOLE_MAX)]
Limit = Annotated[int, Meta(ge=-2, le=_WHOLE_MAX)] | Annotated[float, Meta(ge=-2, le=_WHOLE_MAX)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=_SEED_MAX)] | Annotated[float, Meta(ge=-(2**62), le=2**62)]
StopText = Annotated[str, Meta(max_length=STOP_CHARS_MAX)]

# These options control how Ollama's runner loads a model and truncates its context, and have no effect here.
NO_ACTION: Final = frozenset(
    {
        *("numa", "num_batch", "num_gpu", "main_gpu", "num_thread", "low_vram", "f16_kv", "logits_all", "vocab_only"),
        *("use_mmap", "use_mlock", "embedding_only", "num_keep", "mirostat_tau", "mirostat_eta"),
    }
)

_REFUSED: Final = REFUSED_FIELDS | SAMPLER_FIELDS | constraint_fields("format", "options.num_predict", "options.stop")


class OllamaOptions(Struct, frozen=True):
    """Options that have an effect or are refused. A negative limit means no limit."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Whole | None = None
    top_p: Unit | None = None
    min_p: Unit | None = None
    seed: Seed | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=STOPS_MAX)] | None = None
    num_predict: Limit | None = None
    repeat_penalty: RepetitionPenalty | None = None
    # Number of tokens to which penalties apply: 0 means none, -1 all.
    repeat_last_n: Whole | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop strings that are not empty."""
        texts = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return tuple(text for text in texts if text)

    @property
    def wanted_seed(self) -> int | None:
        """The requested seed as a whole number; None if there is none."""
        return None if self.seed is None else int(self.seed)

    def most_tokens(self, default: int | None) -> int | None:
        """Return the maximum number of tokens of the answer. None lets the answer continue up to the end of the
        context.
        """
        if self.num_predict is None:
            return default
        return int(self.num_predict) if self.num_predict > 0 else None

    def sampling(self, defaults: SamplingDefaults, seed: int) -> Sampling:
        """Return the sampling of a request. If an option is missing, the model's default is used, not Ollama's."""
        looks_back = self.repeat_last_n is None or self.repeat_last_n != 0
        repetition = first(self.repeat_penalty, defaults.repetition_penalty, 1.0)
        values = sampling_values(self, defaults) | {"repetition_penalty": repetition}
        if not looks_back:
            values |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return Sampling(
            **values,
            seed=derive_seed(seed, 0),
            penalty_window=max(0, int(self.repeat_last_n or 0)),
            typical_p=1.0 if self.typical_p is None else self.typical_p,
        )


def _properties() -> dict[str, Any]:
    """Return the properties of `OllamaOptions`. They are added to the field's schema, because the field is decoded as
    any object.
    """
    _, components = msgspec.json.schema_components([OllamaOptions])
    return {"type": "object", "properties": components[OllamaOptions.__name__]["properties"]}


OptionsField = Annotated[dict[str, Any], shape(_properties())]


def read_options(raw: Mapping[str, Any] | None) -> tuple[OllamaOptions, list[str]]:
    """Read the options. Returns them with the names of ignored options. Raises `BadRequest`."""
    known = OllamaOptions.__struct_fields__
    given = {name: value for name, value in (raw or {}).items() if value is not None}
    options = converted({name: given[name] for name in known if name in given}, OllamaOptions, "options")
    others = {name: value for name, value in given.items() if name not in known and name not in NO_ACTION}
    refuse(others, _REFUSED, "options.")
    return options, [f"options.{name}" for name in others if name not in _REFUSED]

"""Request fields that are the same in each dialect, fields that are refused, and hints for their schemas.

Hints in the schemas of the OpenAPI document: constraints on a field that decoding does not enforce.

The lowering refuses invalid values with its own messages; hints inform clients in advance. Constraints on several
fields are in a struct's class variable `hint`, which is added to the struct's schema.

Request fields `speculate` and `sparse_prefill`, which are the same in each dialect.

Request field `x_mlxd`, and the field of the answer with what it asks for. They are the same in each dialect.

Request field `prompt_cache_options`, which is the same in chat completions and Responses.

Sampling parameters that all dialects have. They come from the request, the model's configuration or the API's
default.

Known fields of other servers that would change an answer but are not supported. A request with such a field gets
status 400, unless the field's value is neutral.

Other unknown fields of a body are treated as hints and reported in `x-mlxd-ignored`.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, NamedTuple, cast

from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.config.settings import SamplingDefaults
from gateway.control_types import RequestTiming
from gateway.errors import Unsupported
from gateway.request.record import RequestRecord
from protocol.to_worker import DraftLength


def words(*known: str) -> Meta:
    """Return the hint for a text that is one of these words."""
    return Meta(extra_json_schema={"enum": list(known)})


def known(*likely: str) -> Meta:
    """Return the hint for a text that is usually one of these words. Other words have no effect or are refused when
    used.
    """
    return Meta(extra_json_schema={"anyOf": [{"enum": list(likely)}, {"type": "string"}]})


def shape(schema: dict[str, Any]) -> Meta:
    """Return a hint with any JSON Schema."""
    return Meta(extra_json_schema=schema)


def typed(*known: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object whose `type` is one of `known`."""
    return {
        "type": "object",
        "properties": {"type": {"enum": list(known)}, **properties},
        "required": ["type"],
    }


def case(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """Return one of several alternative schemas of an object: the `required` fields, and the schemas of its
    `properties`.
    """
    return {"properties": properties, "required": list(required)}


NULL: Final = {"type": "null"}
UNSERVED: Final = shape(NULL | {"description": "Not supported: anything else is refused."})
TEXT: Final = {"type": "string", "minLength": 1}
NAMED: Final = {"type": "object", "properties": {"name": TEXT}, "required": ["name"]}


class DraftSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits the number of tokens in a draft."""

    most: DraftLength


# False turns drafts off. True, or no value, uses the model's settings.
Speculate = bool | DraftSpec


class SparseSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The fraction of the prompt's tokens to keep."""

    keep: Annotated[float, Meta(gt=0, le=1)]


# True keeps the fraction of the prompt that the model's settings name. False, or no value, keeps the whole prompt.
SparsePrefill = bool | SparseSpec


def sparse_keep(spec: SparsePrefill | None) -> float | None:
    """Return the fraction of the prompt to keep. 0 stands for the fraction in the model's settings; None keeps the
    whole prompt.
    """
    if isinstance(spec, SparseSpec):
        return spec.keep
    return 0.0 if spec else None


def most_drafted(spec: Speculate | None) -> int | None:
    """Return the maximum number of tokens in a draft; None means the maximum in the model's settings."""
    if isinstance(spec, DraftSpec):
        return spec.most
    return 0 if spec is False else None


class ExtrasSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Additions to an answer that a request asks for; `timing` is the request's times and counts."""

    timing: bool = False


class AnswerExtras(Struct, frozen=True):
    timing: RequestTiming


Extras = AnswerExtras | UnsetType
# Function that returns the extras at the end of an answer, before its last event is encoded.
MakeExtras = Callable[[], Extras]


def no_extras() -> Extras:
    return UNSET


def extras_of(spec: ExtrasSpec | None, record: RequestRecord) -> MakeExtras:
    """Return the function that makes the extras of a request."""
    if spec is None or not spec.timing:
        return no_extras
    return lambda: AnswerExtras(record.timing())


class PromptCacheOptions(Struct, frozen=True):
    """Options of the prefix cache. `mode` and `ttl` change nothing: every prefix is cached as long as there is room."""

    # Whether the prompt is only put into the prefix cache, and no output is generated.
    prewarm: bool | None = None
    mode: str | None = None
    ttl: str | None = None
    # Id of the response whose prompt this one is compared with, which Responses alone do.
    comparison_response_id: Annotated[str, Meta(max_length=200)] | None = None


def ignored_options(options: PromptCacheOptions | None, *more: str) -> list[str]:
    """Return the given options that change nothing: `mode`, `ttl` and `more`."""
    return [f"prompt_cache_options.{name}" for name in ("mode", "ttl", *more) if getattr(options, name, None)]


def is_prewarm(options: PromptCacheOptions | None) -> bool:
    return options is not None and bool(options.prewarm)


_NEUTRAL: Final[dict[str, float]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def first(asked: float | None, configured: float | None, default: float) -> Any:
    """Return the requested value, or else the configured one, or else the API's default."""
    if asked is not None:
        return asked
    return default if configured is None else configured


def sampling_values(request: object, defaults: SamplingDefaults) -> dict[str, Any]:
    """Return the values of these parameters as fields of `protocol.Sampling`.

    A field that `request` does not have counts as not set.
    """
    values = {
        name: first(getattr(request, name, None), getattr(defaults, name), neutral)
        for name, neutral in _NEUTRAL.items()
    }
    return values | {"top_k": max(0, int(values["top_k"]))}


class RefusedField(NamedTuple):
    """Field, or its `member`, that is refused unless its value is empty or one of `neutral`."""

    advice: str = ""
    neutral: tuple[Any, ...] = ()
    member: str = ""


FieldTable = dict[str, RefusedField]


def _each(advice: str, *neutral: Any, names: str) -> dict[str, RefusedField]:
    return dict.fromkeys(names.split(), RefusedField(advice, neutral))


_FILTERS: Final = "set 'min_p', 'top_p', 'top_k', 'typical_p' or 'top_n_sigma'"
_WORDS: Final = "set 'bad_words'"
_ADAPTER: Final = "ask for the adapter by its name, as the model"
_PIXELS: Final = "set 'mm_processor_kwargs'"
_PROCESSOR: Final = "programs of clients are not run"
_BUDGET: Final = "set 'thinking_budget'"
_TOKEN: Final = "set 'logprobs' and 'top_logprobs'"

# Fields of llama.cpp, vLLM, SGLang, TGI, mlx-lm, mlx-vlm, LM Studio, text-generation-webui and OpenAI.
REFUSED_FIELDS: Final[FieldTable] = {
    # These fields set the form of the answer.
    "structural_tag": RefusedField("set 'response_format', 'grammar', 'regex' or 'ebnf'"),
    **_each("a grammar holds from the first token on", False, names="grammar_lazy grammar_triggers"),
    "grammar_string": RefusedField("set 'grammar'"),
    "guided_whitespace_pattern": RefusedField("JSON is written with at most one space"),
    "n_indent": RefusedField("set 'regex' or 'stop'", (0,)),
    # These fields set the end and the length of the answer.
    "stop_regex": RefusedField("set 'stop'"),
    "no_stop_trim": RefusedField("set 'include_stop_str_in_output'", (False,)),
    "t_max_predict_ms": RefusedField("set 'timeout' or 'max_tokens'", (0, -1)),
    "min_length": RefusedField("set 'min_tokens'", (0,)),
    "ban_eos_token": RefusedField("set 'ignore_eos'", (False,)),
    "repetition_detection": RefusedField("set 'dry_multiplier'"),
    **_each(_BUDGET, -1, names="thinking_token_budget thinking_budget_tokens reasoning_budget reasoning_budget_tokens"),
    # These fields restrict the allowed tokens.
    **_each(_WORDS, names="banned_tokens banned_strings custom_token_bans"),
    "no_repeat_ngram_size": RefusedField("set 'dry_multiplier'", (0,)),
    **_each(_PROCESSOR, names="logits_processors logits_processor custom_logit_processor"),
    "vllm_xargs": RefusedField(),
    **_each("there is no watermark", False, names="watermark watermarking"),
    # These fields set samplers.
    **_each("their order is fixed", names="samplers sampler_priority sampler_order"),
    **_each(_FILTERS, 0, names="mirostat mirostat_mode epsilon_cutoff eta_cutoff top_a p_less min_keep"),
    **_each(_FILTERS, 1, names="tfs tfs_z"),
    "typical": RefusedField("set 'typical_p'", (1,)),
    "adaptive_target": RefusedField(_FILTERS, (-1,)),
    **_each("set a temperature", 0, names="dynatemp_range dynamic_temperature smoothing_factor skew"),
    "do_sample": RefusedField("set 'temperature' to 0", (True,)),
    "encoder_repetition_penalty": RefusedField("set 'repetition_penalty'", (1,)),
    **_each("set 'repeat_last_n', for all penalties", names="presence_context_size frequency_context_size"),
    **_each("there is no contrastive search or guidance", 0, names="penalty_alpha"),
    **_each("there is no contrastive search or guidance", 1, names="guidance_scale cfg_scale"),
    "negative_prompt": RefusedField("there is no contrastive search or guidance"),
    "use_beam_search": RefusedField("ask for choices with 'n'", (False,)),
    "num_beams": RefusedField("ask for choices with 'n'", (1,)),
    "length_penalty": RefusedField("there is no beam search", (1,)),
    **_each("ask for choices with 'n'", 1, names="n_cmpl best_of"),
    # These fields change the prompt.
    "chat_template": RefusedField("set 'chat_template' of the model in mlxd.toml"),
    **_each("write it into the messages", names="documents tool_prompt guideline role_mapping"),
    "safe_prompt": RefusedField("write it into the messages", (False,)),
    "echo": RefusedField("set 'continue_final_message'", (False,)),
    "add_special_tokens": RefusedField("set 'chat_template' of the model in mlxd.toml", (False,)),
    "truncation_side": RefusedField("the last tokens of a prompt are kept", ("left",)),
    **_each("send text or token ids", names="prompt_embeds input_embeds input_ids"),
    **_each(_PIXELS, names="min_pixels max_pixels resize_shape images_config"),
    # These fields change the weights.
    **_each(_ADAPTER, names="adapters adapter_path lora lora_path lora_request"),
    # These fields set what the answer contains.
    "n_probs": RefusedField(_TOKEN, (0,)),
    "post_sampling_probs": RefusedField(_TOKEN, (False,)),
    "logprob_token_ids": RefusedField(_TOKEN),
    **_each("set 'return_token_ids'", False, names="return_tokens return_tokens_as_token_ids"),
    "response_fields": RefusedField("answers are whole"),
    "context_management": RefusedField("send what the model is to read, or use /v1/responses/compact"),
    "prompt_cache_options": RefusedField("send the request with a limit of one token", (False,), "prewarm"),
    "moderation": RefusedField("nothing is moderated here"),
}

# Sampling fields of chat completions, for dialects that do not support them.
SAMPLER_FIELDS: Final[FieldTable] = {
    **_each("", 0, names="min_p xtc_probability dry_multiplier presence_penalty frequency_penalty"),
    **_each("", 1, names="typical_p repetition_penalty repeat_penalty"),
    "top_n_sigma": RefusedField("", (0, -1)),
}


def constraint_fields(form: str, length: str, stop: str = "") -> FieldTable:
    """Return the constraint fields of chat completions, to be refused by a dialect that has other names for them."""
    return {
        **_each(f"set '{form}'", names="response_format grammar json_schema regex ebnf structured_outputs"),
        **_each(f"set '{form}'", names="guided_json guided_regex guided_grammar guided_choice"),
        **_each(f"set '{length}'", -1, names="max_tokens max_completion_tokens n_predict num_predict"),
        **_each(f"set '{stop}'" if stop else "", names="stop stop_token_ids"),
        **_each("", names="logit_bias allowed_token_ids bad_words truncate_prompt_tokens mm_processor_kwargs"),
        "min_tokens": RefusedField("", (0,)),
        "n": RefusedField("", (1,)),
        **_each("", False, names="ignore_eos include_stop_str_in_output continue_final_message"),
        "skip_special_tokens": RefusedField("", (True,)),
    }


def refuse(fields: Mapping[str, Any], table: FieldTable, prefix: str = "") -> None:
    """Raises `Unsupported` for the first of these fields that is in the table and has no neutral value."""
    for name, value in fields.items():
        if (entry := table.get(name)) is None:
            continue
        checked, param = value, f"{prefix}{name}"
        if entry.member:
            checked = cast(dict[str, Any], value).get(entry.member) if isinstance(value, dict) else None
            param = f"{param}.{entry.member}"
        if not _is_neutral(checked, entry.neutral):
            advice = f": {entry.advice}" if entry.advice else ""
            raise Unsupported(f"'{param}' is not supported{advice}.", param)


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    if isinstance(value, str | list | dict) and not cast("str | list[Any] | dict[str, Any]", value):
        return True
    return value is None or value in neutral

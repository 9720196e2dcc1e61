"""Lowering of OpenAI's request bodies to `protocol.Generate`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gateway.api.common.canonical import chat_prompt, sendable
from gateway.api.common.constraints import lower_constraint
from gateway.api.common.drafts import most_drafted, sparse_keep
from gateway.api.common.prompt_cache import is_prewarm
from gateway.api.common.sampling import first, sampling_values
from gateway.api.common.thinking import lower_thinking
from gateway.api.openai.media_parts import media_options
from gateway.api.openai.messages import turns
from gateway.api.openai.request import (
    PROMPTS_MAX,
    ChatCompletionRequest,
    CompletionRequest,
    PromptFields,
    SamplingFields,
)
from gateway.api.openai.samplers import sampler_values
from gateway.api.openai.tools import lower_tools
from gateway.config.settings import ModelConfig, SamplingDefaults
from gateway.errors import BadRequest
from protocol.prompts import ChatPrompt, Infill, Prompt, TextPrompt, TokensPrompt
from protocol.to_worker import Generate, Sampling

# Arguments that clients may not set: the worker itself passes them to the template, or they change how the template is
# called.
RESERVED_KWARGS: Final = frozenset(
    {
        "messages",
        "conversation",
        "conversations",
        # Python passes the template object itself by this name.
        "self",
        "tools",
        "documents",
        "chat_template",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "return_dict",
        "return_tensors",
        "return_assistant_tokens_mask",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
    }
)
# Maximum number of biases. Each choice's message to the worker contains all of them.
BIAS_MAX: Final = 16_384
# Maximum number of texts with a bias. The worker tokenizes each of them.
BIAS_TEXTS_MAX: Final = 256
BIAS_TEXT_CHARS_MAX: Final = 16_384
# OpenAI's default for text completions.
DEFAULT_MAX_TOKENS: Final = 16
_Biases = tuple[dict[int, float], tuple[tuple[str, float], ...]]
_MASK63: Final = (1 << 63) - 1
_MASK64: Final = (1 << 64) - 1


def lower_chat(
    request: ChatCompletionRequest, model: ModelConfig, next_rid: Callable[[], int], seed: int, deadline_ms: int = 0
) -> list[Generate]:
    """Make one `Generate` per choice. Raises `BadRequest`."""
    messages = turns(request.messages, media_options(request))
    continues = bool(request.continue_final_message or request.messages[-1].prefix)
    if request.add_generation_prompt is not None and request.add_generation_prompt is continues:
        message = "'add_generation_prompt' is false where 'continue_final_message' is true, and true elsewhere."
        raise BadRequest(message, "add_generation_prompt", "invalid_value")
    if continues and request.messages[-1].role != "assistant":
        raise BadRequest("The last message must be the assistant's to be continued.", "continue_final_message")
    if request.top_logprobs is not None and not request.logprobs:
        raise BadRequest("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    for name in ("max_completion_tokens", "max_tokens", "n_predict"):
        if getattr(request, name) == 0:
            raise BadRequest(f"Invalid value for '{name}': expected int >= 1, or -1.", name, "invalid_value")
    tool_use, thinking = lower_tools(request), lower_thinking(request, model.thinking)
    max_tokens = request.token_limit if request.max_completion_tokens is None else request.max_completion_tokens
    is_prewarm_only = is_prewarm(request.prompt_cache_options)
    prompt = chat_prompt(messages, tool_use, thinking, template_kwargs(request.chat_template_kwargs), continues)
    return lower_texts(
        request,
        model,
        [prompt],
        next_rid,
        seed,
        0 if is_prewarm_only else max_tokens,
        deadline_ms,
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        thinking_budget=None if is_prewarm_only else thinking.budget,
        prediction=sendable(request.prediction.text, "prediction") if request.prediction is not None else "",
    )


def lower_completion(
    request: CompletionRequest, model: ModelConfig, next_rid: Callable[[], int], seed: int, deadline_ms: int = 0
) -> list[Generate]:
    """Lower a text completion, with OpenAI's default length. Raises `BadRequest`."""
    max_tokens = request.token_limit
    if max_tokens == 0 and not request.echo:
        raise BadRequest("'max_tokens' 0 needs 'echo': true.", "max_tokens", "invalid_value")
    return lower_texts(
        request,
        model,
        _prompts(request.prompt, request.suffix, adds_special=request.add_special_tokens is not False),
        next_rid,
        seed,
        DEFAULT_MAX_TOKENS if max_tokens is None and model.sampling.max_tokens is None else max_tokens,
        deadline_ms,
        top_logprobs=request.logprobs,
        echo=bool(request.echo),
    )


def derive_seed(seed: int, choice: int) -> int:
    """Derive the seed of a choice. The first choice has the request's seed; the others get values of splitmix64."""
    if choice == 0:
        return seed & _MASK63
    z = (seed + choice * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (z ^ (z >> 31)) & _MASK63


def lower_texts(
    request: SamplingFields,
    model: ModelConfig,
    prompts: Sequence[Prompt],
    next_rid: Callable[[], int],
    seed: int,
    max_tokens: int | None,
    deadline_ms: int = 0,
    *,
    top_logprobs: int | None = None,
    echo: bool = False,
    thinking_budget: int | None = None,
    prediction: str = "",
) -> list[Generate]:
    """Make a `Generate` for each prompt and choice. The choices of a prompt are adjacent.

    A negative `max_tokens` means no limit, and None the model's default. Raises `BadRequest`.
    """
    choices = request.n or 1
    most = model.sampling.max_tokens if max_tokens is None else max_tokens if max_tokens >= 0 else None
    if max_tokens is not None and 0 <= max_tokens < (request.min_tokens or 0):
        raise BadRequest("'min_tokens' is more than 'max_tokens'.", "min_tokens", "invalid_value")
    constraint = lower_constraint(request, after_reasoning=isinstance(prompts[0], ChatPrompt))
    bias = _biases(request.logit_bias or {})
    about = request if isinstance(request, PromptFields) else None
    truncate = (about.truncate_prompt_tokens or 0) if about is not None else 0
    sends_ids = about is not None and bool(about.return_token_ids)
    scored = about.scored if about is not None else None
    return [
        Generate(
            next_rid(),
            prompts[index // choices],
            _sampling(request, model.sampling, bias, derive_seed(seed, index)),
            max_tokens=most,
            stop=request.stops,
            top_logprobs=top_logprobs,
            echo=echo,
            deadline_ms=_sooner(deadline_ms, request.timeout),
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
            want_progress=True,
            thinking_budget=thinking_budget,
            constraint=constraint,
            most_drafted=most_drafted(request.speculate),
            sparse_keep=sparse_keep(request.sparse_prefill),
            prediction=prediction,
            includes_stop=bool(request.include_stop_str_in_output),
            shows_special=request.skip_special_tokens is False,
            truncate=truncate,
            cuts_tokens=bool(truncate) and isinstance(prompts[index // choices], ChatPrompt),
            # A whole answer contains the prompt's token ids once per prompt; a stream contains them once per choice.
            prompt_ids=sends_ids and (bool(request.stream) or index % choices == 0),
            prompt_logprobs=scored if index % choices == 0 else None,
        )
        for index in range(len(prompts) * choices)
    ]


def _sampling(request: SamplingFields, model: SamplingDefaults, bias: _Biases, seed: int) -> Sampling:
    values = sampling_values(request, model) | sampler_values(request)
    if request.penalty_window is None:
        # If the penalty window has no tokens, there is nothing to penalize.
        values["repetition_penalty"] = 1.0
    elif request.repetition_penalty is None:
        values["repetition_penalty"] = first(request.repeat_penalty, model.repetition_penalty, 1.0)
    return Sampling(
        **values,
        logit_bias=bias[0],
        bias_texts=bias[1],
        seed=seed,
        ignore_eos=bool(request.ignore_eos),
    )


def _sooner(deadline_ms: int, timeout_s: float | None) -> int:
    """Return the earlier deadline: the server's or the request's own; 0 means no deadline."""
    asked_ms = 0 if timeout_s is None else max(1, int(timeout_s * 1000))
    return min(deadline_ms, asked_ms) if deadline_ms and asked_ms else deadline_ms or asked_ms


def _biases(given: Mapping[str, float] | Sequence[tuple[int | str, float]]) -> _Biases:
    """Return biases of token ids and biases of texts. Raises `BadRequest`."""
    ids: dict[int, float] = {}
    texts: list[tuple[str, float]] = []
    if len(given) > BIAS_MAX:
        raise BadRequest(f"'logit_bias' has {len(given)} entries; at most {BIAS_MAX} are taken.", "logit_bias")
    for key, value in given.items() if isinstance(given, Mapping) else given:
        # The digits are checked because int() would also accept "+1", " 1" and "1_0". A list of pairs names token ids
        # by numbers, so a text of digits in it is a text.
        if isinstance(key, int) or (isinstance(given, Mapping) and key.isascii() and key.isdigit() and len(key) <= 10):
            ids[int(key)] = value
        elif not key or (isinstance(given, Mapping) and key.lstrip("+-").isdigit()):
            message = f"'logit_bias' keys are token ids or texts, not {key[:50]!r}."
            raise BadRequest(message, "logit_bias", "invalid_value")
        else:
            texts.append((sendable(key, "logit_bias"), value))
    if len(texts) > BIAS_TEXTS_MAX or sum(len(text) for text, _ in texts) > BIAS_TEXT_CHARS_MAX:
        message = f"'logit_bias' names more than {BIAS_TEXTS_MAX} texts, or longer ones: send token ids."
        raise BadRequest(message, "logit_bias", "invalid_value")
    return ids, tuple(texts)


def _prompts(raw: str | list[Any], suffix: str | None, *, adds_special: bool) -> list[Prompt]:
    infill = Infill(suffix) if suffix else None
    if isinstance(raw, str):
        return [_text_prompt(raw, "prompt", infill, adds_special)]
    if not raw:
        raise BadRequest("'prompt' is empty.", "prompt", "invalid_value")
    kinds = {type(item) for item in raw}
    if infill is not None and kinds != {str}:
        raise BadRequest("'suffix' needs prompts of text.", "suffix", "invalid_value")
    if kinds == {int}:
        return [TokensPrompt(tuple(raw))]
    if len(raw) > PROMPTS_MAX:
        raise BadRequest(f"At most {PROMPTS_MAX} prompts in one request.", "prompt", "invalid_value")
    if kinds == {str}:
        return [_text_prompt(text, f"prompt[{index}]", infill, adds_special) for index, text in enumerate(raw)]
    if kinds == {list}:
        if any(not ids for ids in raw):
            raise BadRequest("'prompt' holds an empty list of token ids.", "prompt", "invalid_value")
        return [TokensPrompt(tuple(ids)) for ids in raw]
    raise BadRequest(
        "'prompt' must be a string, a list of strings, a list of token ids, or a list of those.",
        "prompt",
        "invalid_value",
    )


def _text_prompt(text: str, param: str, infill: Infill | None, adds_special: bool) -> TextPrompt:
    if not text and infill is None:
        raise BadRequest(f"'{param}' is empty.", param, "invalid_value")
    return TextPrompt(text, infill, adds_special)


def template_kwargs(asked: dict[str, Any] | None) -> dict[str, Any]:
    """Return the additional arguments of the chat template. Raises `BadRequest`."""
    kwargs = dict(asked or {})
    if reserved := sorted(RESERVED_KWARGS & kwargs.keys()):
        raise BadRequest(f"'chat_template_kwargs' must not set {reserved[0]!r}.", "chat_template_kwargs")
    return sendable(kwargs, "chat_template_kwargs")

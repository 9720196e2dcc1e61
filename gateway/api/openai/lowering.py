"""Lowering of OpenAI's request bodies to `protocol.Generate`.

Message parts with an image, video, audio or file, in the spellings of OpenAI and other servers.

Lowering of OpenAI's messages, as all versions of the API spell them, to the turns that chat templates expect.

Lowering of OpenAI's tools and tool choice, in the new and the legacy form, to one `ToolPolicy`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from msgspec import Struct

from gateway.api.common import canonical
from gateway.api.common.canonical import (
    Call,
    Content,
    FunctionTool,
    ToolMode,
    ToolPolicy,
    arguments_text,
    chat_prompt,
    named_results,
    sendable,
)
from gateway.api.common.constraints import lower_constraint
from gateway.api.common.decode import converted
from gateway.api.common.request_fields import first, is_prewarm, most_drafted, sampling_values, sparse_keep
from gateway.api.common.thinking import lower_thinking
from gateway.api.openai.request import (
    PROMPTS_MAX,
    ROLES,
    TEXT_PARTS,
    TOOL_MODES,
    AudioData,
    CallSpec,
    ChatCompletionRequest,
    CompletionRequest,
    FunctionSpec,
    MediaLink,
    MessagePart,
    PromptFields,
    RequestMessage,
    SamplingFields,
    ToolSpec,
    sampler_values,
)
from gateway.config.settings import ModelConfig, SamplingDefaults
from gateway.errors import BadRequest, Unsupported, invalid_choice, missing_parameter
from gateway.media.media_reference import AUDIO, IMAGE, VIDEO, by_base64, by_url, detail_options, document, merged
from protocol.to_worker import ChatPrompt, Generate, Infill, Prompt, Sampling, TextPrompt, TokensPrompt

# Maps each type of part to its kind of medium, and to the fields that may have its URL, the usual field first.
MEDIA_PARTS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "image_url": (IMAGE, ("image_url",)),
    "input_image": (IMAGE, ("image_url", "image")),
    "image": (IMAGE, ("image", "image_url")),
    "video_url": (VIDEO, ("video_url",)),
    "input_video": (VIDEO, ("video", "video_url")),
    "video": (VIDEO, ("video", "video_url")),
    "audio_url": (AUDIO, ("audio_url",)),
    "input_audio": (AUDIO, ("input_audio", "audio_url")),
}

Options = dict[str, int | float]
# Options that apply to all media of a request, by kind of medium.
MediaOptions = Mapping[str, Options]
NO_OPTIONS: Final[MediaOptions] = {IMAGE: {}, VIDEO: {}, AUDIO: {}}


def media_options(request: ChatCompletionRequest) -> MediaOptions:
    """Merge the request's `mm_processor_kwargs` and `media_io_kwargs`; the latter win. Raises `BadRequest`."""
    processing, reading = request.mm_processor_kwargs, request.media_io_kwargs
    pixels = {} if processing is None else _set(min_pixels=processing.min_pixels, max_pixels=processing.max_pixels)
    if pixels.get("min_pixels", 0) > pixels.get("max_pixels", 1 << 30):
        param = "mm_processor_kwargs.min_pixels"
        raise BadRequest(f"'{param}' is more than 'max_pixels'.", param, "invalid_value")
    frames = {} if processing is None else _set(fps=processing.fps)
    if reading is not None and reading.video is not None:
        frames |= _set(num_frames=reading.video.num_frames, fps=reading.video.fps)
    return {IMAGE: pixels, VIDEO: pixels | frames, AUDIO: {}}


def media_part(part: MessagePart, where: str, options: MediaOptions) -> dict[str, Any]:
    """Lower a part whose type is one of `MEDIA_PARTS`. Raises `BadRequest`."""
    kind, fields = MEDIA_PARTS[part.type]
    given = next((value for name in fields if (value := getattr(part, name)) is not None), None)
    if isinstance(given, AudioData):
        return by_base64(kind, given.data, where)
    if given is None:
        raise missing_parameter(f"{where}.{fields[0]}")
    url, detail = (given.url, given.detail) if isinstance(given, MediaLink) else (given, None)
    if kind == IMAGE:
        own = detail_options(detail or part.detail, f"{where}.detail")
        return by_url(kind, url, where, merged(own, options[kind]))
    return by_url(kind, url, where, options[kind])


def file_part(part: MessagePart, where: str, options: MediaOptions) -> dict[str, Any]:
    """Lower a part with a PDF. Raises `BadRequest`."""
    if part.file is None:
        raise missing_parameter(f"{where}.file")
    if part.file.file_id is not None:
        raise Unsupported("There are no uploaded files here: send the file as base64.", f"{where}.file.file_id")
    if part.file.file_data is None:
        raise missing_parameter(f"{where}.file.file_data")
    return document(part.file.file_data, part.file.filename or "", where, options[IMAGE])


def _set(**options: float | None) -> Options:
    return {name: value for name, value in options.items() if value is not None}


def turns(messages: Sequence[RequestMessage], options: MediaOptions = NO_OPTIONS) -> list[dict[str, Any]]:
    """Lower a conversation.

    Each tool result gets the name of the called tool. `options` apply to all media. Raises `BadRequest`.
    """
    # Legacy function calls have no ids. Each call gets one here, and so does its result.
    legacy: dict[str, str] = {}
    return named_results(
        [_turn(message, f"messages[{index}]", legacy, options) for index, message in enumerate(messages)]
    )


def _turn(message: RequestMessage, where: str, legacy: dict[str, str], options: MediaOptions) -> dict[str, Any]:
    if message.role not in ROLES:
        raise invalid_choice(message.role, ROLES, f"{where}.role")
    if message.audio is not None:
        raise Unsupported("Audio is not supported.", f"{where}.audio")
    if message.role == "assistant":
        return _assistant(message, where, legacy)
    if message.tool_calls or message.function_call:
        raise BadRequest("Only the assistant calls tools.", f"{where}.tool_calls", "invalid_value")
    if message.role == "tool":
        if message.tool_call_id is None:
            raise missing_parameter(f"{where}.tool_call_id")
        content = _content(message.content, where, options)
        return canonical.tool_result(message.tool_call_id, message.name or "", content)
    if message.role == "function":
        if message.name is None:
            raise missing_parameter(f"{where}.name")
        call_id = legacy.get(message.name, f"call_{message.name}")
        return canonical.tool_result(call_id, message.name, _content(message.content, where, options))
    if message.content is None:
        raise missing_parameter(f"{where}.content")
    content = _content(message.content, where, options)
    is_user = message.role == "user"
    # Templates expect the role "system", which OpenAI now calls "developer".
    turn = canonical.user(content) if is_user else canonical.system(canonical.only_text(content, where))
    return turn if message.name is None else {**turn, "name": message.name}


def _assistant(message: RequestMessage, where: str, legacy: dict[str, str]) -> dict[str, Any]:
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    calls = [_call(spec, f"{where}.tool_calls[{at}]") for at, spec in enumerate(message.tool_calls or ())]
    if message.function_call is not None:
        function = message.function_call
        legacy[function.name] = f"call_{len(legacy)}_{function.name}"
        calls.append(Call(legacy[function.name], function.name, arguments_text(function.arguments)))
    text = canonical.only_text(_content(message.content, where, NO_OPTIONS), where)
    # An answer that refuses has its text in `refusal`, beside an empty content.
    turn = canonical.assistant("\n".join(filter(None, (text, message.refusal))), calls, reasoning)
    return turn if message.name is None else {**turn, "name": message.name}


def _call(spec: CallSpec, where: str) -> Call:
    if spec.type != "function":
        raise Unsupported(f"Calls of type {spec.type!r} are not supported on this endpoint.", f"{where}.type")
    if spec.function is None:
        raise missing_parameter(f"{where}.function")
    return Call(spec.id, spec.function.name, arguments_text(spec.function.arguments))


def _content(content: str | list[MessagePart] | None, where: str, options: MediaOptions) -> Content:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = (_part(part, f"{where}.content[{index}]", options) for index, part in enumerate(content))
    return canonical.content(parts, "")


def _part(part: MessagePart, where: str, options: MediaOptions) -> str | dict[str, Any]:
    if part.type in TEXT_PARTS:
        if part.text is None:
            raise missing_parameter(f"{where}.text")
        return part.text
    if part.type == "refusal":
        if part.refusal is None:
            raise missing_parameter(f"{where}.refusal")
        return part.refusal
    if part.type in MEDIA_PARTS:
        return media_part(part, where, options)
    if part.type == "file":
        return file_part(part, where, options)
    if part.type == "input_file":
        raise Unsupported("'input_file' belongs to the Responses API; a chat has files as parts of type 'file'.", where)
    raise BadRequest(f"Invalid value for '{where}.type': {part.type[:50]!r}.", f"{where}.type", "invalid_value")


# Longer names and more characters than OpenAI's are accepted, because gateways to other servers put paths into names.
_NAME: Final = re.compile(r"[\w.\-:/@$]{1,128}")


class _FunctionName(Struct, frozen=True):
    name: str


class _AllowedTools(Struct, frozen=True):
    mode: str = "auto"
    tools: list[dict[str, Any]] = []


class _ChoiceSpec(Struct, frozen=True):
    """`{"type": "function", "function": {"name": …}}`, `allowed_tools`, both without the inner object, or a mode."""

    type: str
    function: _FunctionName | None = None
    name: str | None = None
    allowed_tools: _AllowedTools | None = None
    mode: str = "auto"
    tools: list[dict[str, Any]] | None = None


def lower_tools(request: ChatCompletionRequest) -> ToolPolicy:
    """Lower tools and the tool choice. Raises `BadRequest`."""
    if request.functions:
        if request.tools:
            raise BadRequest("'functions' and 'tools' exclude each other.", "functions", "invalid_value")
        return _legacy(request.functions, request.function_call)
    if request.function_call not in (None, "none", "auto"):
        raise BadRequest("'function_call' needs 'functions'.", "function_call", "invalid_value")
    tools = [lower_tool(spec, f"tools[{index}]") for index, spec in enumerate(request.tools or ())]
    use = _choose(tools, request.tool_choice, request.parallel_tool_calls is not False)
    return use.check("tool_choice")


def _legacy(functions: Sequence[FunctionSpec], call: Any) -> ToolPolicy:
    """Lower legacy functions. With them, an answer has at most one call."""
    tools = tuple(_function(spec, f"functions[{index}]") for index, spec in enumerate(functions))
    if isinstance(call, dict):
        name = converted(call, _FunctionName, "function_call").name
        return ToolPolicy(tools, ToolMode.NAMED, name, is_parallel=False).check("function_call")
    if call not in (None, "none", "auto"):
        raise BadRequest(f"Invalid value for 'function_call': {_shown(call)}.", "function_call", "invalid_value")
    return ToolPolicy(tools, TOOL_MODES[call or "auto"], is_parallel=False).check("functions")


def lower_tool(spec: ToolSpec, where: str) -> FunctionTool:
    """Lower a function that the model may call. Raises `BadRequest`."""
    if spec.type != "function":
        raise Unsupported(f"Tools of type {spec.type!r} are not supported on this endpoint.", f"{where}.type")
    if spec.function is None:
        raise missing_parameter(f"{where}.function")
    return _function(spec.function, f"{where}.function")


def _function(spec: FunctionSpec, where: str) -> FunctionTool:
    if not _NAME.fullmatch(spec.name):
        message = f"Invalid value for '{where}.name': expected letters, digits, '_' and '-', at most 128."
        raise BadRequest(message, f"{where}.name", "invalid_value")
    parameters = sendable(spec.parameters or {}, f"{where}.parameters")
    return FunctionTool(spec.name, spec.description or "", parameters, bool(spec.strict))


def _choose(tools: list[FunctionTool], choice: Any, is_parallel: bool) -> ToolPolicy:
    if choice is None or isinstance(choice, str):
        return ToolPolicy(tuple(tools), _mode(choice or "auto", "tool_choice"), is_parallel=is_parallel)
    if not isinstance(choice, dict):
        raise BadRequest(f"Invalid value for 'tool_choice': {_shown(choice)}.", "tool_choice", "invalid_value")
    spec = converted(cast("dict[str, Any]", choice), _ChoiceSpec, "tool_choice")
    match spec.type:
        case mode if mode in TOOL_MODES:
            return ToolPolicy(tuple(tools), TOOL_MODES[mode], is_parallel=is_parallel)
        case "function":
            name = spec.function.name if spec.function is not None else spec.name
            if name is None:
                raise missing_parameter("tool_choice.function")
            return ToolPolicy(tuple(tools), ToolMode.NAMED, name, is_parallel)
        case "allowed_tools":
            allowed = spec.allowed_tools
            if allowed is None:
                if spec.tools is None:
                    raise missing_parameter("tool_choice.allowed_tools")
                allowed = _AllowedTools(spec.mode, spec.tools)
            return _allow(tools, allowed, is_parallel)
        case kind:
            raise invalid_choice(kind, (*TOOL_MODES, "function", "allowed_tools"), "tool_choice.type")


def _allow(tools: list[FunctionTool], allowed: _AllowedTools, is_parallel: bool) -> ToolPolicy:
    """Return a policy that shows only the allowed tools to the model."""
    where = "tool_choice.allowed_tools"
    names: set[str] = set()
    for index, raw in enumerate(allowed.tools):
        spec = converted(raw, _ChoiceSpec, f"{where}.tools[{index}]")
        names.add(spec.function.name if spec.function is not None else spec.name or "")
    if unknown := names - {tool.name for tool in tools}:
        raise BadRequest(f"There is no tool named {min(unknown)[:100]!r}.", f"{where}.tools", "invalid_value")
    kept = tuple(tool for tool in tools if tool.name in names)
    return ToolPolicy(kept, _mode(allowed.mode, f"{where}.mode"), is_parallel=is_parallel)


def _mode(word: str, param: str) -> ToolMode:
    if word not in TOOL_MODES:
        raise invalid_choice(word, TOOL_MODES, param)
    return TOOL_MODES[word]


def _shown(value: Any) -> str:
    return repr(value)[:60]


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

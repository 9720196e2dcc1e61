"""State of a response before its generation: the fields of the request with defaults filled in."""

import msgspec
from msgspec import UNSET

from gateway.api.common.sampling import sampling_values
from gateway.api.responses import response as out
from gateway.api.responses.request import ResponsesRequest, SummarizedReasoning, TextSpec
from gateway.api.responses.tools import Toolbox, plain_choice
from gateway.config.settings import ModelConfig


def echo(
    request: ResponsesRequest, box: Toolbox, model: ModelConfig, response_id: str, created_at: int, is_stored: bool
) -> out.Response:
    """Return the response with which a stream begins."""
    sampling = sampling_values(request, model.sampling)
    return out.Response(
        id=response_id,
        created_at=created_at,
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=model.full_name,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        presence_penalty=sampling["presence_penalty"],
        frequency_penalty=sampling["frequency_penalty"],
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=_reasoning(request.reasoning),
        safety_identifier=request.safety_identifier,
        store=is_stored,
        temperature=sampling["temperature"],
        text=_text(request.text),
        tool_choice=plain_choice(request.tool_choice),
        tools=box.echo,
        top_logprobs=request.top_logprobs or 0,
        top_p=sampling["top_p"],
        truncation=request.truncation or "disabled",
        user=UNSET if request.user is None else request.user,
        metadata=request.metadata or {},
    )


def _reasoning(spec: SummarizedReasoning | None) -> out.ReasoningEcho:
    return out.ReasoningEcho(None, None) if spec is None else out.ReasoningEcho(spec.effort, spec.summary)


def _text(spec: TextSpec | None) -> out.TextEcho:
    if spec is None:
        return out.TextEcho(out.FormatEcho())
    fields = {} if spec.format is None else msgspec.structs.asdict(spec.format)
    return out.TextEcho(out.FormatEcho(**fields), spec.verbosity or "medium")

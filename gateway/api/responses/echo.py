"""A response before anything was generated: what was asked, with what that means here filled in."""

import msgspec
from msgspec import UNSET

from gateway.api.responses import response as out
from gateway.api.responses.lowering import first
from gateway.api.responses.request import ResponsesRequest
from gateway.api.responses.tools import Toolbox
from gateway.config.settings import ModelConfig


def echo(
    request: ResponsesRequest, box: Toolbox, model: ModelConfig, response_id: str, created_at: int, is_stored: bool
) -> out.Response:
    """The response that a stream begins with."""
    defaults = model.sampling
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
        presence_penalty=first(request.presence_penalty, defaults.presence_penalty, 0.0),
        frequency_penalty=first(request.frequency_penalty, defaults.frequency_penalty, 0.0),
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=_reasoning(request),
        safety_identifier=request.safety_identifier,
        store=is_stored,
        temperature=first(request.temperature, defaults.temperature, 1.0),
        text=_text(request),
        tool_choice=request.tool_choice or "auto",
        tools=box.echo,
        top_logprobs=request.top_logprobs or 0,
        top_p=first(request.top_p, defaults.top_p, 1.0),
        truncation=request.truncation or "disabled",
        user=UNSET if request.user is None else request.user,
        metadata=request.metadata or {},
    )


def _reasoning(request: ResponsesRequest) -> out.ReasoningEcho:
    wish = request.reasoning
    return out.ReasoningEcho(None, None) if wish is None else out.ReasoningEcho(wish.effort, wish.summary)


def _text(request: ResponsesRequest) -> out.TextEcho:
    wish = request.text
    if wish is None:
        return out.TextEcho(out.FormatEcho())
    given = wish.format
    fields = {} if given is None else msgspec.structs.asdict(given)
    return out.TextEcho(out.FormatEcho(**fields), wish.verbosity or "medium")

"""Body of a request for an upstream: the fields that decide its destination and its cost."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Final, cast

import msgspec
from msgspec import Meta

from gateway.api.common.refused_fields import FieldTable, RefusedField, refuse
from gateway.api.common.structure import check_json
from gateway.errors import BadRequest, Unsupported
from protocol.codec import UNREADABLE

# OpenAI's completions generate this many tokens if `max_tokens` is missing. Chats have no default.
_COMPLETION_TOKENS: Final = 16
_LIMITS: Final = ("max_tokens", "max_completion_tokens")

_ROUTE: Final = "the configuration chooses the model and the service of a request that leaves"
_REACH: Final = "a request that leaves reaches its upstream alone"
_PRICE: Final = "requests that leave have the usual price"
# Fields of OpenRouter, LiteLLM, OpenAI and Anthropic that choose another model or price, or let the service use others.
_REFUSED: Final[FieldTable] = {
    **dict.fromkeys(["models", "route", "provider", "preset", "api_base", "base_url", "api_key"], RefusedField(_ROUTE)),
    **dict.fromkeys(["fallbacks", "context_window_fallbacks", "content_policy_fallbacks"], RefusedField(_ROUTE)),
    **dict.fromkeys(["model_list", "user_config", "custom_llm_provider", "inference_geo"], RefusedField(_ROUTE)),
    **dict.fromkeys(["plugins", "web_search_options", "mcp_servers", "container"], RefusedField(_REACH)),
    "service_tier": RefusedField(_PRICE, ("auto", "default", "flex", "standard_only")),
    "speed": RefusedField(_PRICE, ("standard",)),
}
# Types of tools that the client runs. Services run the others themselves, on the web for instance.
_CLIENT_TOOLS: Final = re.compile(r"function|custom|(bash|text_editor|computer|memory)_\d+")

_Choices = Annotated[int, Meta(ge=1, le=1 << 20)]
# -1 means no limit.
_Tokens = Annotated[int, Meta(ge=-1, le=1 << 40)]


class RoutedFields(msgspec.Struct, frozen=True):
    """Fields that decide the destination of a request."""

    model: str = ""
    stream: bool | None = False


class _CostFields(msgspec.Struct, frozen=True):
    """Fields that decide the cost of a request."""

    n: _Choices | None = None
    best_of: _Choices | None = None
    max_tokens: _Tokens | None = None
    max_completion_tokens: _Tokens | None = None
    prompt: str | list[msgspec.Raw] | None = None

    @property
    def sequences(self) -> int:
        """Number of sequences: prompts times choices."""
        prompts = 1
        if isinstance(self.prompt, list) and self.prompt and bytes(self.prompt[0])[:1] in (b'"', b"["):
            prompts = len(self.prompt)
        return prompts * max(self.n or 1, self.best_of or 1)


_routed_fields: Final = msgspec.json.Decoder(RoutedFields)
_cost_fields: Final = msgspec.json.Decoder(_CostFields)
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class UpstreamBody:
    """A body that is within its key's limits. `max_tokens` is the limit of each sequence; None means no limit."""

    sequences: int
    max_tokens: int | None
    fields: dict[str, msgspec.Raw]

    def with_model(self, model: str) -> bytes:
        """Encode the body with the model's name at the upstream. All other fields stay unchanged."""
        return msgspec.json.encode(self.fields | {"model": msgspec.Raw(msgspec.json.encode(model))})


def read_routed_fields(body: bytes) -> RoutedFields:
    """Decode the fields. They are empty if the body is invalid, which the endpoint will refuse."""
    try:
        return _routed_fields.decode(body)
    except UNREADABLE:
        return RoutedFields()


def bounded_body(body: bytes, tokens_max: int) -> UpstreamBody:
    """Limit the tokens of each sequence of a body to `tokens_max`; 0 means no limit.

    Raises `BadRequest`, also for fields that choose another model, service or price.
    """
    check_json(body)
    try:
        cost, fields = _cost_fields.decode(body), _fields.decode(body)
    except UNREADABLE as error:
        raise BadRequest(f"The body is not valid: {error}.") from None
    refuse({name: _value(fields[name]) for name in fields if name in _REFUSED}, _REFUSED)
    _check_tools(_value(fields.get("tools")))
    # Other servers refuse mlxd's own field for extras of the answer.
    fields.pop("x_mlxd", None)
    limits = {name: limit for name in _LIMITS if (limit := getattr(cost, name)) is not None}
    if not limits and cost.prompt is not None:
        limits = {"max_tokens": _COMPLETION_TOKENS}
    if tokens_max:
        limits = {name: min(limit, tokens_max) if limit >= 0 else tokens_max for name, limit in limits.items()}
        limits = limits or {"max_tokens": tokens_max}
        fields |= {name: msgspec.Raw(b"%d" % limit) for name, limit in limits.items()}
    most = max(limits.values()) if limits and min(limits.values()) >= 0 else None
    return UpstreamBody(cost.sequences, most, fields)


def _value(field: msgspec.Raw | None) -> Any:
    return None if field is None else msgspec.json.decode(field)


def _check_tools(tools: Any) -> None:
    """Raises `Unsupported` for a tool that the upstream would run."""
    for index, tool in enumerate(cast(list[Any], tools) if isinstance(tools, list) else []):
        kind = cast(dict[str, Any], tool).get("type") if isinstance(tool, dict) else None
        if kind is not None and not (isinstance(kind, str) and _CLIENT_TOOLS.fullmatch(kind)):
            message = f"Tools of the type {str(kind)[:100]!r} are not supported: the client must run its tools."
            raise Unsupported(message, f"tools[{index}].type")

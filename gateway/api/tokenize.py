"""`POST /tokenize` and `POST /detokenize`, as vLLM and SGLang have them."""

from typing import Any, ClassVar

import msgspec
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from gateway.api.common import serve
from gateway.api.common.canonical import ToolUse, chat_prompt
from gateway.api.common.decode import Schema
from gateway.api.common.doc_hints import NULL, TEXT, case
from gateway.api.common.thinking import of_config
from gateway.api.openai.messages import turns
from gateway.api.openai.request import Message, TokenId
from gateway.config.settings import ThinkingDefaults
from gateway.errors import BadRequest
from gateway.http.exchange import send_body
from gateway.http.sse import cut_off
from gateway.request.record import record_of
from gateway.services import Services
from protocol.messages import ChatPrompt, TextPrompt


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """Either `prompt` or `messages`."""

    hint: ClassVar = {
        "anyOf": [
            case(("prompt",), prompt=TEXT, messages=NULL),
            case(("messages",), messages={"type": "array", "minItems": 1}),
        ]
    }

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None
    chat_template_kwargs: dict[str, Any] = {}


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    model: str = ""
    tokens: list[TokenId]


class Tokens(Struct, frozen=True):
    tokens: tuple[int, ...]
    count: int
    max_model_len: int


class Text(Struct, frozen=True):
    prompt: str


_tokenize = Schema(TokenizeRequest, listed="messages", item=Message)
_detokenize = Schema(DetokenizeRequest)


class TokenizeText:
    """An ASGI endpoint."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, record = self._services, record_of(scope)
        request, unknown = await serve.read(services, record, scope, receive, _tokenize.decode)
        model, _ = serve.begin(services, record, request.model, False, None, unknown)
        prompt = await services.bodies.work(record.body_bytes, _prompt, request, model.thinking)
        async with cut_off(record, receive):
            tokenized = await serve.tokenize(services, record, model, prompt, want_ids=True)
            ready = services.view(model).ready
            answer = Tokens(tokenized.ids, tokenized.count, ready.max_context if ready is not None else 0)
            await send_body(send, 200, msgspec.json.encode(answer), record.headers)


class DetokenizeIds:
    """An ASGI endpoint."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, record = self._services, record_of(scope)
        request, unknown = await serve.read(services, record, scope, receive, _detokenize.decode)
        model, _ = serve.begin(services, record, request.model, False, None, unknown)
        async with cut_off(record, receive):
            decoded = await serve.detokenize(services, record, model, tuple(request.tokens))
            await send_body(send, 200, msgspec.json.encode(Text(decoded.text)), record.headers)


def _prompt(request: TokenizeRequest, default: ThinkingDefaults) -> ChatPrompt | TextPrompt:
    if request.messages is not None:
        if not request.messages:
            raise BadRequest("'messages' is empty.", "messages", "invalid_value")
        return chat_prompt(turns(request.messages), ToolUse(), of_config(default), request.chat_template_kwargs)
    if not request.prompt:
        raise BadRequest("'prompt' is empty.", "prompt", "invalid_value")
    return TextPrompt(request.prompt)

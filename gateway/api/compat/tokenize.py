"""`POST /tokenize`, `/detokenize` and `/apply-template`, as in vLLM, SGLang and llama.cpp."""

from typing import Any, ClassVar, Final

import msgspec
from msgspec import Struct
from starlette.types import Receive, Scope, Send

from gateway.api.common import serve
from gateway.api.common.canonical import ToolPolicy, chat_prompt
from gateway.api.common.decode import Schema
from gateway.api.common.request_fields import NULL, REFUSED_FIELDS, TEXT, RefusedField, case
from gateway.api.common.thinking import of_config
from gateway.api.openai.lowering import lower_chat, template_kwargs, turns
from gateway.api.openai.request import RequestMessage, TokenId, decode_chat
from gateway.config.settings import ThinkingDefaults
from gateway.errors import BadRequest, Unsupported
from gateway.http.bodies import send_body
from gateway.http.sse import cut_off
from gateway.request.record import record_of
from gateway.services import Services
from protocol.to_worker import ChatPrompt, TextPrompt


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """Prompt to tokenize: `prompt` or `messages` as in vLLM, or `content` as in llama.cpp, which gets no special
    tokens.
    """

    hint: ClassVar = {
        "anyOf": [
            case(("prompt",), prompt=TEXT, content=NULL, messages=NULL),
            case(("content",), content=TEXT, prompt=NULL, messages=NULL),
            case(("messages",), messages={"type": "array", "minItems": 1}, prompt=NULL, content=NULL),
        ]
    }

    model: str = ""
    prompt: str | None = None
    content: str | None = None
    messages: list[RequestMessage] | None = None
    # Whether the tokenizer adds its special tokens around a text. The default is true for `prompt` and false for
    # `content`.
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    chat_template_kwargs: dict[str, Any] = {}


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    model: str = ""
    tokens: list[TokenId]


class TokenizedText(Struct, frozen=True):
    tokens: tuple[int, ...]
    count: int
    max_model_len: int


class DetokenizedText(Struct, frozen=True):
    """The text, in vLLM's and in llama.cpp's field."""

    prompt: str
    content: str


class RenderedChat(Struct, frozen=True):
    """The prompt of a chat as text, with the special tokens that the template writes."""

    prompt: str


_REFUSED: Final = {
    "parse_special": RefusedField("special tokens in a text are tokens", (True,)),
    "with_pieces": RefusedField("send each of the tokens to /detokenize", (False,)),
    "return_token_strs": RefusedField("send each of the tokens to /detokenize", (False,)),
    "tools": RefusedField("/v1/responses/input_tokens counts them"),
    "add_generation_prompt": RefusedField("", (True,)),
    "continue_final_message": RefusedField("", (False,)),
    "chat_template": REFUSED_FIELDS["chat_template"],
}
_tokenize = Schema(TokenizeRequest, listed="messages", item=RequestMessage, refused=_REFUSED)
_detokenize = Schema(DetokenizeRequest)


async def tokenize(services: Services, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `POST /tokenize`."""
    record = record_of(scope)
    request, unknown = await serve.read(services, record, scope, receive, _tokenize.decode)
    model, _ = serve.begin(services, record, request.model, False, None, unknown)
    prompt = await services.bodies.work(record.body_bytes, _prompt, request, model.thinking)
    async with cut_off(record, receive):
        tokenized = await serve.tokenize(services, record, model, prompt, want_ids=True)
        ready = services.view(model).ready
        answer = TokenizedText(tokenized.ids, tokenized.count, ready.max_context if ready is not None else 0)
        await send_body(send, 200, msgspec.json.encode(answer), record.headers)


async def detokenize(services: Services, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `POST /detokenize`."""
    record = record_of(scope)
    request, unknown = await serve.read(services, record, scope, receive, _detokenize.decode)
    model, _ = serve.begin(services, record, request.model, False, None, unknown)
    async with cut_off(record, receive):
        decoded = await serve.detokenize(services, record, model, tuple(request.tokens))
        await send_body(send, 200, msgspec.json.encode(DetokenizedText(decoded.text, decoded.text)), record.headers)


async def apply_template(services: Services, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `POST /apply-template`, whose body is that of a chat completion."""
    record = record_of(scope)
    request, unknown = await serve.read(services, record, scope, receive, decode_chat)
    model, _ = serve.begin(services, record, request.model, False, None, unknown)
    generates = await services.bodies.work(record.body_bytes, lower_chat, request, model, lambda: 0, 0)
    prompt = generates[0].prompt
    if isinstance(prompt, ChatPrompt) and prompt.media:
        raise Unsupported("Images, video and audio have no text.", "messages")
    async with cut_off(record, receive):
        rendered = await serve.tokenize(services, record, model, prompt, want_text=True)
        await send_body(send, 200, msgspec.json.encode(RenderedChat(rendered.text)), record.headers)


def _prompt(request: TokenizeRequest, default: ThinkingDefaults) -> ChatPrompt | TextPrompt:
    fields = {"prompt": request.prompt, "content": request.content, "messages": request.messages}
    given = {name: value for name, value in fields.items() if value is not None}
    if len(given) != 1:
        message = "Exactly one of 'prompt', 'content' and 'messages' is needed."
        raise BadRequest(message, next(iter(given), "prompt"), "invalid_value")
    ((name, value),) = given.items()
    if not value:
        raise BadRequest(f"'{name}' is empty.", name, "invalid_value")
    adds_special = request.add_special_tokens if request.add_special is None else request.add_special
    if request.messages is not None:
        if adds_special:
            raise Unsupported("'add_special_tokens' is not supported with 'messages'.", "add_special_tokens")
        kwargs = template_kwargs(request.chat_template_kwargs)
        return chat_prompt(turns(request.messages), ToolPolicy(), of_config(default), kwargs)
    if request.content is not None:
        return TextPrompt(request.content, adds_special=bool(adds_special))
    return TextPrompt(request.prompt or "", adds_special=adds_special is not False)

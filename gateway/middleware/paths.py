"""Classes of the public API's paths: the dialect of their errors, and whether requests to them are counted."""

from typing import Final

from starlette.datastructures import Headers

from gateway.request.record import Dialect

METHOD: Final = "POST"
PREFIX: Final = "/v1/"
ANTHROPIC: Final = "/v1/messages"
# Anthropic's clients send this header, even to paths that other dialects share.
ANTHROPIC_HEADER: Final = "anthropic-version"
OLLAMA: Final = "/api/"
TYPESAFE: Final = "/v1/systemone"
# llama.cpp's routes for filling in the middle and for continuing a text.
_NATIVE: Final = frozenset({"/infill", "/completion"})
# Ollama's generating routes; its other routes are about models.
OLLAMA_REQUESTS: Final = frozenset({"/api/chat", "/api/generate", "/api/embed", "/api/embeddings"})
# Cohere's route for ranking texts.
_RERANK: Final = "/v2/rerank"
_MORE: Final = OLLAMA_REQUESTS | _NATIVE | {_RERANK}
# Cancelling is never counted, because a client must always be able to stop what it started.
_UNCOUNTED: Final = "/cancel"
# The metrics do not count tokenizing as a request of any API.
_QUESTIONS: Final = frozenset({"/tokenize", "/detokenize", "/apply-template"})


def versioned(path: str, unversioned: tuple[str, ...]) -> str:
    """Return the path as it is routed. If a client's base URL lacks the version, the version is added. `unversioned`
    are the beginnings of paths that have a version.
    """
    return f"{PREFIX.rstrip('/')}{path}" if path.startswith(unversioned) else path


def is_websocket_handshake(method: str, headers: Headers) -> bool:
    """Whether a request asks for a WebSocket. Proxies drop `Upgrade`, as the connection does, but not the key."""
    return method == "GET" and "sec-websocket-key" in headers


def dialect_of(path: str, headers: Headers) -> Dialect:
    """Return the dialect in which errors of a request are written."""
    if path.startswith(ANTHROPIC) or ANTHROPIC_HEADER in headers:
        return Dialect.ANTHROPIC
    if path == TYPESAFE:
        return Dialect.TYPESAFE
    return Dialect.OLLAMA if path.startswith(OLLAMA) else Dialect.OPENAI


def is_of_api(method: str, path: str) -> bool:
    """Whether a path counts as an API request in the metrics; lists of models do not."""
    return method == METHOD and (path.startswith(PREFIX) or path in _MORE)


def is_counted(method: str, path: str) -> bool:
    """Whether a request counts against a key's limit of requests."""
    if method != METHOD or path.endswith(_UNCOUNTED):
        return False
    return is_of_api(method, path) or path in _QUESTIONS

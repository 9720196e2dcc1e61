"""Paths of the public API, as the middleware tells them apart: the dialect of their errors, and requests that count."""

from typing import Final

from starlette.datastructures import Headers

from gateway.request.record import Dialect
from protocol.peering import GENERATE_PATH

METHOD: Final = "POST"
PREFIX: Final = "/v1/"
ANTHROPIC: Final = "/v1/messages"
# On other paths a header tells Anthropic's clients.
ANTHROPIC_HEADER: Final = "anthropic-version"
OLLAMA: Final = "/api/"
# Lists in LM Studio's form, whose clients read OpenAI's errors.
LM_STUDIO: Final = ("/api/v0/", "/api/v1/")
# Routes that clients also ask for without the version, as llama.cpp's server has them.
_UNVERSIONED: Final = ("/chat/completions", "/completions", "/embeddings", "/responses", "/messages")
# llama.cpp's route that generates.
INFILL: Final = "/infill"
# Routes of Ollama's that generate; its others are about models.
OLLAMA_REQUESTS: Final = frozenset({"/api/chat", "/api/generate", "/api/embed", "/api/embeddings"})
# Of models that score pairs, where others have these routes.
_SCORES: Final = frozenset({"/rerank", "/v2/rerank", "/score"})
_MORE: Final = OLLAMA_REQUESTS | _SCORES | {INFILL}
# A client must always be able to stop what it started.
_UNCOUNTED: Final = "/cancel"
# Asked of a model beside the APIs.
_QUESTIONS: Final = frozenset({"/tokenize", "/detokenize"})


def versioned(path: str) -> str:
    """The path as it is routed: with its version, where a client's base URL lacks it."""
    return f"{PREFIX.rstrip('/')}{path}" if path.startswith(_UNVERSIONED) else path


def dialect_of(path: str, headers: Headers) -> Dialect:
    """The dialect of a request's errors."""
    if path.startswith(ANTHROPIC) or ANTHROPIC_HEADER in headers:
        return Dialect.ANTHROPIC
    return Dialect.OLLAMA if path.startswith(OLLAMA) and not path.startswith(LM_STUDIO) else Dialect.OPENAI


def is_of_api(method: str, path: str) -> bool:
    """Whether it is a request of an API in the metrics; a list of models is not."""
    return method == METHOD and (path.startswith(PREFIX) or path in _MORE)


def is_counted(method: str, path: str) -> bool:
    """Whether a key's limit of requests counts it."""
    if method != METHOD or path.endswith(_UNCOUNTED):
        return False
    return is_of_api(method, path) or path in _QUESTIONS or path == GENERATE_PATH

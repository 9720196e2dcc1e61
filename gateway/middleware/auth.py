"""Authentication: one middleware before every route, which refuses unknown callers.

| keys | access without a valid key |
|---|---|
| never any | every client on the loopback is the owner, except web pages; other addresses as below |
| at least one, now or earlier | only the daemon's health, without names, and `/metrics` if so configured |

Classes of the public API's paths: the dialect of their errors, and whether requests to them are counted.
"""

from typing import Final, NoReturn

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.caller import ANONYMOUS, NOBODY, OWNER, Caller
from gateway.access.key import PREFIX_CHARS
from gateway.access.keyring import DISABLED, EXPIRED, INVALID, KeyAddresses, Keyring
from gateway.access.rate_limit import Throttle
from gateway.config.address import Address
from gateway.config.origins import is_own
from gateway.errors import ApiError, Forbidden, RateLimited, Unauthorized
from gateway.http.own_names import OwnNames
from gateway.request.record import BATCH_CALLER, Dialect, RequestRecord, record_of
from gateway.request.routing import LiveConfig
from gateway.telemetry.metrics import Metrics
from gateway.web.session import Gate

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


HEALTH: Final = frozenset({"/livez", "/readyz", "/health", "/healthz"})
METRICS: Final = "/metrics"
# Paths that daemons use among themselves.
# Clients may send two secrets, one from their settings and one from their environment. Secrets beyond this number are
# ignored.
SECRETS_MAX: Final = 4
# Requests to these paths only count tokens, and do not count against a key's concurrency.
_TOKEN_COUNTING: Final = ("/tokenize", "/detokenize", "/count_tokens", "/input_tokens")
_REASONS: Final = {None: "missing", INVALID: "invalid", EXPIRED: "expired", DISABLED: "disabled"}
_SCRAPERS: Final = (
    "Metrics name every model and key: they need a key made with 'mlxctl keys create prometheus --role metrics', sent "
    "as 'Authorization: Bearer KEY'. [server] metrics_auth = false shows them to every client."
)


class Auth:
    """ASGI app that sets the caller on the record. Raises `Unauthorized`, `Forbidden` or `RateLimited`."""

    def __init__(
        self,
        app: ASGIApp,
        keyring: Keyring,
        throttle: Throttle,
        addresses: KeyAddresses,
        metrics: Metrics,
        live: LiveConfig,
        gate: Gate,
        *,
        is_loopback: bool,
    ) -> None:
        self._app = app
        self._keyring = keyring
        self._throttle = throttle
        self._addresses = addresses
        self._metrics = metrics
        self._live = live
        self._gate = gate
        self._names = OwnNames(live, metrics)
        self._is_loopback = is_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        path = scope["path"]
        record.caller = caller = self._admit(scope, record)
        meter = caller.meter
        if meter is not None and meter.is_limited:
            is_anthropic = record.dialect is Dialect.ANTHROPIC
            record.late_headers = meter.anthropic_headers if is_anthropic else meter.openai_headers
            if is_counted(scope["method"], path):
                if not path.endswith(_TOKEN_COUNTING):
                    meter.check_concurrency()
                meter.request()
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope, record: RequestRecord) -> Caller:
        keyring = self._keyring
        keyring.refresh()
        path = scope["path"]
        if self._gate.opens(scope):
            return OWNER
        is_closed = self._live.config.server.metrics_auth
        needs_none = path in HEALTH or (path == METRICS and not is_closed)
        # A remote client behind a proxy on this machine must not count as the owner.
        is_local = self._is_loopback and record.client.is_own
        is_open_to_all = keyring.is_open and is_local
        if is_open_to_all or self._live.config.server.hosts:
            advice = ", or make an API key: mlxctl keys create NAME" if is_open_to_all else ""
            self._names.check_host(Headers(scope=scope), advice=advice)
        if is_open_to_all:
            self._check_page(Headers(scope=scope))
            return ANONYMOUS
        try:
            caller = self._identify(scope["headers"], record.client)
        except Unauthorized as error:
            if needs_none:
                return NOBODY
            if path == METRICS and error.code is None:
                error = Unauthorized(_SCRAPERS, None)
            self._refuse(error, record)
        if path == METRICS:
            if is_closed and not (caller.is_admin or caller.is_metrics_only):
                raise Forbidden(_SCRAPERS)
        elif caller.is_metrics_only and path not in HEALTH:
            raise Forbidden("This key may read /metrics and nothing else.")
        return caller

    def _refuse(self, error: Unauthorized, record: RequestRecord) -> NoReturn:
        """Count a refused request and raise its error.

        Only requests without a valid key count, so that other clients at the same address are not slowed.
        """
        try:
            self._throttle.fail(record.client)
        except RateLimited:
            self._metrics.auth_failures["throttled"] += 1
            raise
        self._metrics.auth_failures[_REASONS[error.code]] += 1
        raise error

    def _identify(self, headers: list[tuple[bytes, bytes]], client: Address) -> Caller:
        secrets = _secrets(headers)
        for secret in secrets:
            caller = self._keyring.caller(secret)
            if caller is not None:
                if caller.key is not None:
                    self._addresses.use(caller.key, secret[:PREFIX_CHARS].decode(), client)
                return caller
        if secrets:
            raise Unauthorized("The API key is not valid.", INVALID)
        if self._keyring.is_open:
            raise Unauthorized("There is no API key yet. Make one with: mlxctl keys create NAME", None)
        raise Unauthorized("An API key is needed: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'.", None)

    def _check_page(self, headers: Headers) -> None:
        """Refuse foreign web pages, because an open loopback is meant for programs. Raises `Forbidden`."""
        origin = headers.get("origin")
        is_allowed = origin is not None and (is_own(origin) or origin in self._live.config.server.cors)
        if not is_allowed and not self._names.is_own_page(headers):
            advice = "Name its origin in [server] cors, or use an API key."
            self._names.refuse_page(f"This web page may not use mlxd. {advice}")


def _secrets(headers: list[tuple[bytes, bytes]]) -> list[bytes]:
    """Return the secrets in the headers `x-api-key` and `authorization`."""
    secrets: list[bytes] = []
    for name, value in headers:
        if name == b"x-api-key":
            secrets.append(value.strip())
        elif name == b"authorization" and value[:7].lower() == b"bearer ":
            secrets.append(value[7:].strip())
    return [secret for secret in secrets[:SECRETS_MAX] if secret]


class TrustedClient:
    """ASGI app that replaces `Auth` on the unix socket, whose file permissions let only the owner connect."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record_of(scope).caller = OWNER
        await self._app(scope, receive, send)


class BatchClient:
    """ASGI app for the requests of batches, which have their key's caller in their scope, or the error of such a
    request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: Caller | ApiError = scope[BATCH_CALLER]
        if isinstance(caller, ApiError):
            raise caller
        record_of(scope).caller = caller
        await self._app(scope, receive, send)

"""Client of the daemon's admin socket."""

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from gateway import state_dir
from gateway.command_failed import CommandFailed
from gateway.control_types import DaemonStatus, DeepHealth

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T", bound=msgspec.Struct)

NOT_RUNNING: Final = 3
# Loading a model may take long. The daemon applies and reports its own timeout.
COMMAND_TIMEOUT_S: Final = 3600.0
STATUS_TIMEOUT_S: Final = 10.0
# The daemon's own deadline for the probe token is shorter.
PROBE_TIMEOUT_S: Final = 30.0


def admin_socket() -> Path:
    """Return the path of the admin socket of this home's daemon."""
    return state_dir.admin_socket(state_dir.default_home())


def get(path: str, kind: type[T]) -> T:
    """Send a GET request to the admin API. Raises `CommandFailed`, as every function here does."""
    with _admin(STATUS_TIMEOUT_S) as client:
        return _read(client.get(path), kind)


def status() -> DaemonStatus:
    """Return the daemon's status."""
    return get("/v1/status", DaemonStatus)


def deep_health() -> DeepHealth:
    """Ask the daemon to generate one token with each loaded model. A model that fails is reported in the result."""
    with _admin(PROBE_TIMEOUT_S) as client:
        return _read(client.get("/healthz?deep=1"), DeepHealth, (200, 503))


def post(path: str, body: dict[str, Any], kind: type[T]) -> T:
    """Send a POST request to the admin API."""
    with _admin(COMMAND_TIMEOUT_S) as client:
        return _read(client.post(path, json=body), kind)


def stream_chat(request: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
    """Stream the deltas of a chat completion. Also raises if the stream ends early."""
    # The socket belongs to the daemon's owner, so that no key is needed.
    with _admin(None) as client, client.stream("POST", "/v1/chat/completions", json=request) as response:
        if response.status_code != 200:
            response.read()
            raise CommandFailed(_message(response))
        yield from _deltas(response.iter_lines())


def _deltas(lines: Iterator[str]) -> Generator[dict[str, Any], None, None]:
    for line in lines:
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            return
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise CommandFailed(chunk["error"]["message"])
        for choice in chunk["choices"]:
            yield choice["delta"]
    raise CommandFailed("the answer ended before it was complete")


@contextmanager
def _admin(timeout_s: float | None) -> "Generator[httpx2.Client, None, None]":
    import httpx2

    socket = admin_socket()
    transport = httpx2.HTTPTransport(uds=str(socket))
    try:
        with httpx2.Client(transport=transport, base_url="http://mlxd", timeout=timeout_s, trust_env=False) as client:
            yield client
    except httpx2.ConnectError:
        raise CommandFailed(
            f"mlxd does not run (nothing answers at {socket}). Start it with: mlxctl serve\n"
            "If it runs with another home, set MLXD_HOME to it.",
            NOT_RUNNING,
        ) from None
    except httpx2.TimeoutException:
        raise CommandFailed("mlxd does not answer in time") from None
    except httpx2.TransportError as error:
        raise CommandFailed(f"the connection to mlxd was lost: {error}") from None


def _read(response: "httpx2.Response", kind: type[T], good: tuple[int, ...] = (200,)) -> T:
    if response.status_code not in good:
        raise CommandFailed(_message(response))
    try:
        return msgspec.json.decode(response.content, type=kind)
    except msgspec.DecodeError as error:
        raise CommandFailed(f"mlxd's answer was not understood; is it of another version? ({error})") from None


def _message(response: "httpx2.Response") -> str:
    try:
        error = response.json()["error"]
        if error["code"] == "unknown_url":
            call = f"{response.request.method} {response.request.url.path}"
            return f"mlxd does not know {call}: it is of another version than this mlxctl; restart it"
        return str(error["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"

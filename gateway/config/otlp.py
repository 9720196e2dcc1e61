"""OTLP endpoint of traces, checked with the packages that sending needs."""

import importlib.util
from typing import Final
from urllib.parse import urlsplit

PACKAGES: Final = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


def bad_endpoint(endpoint: str) -> str | None:
    """Return the error of an OTLP endpoint, if any."""
    if not endpoint:
        return None
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_url = False
    if not is_url:
        return f"{endpoint!r} is no URL such as 'http://127.0.0.1:4318'"
    if not all(map(_is_installed, PACKAGES)):
        return "traces need OpenTelemetry, which is not installed: pip install 'mlxd[otel]'"
    return None


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False

"""Reads the configuration file into a checked `Config`. Each error is a `ConfigError` with its line in the file.

Names of the worker's parsers. With them, a wrong name is reported before a worker starts.

Reads the tables `[upstreams.NAME]`, which configure other endpoints, and their files.
"""

import difflib
import importlib.util
import os
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import structs
from msgspec.structs import fields, replace

from gateway.command_failed import CommandFailed
from gateway.config.address import invalid_proxy_reason
from gateway.config.certificate import CertificateUnusable, load
from gateway.config.names import Names
from gateway.config.origins import invalid_host_reason, invalid_origin_reason, is_loopback
from gateway.config.settings import (
    CAN_HOLD_AWAKE,
    CONFIG_NAME,
    NAME_BYTES_MAX,
    NOT_IN_FILE,
    BatchesConfig,
    Config,
    ConfigError,
    MediaConfig,
    MemoryConfig,
    ModelConfig,
    ProfileConfig,
    ServerConfig,
    TlsConfig,
    UiConfig,
    UpstreamConfig,
)
from gateway.config.source import ConfigSource
from gateway.config.worker_spec_and_group import KV_EVENTS_ADDRESS, check_groups
from gateway.errors import ModelNotFound
from gateway.model_files.hub_cache import cached_models
from gateway.model_files.metadata import DEMOS
from gateway.state_dir import keys_path
from protocol.model_files import RUNNING_MAX
from protocol.spec import ADAPTERS_MAX

# The gateway must not import `worker.output.parsers`, which has the same names; a test compares them.
PARSERS: Final = frozenset({
    "apertus", "apriel", "apriel1.6", "apriel16", "bielik", "cohere", "command_a", "command_r", "command_r7b",
    "command_r_plus", "deepseek_r1", "deepseek_v3", "deepseek_v3.1", "deepseek_v3.2", "deepseek_v31",
    "deepseek_v32", "deepseek_v4", "dots", "dots1", "dots3", "dots3_note", "dots_llm1", "ernie", "ernie45",
    "exaone", "firefunction", "firefunction_v2", "function_gemma", "functionary", "functionary_v31",
    "functionary_v32", "functiongemma", "gemma", "gemma4", "gigachat", "gigachat3", "glm", "glm45", "glm46",
    "glm47", "gpt-oss", "gpt_oss", "granite", "granite3", "granite4", "granite_20b_fc", "granite_thinking",
    "harmony", "hermes", "holo2", "hunyuan", "hunyuan_a13b", "hunyuan_v3", "hy_v3", "internlm", "internlm2",
    "internlm3", "jamba", "json_tools", "kimi", "kimi_k2", "kimi_k3", "laguna", "lfm2", "lfm2_pythonic", "ling",
    "ling3", "llama", "llama3", "llama3_json", "llama4", "llama4_json", "llama4_pythonic", "longcat",
    "magistral", "mimo", "minicpm", "minicpm5", "minimax", "minimax_m1", "minimax_m2", "minimax_m3", "mistral",
    "mistral_v3", "muse", "muse_spark", "nemotron", "nemotron_json", "nemotron_v2", "nemotron_v3", "none",
    "olmo3", "olmo3_pythonic", "phi4", "phi4mini", "pythonic", "qwen", "qwen2.5", "qwen25", "qwen3", "qwen3.5",
    "qwen3_5", "qwen3_coder", "qwen3_think", "qwen3_xml", "qwen3xml", "qwq", "reka", "seed", "seed_oss",
    "smollm3", "solar", "solar_open", "spark", "step", "step3", "step3.5", "step3p5", "think", "xlam",
})  # fmt: skip


def unknown_parser_reason(name: str) -> str | None:
    """Return what is wrong with a parser's name; None if it is valid. An empty name selects the model's own parser."""
    plain = name.strip().lower().replace("-", "_")
    if not plain or plain in PARSERS or plain.replace(".", "_") in PARSERS:
        return None
    near = difflib.get_close_matches(plain, PARSERS, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(PARSERS))}"
    return f"unknown parser {name!r}; {hint}"


def read_upstreams(source: ConfigSource, raw: Any, models: Mapping[str, ModelConfig]) -> dict[str, UpstreamConfig]:
    """Read all upstreams, make their paths absolute, and check the models' fallbacks. Raises `ConfigError`."""
    if not isinstance(raw, dict):
        raise source.error("upstreams must be a table: write [upstreams.NAME]", ("upstreams",))
    upstreams = {name: _upstream(source, name, body, ("upstreams", name)) for name, body in raw.items()}
    for model in models.values():
        for name in model.fallback.to:
            where = ("models", model.name, "fallback")
            if name not in upstreams:
                raise source.error(f"fallback: there is no [upstreams.{name}]", where)
            if model.name not in upstreams[name].models:
                raise source.error(f"fallback: models of [upstreams.{name}] has no {model.name!r}", where)
    return upstreams


def _upstream(source: ConfigSource, name: str, body: Any, where: tuple[str, ...]) -> UpstreamConfig:
    """Read one upstream and make its paths absolute. Raises `ConfigError`."""
    table = source.table(body, UpstreamConfig, where)
    for field in fields(UpstreamConfig):
        if field.required and field.name not in ("name", *table):
            raise source.error(f"an upstream needs {field.name}", where)
    far = source.convert(table | {"name": name}, UpstreamConfig, where)
    if reason := _invalid_url_reason(far):
        raise source.error(f"url: {far.url!r} {reason}", (*where, "url"))
    key_file = ""
    if far.key_file:
        key_file = str(source.path_of(far.key_file))
        try:
            read_secret(Path(key_file))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise source.error(f"key_file: {key_file}: {reason}", (*where, "key_file")) from None
    if reason := _invalid_authorities_reason():
        raise source.error(reason, where)
    return replace(far, url=far.url.rstrip("/"), key_file=key_file)


def _invalid_authorities_reason() -> str:
    """Return what is wrong with the file of authorities that the environment names; empty if nothing is.

    OpenSSL reads the file whenever a client is made, and silently trusts nobody if it cannot.
    """
    path = os.environ.get("SSL_CERT_FILE", "")
    if not path:
        return ""
    try:
        ssl.create_default_context(cafile=path)
    except (OSError, ValueError) as error:
        return f"the environment variable SSL_CERT_FILE: {path} holds no certificates (PEM): {error}"
    return ""


def read_secret(path: Path) -> str:
    """Read the API key in a file. Raises `OSError`, or `ValueError` if it cannot be a key."""
    secret = path.read_text(encoding="utf-8").strip()
    if not secret:
        raise ValueError("is empty")
    if not secret.isascii() or not secret.isprintable() or " " in secret:
        raise ValueError("holds no key: one line of text is expected")
    return secret


def _invalid_url_reason(upstream: UpstreamConfig) -> str:
    """Return why the URL of an endpoint is invalid or must not be used; empty if it is good."""
    try:
        url = urlsplit(upstream.url)
        port = url.port
    except ValueError as error:
        return f"is no URL: {error}"
    if url.scheme not in ("http", "https") or not url.hostname or port == 0:
        return "must be https://HOST:PORT, or http://"
    if url.query or url.fragment or url.username is not None:
        return "must have no query or user"
    if url.scheme == "http" and not is_loopback(url.hostname) and not upstream.plain_http:
        return (
            "is plain HTTP: keys, prompts and answers could be read on the network. Use https, or set plain_http = true"
        )
    return ""


# The chat template is copied into the configuration and a worker's state file. The longest known templates have 20 KiB.
TEMPLATE_BYTES_MAX: Final = 1024 * 1024
# Traces can be sent only if these packages are installed.
_OTEL_PACKAGES: Final = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")


def load_config(
    home: Path,
    path: Path | None = None,
    *,
    has_keys: Callable[[Path], bool],
    host: str | None = None,
    port: int | None = None,
    log_level: str | None = None,
) -> Config:
    """Read `path` (default: `home/mlxd.toml`, which may be absent) and apply the command line's overrides.

    `has_keys` returns whether a key file has any key: a daemon that other machines can reach needs one. Without
    configured models, the result has `demo` and every model in the Hugging Face cache. Raises `ConfigError`.
    """
    source = ConfigSource(path or home / CONFIG_NAME)
    raw = source.read(required=path is not None)
    source.refuse_unknown(raw, tuple(name for name in Config.__struct_fields__ if name not in NOT_IN_FILE), ())
    overrides = {"host": host, "port": port, "log_level": log_level and log_level.lower()}
    server = _server(source, raw.get("server", {}), {k: v for k, v in overrides.items() if v is not None})
    if not is_loopback(server.host):
        _need_keys(source, server.host, lambda: has_keys(keys_path(home)), is_override=host is not None)
    models = check_groups(source, _models(source, raw.get("models", {}))) or _found_models()
    _refuse_duplicates(source, models)
    _refuse_taken_adapters(source, models)
    _check_references(source, server, models)
    media = source.struct(raw.get("media", {}), MediaConfig, ("media",))
    return Config(
        home=home,
        server=server,
        models=models,
        config_path=source.path,
        memory=source.struct(raw.get("memory", {}), MemoryConfig, ("memory",)),
        media=structs.replace(media, folders=_folders(source, media.folders, ("media", "folders"))),
        batches=source.struct(raw.get("batches", {}), BatchesConfig, ("batches",)),
        ui=source.struct(raw.get("ui", {}), UiConfig, ("ui",)),
        upstreams=read_upstreams(source, raw.get("upstreams", {}), models),
    )


def _folders(source: ConfigSource, folders: tuple[str, ...], where: tuple[str, str]) -> tuple[str, ...]:
    """Return absolute paths of folders. Raises `ConfigError` if one is missing."""
    paths = tuple(str(source.path_of(folder)) for folder in folders)
    for path in paths:
        if not Path(path).is_dir():
            raise source.error(f"{where[1]}: {path} is no folder", where)
    return paths


def _server(source: ConfigSource, raw: Any, overrides: dict[str, Any]) -> ServerConfig:
    table = source.table(raw, ServerConfig, ("server",)) | overrides
    server = source.convert(table, ServerConfig, ("server",), overridden=frozenset(overrides))
    if server.ollama_port and server.ollama_port == server.port:
        message = f"ollama_port: {server.ollama_port} is also 'port', where Ollama's API is served as well"
        raise source.error(message, ("server", "ollama_port"))
    checks = (
        ("cors", server.cors, invalid_origin_reason),
        ("trusted_proxies", server.trusted_proxies, invalid_proxy_reason),
        ("hosts", server.hosts, invalid_host_reason),
    )
    for key, values, check in checks:
        for value in values:
            if reason := check(value):
                raise source.error(f"{key}: {value!r} {reason}", ("server", key))
    if server.prevent_sleep == "always" and not CAN_HOLD_AWAKE:
        raise source.error("prevent_sleep: 'always' is for macOS; set that in this system", ("server", "prevent_sleep"))
    if reason := invalid_endpoint_reason(server.otlp_endpoint):
        raise source.error(f"otlp_endpoint: {reason}", ("server", "otlp_endpoint"))
    folders = _folders(source, server.adapter_folders, ("server", "adapter_folders"))
    return structs.replace(server, adapter_folders=folders, tls=_tls(source, server.tls))


def invalid_endpoint_reason(endpoint: str) -> str | None:
    """Return what is wrong with an OTLP endpoint for traces; None if it is valid."""
    if not endpoint:
        return None
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_url = False
    if not is_url:
        return f"{endpoint!r} is no URL such as 'http://127.0.0.1:4318'"
    try:
        is_installed = all(importlib.util.find_spec(package) is not None for package in _OTEL_PACKAGES)
    except ImportError:
        is_installed = False
    return None if is_installed else "traces need OpenTelemetry, which is not installed: pip install 'mlxd[otel]'"


def _tls(source: ConfigSource, tls: TlsConfig) -> TlsConfig:
    """Check the certificate and key files of `tls`, and make their paths absolute. Raises `ConfigError`."""
    where = ("server", "tls")
    if not tls.certificate and not tls.key:
        return tls
    if not tls.certificate or not tls.key:
        raise source.error("tls: needs both certificate and key", where)
    certificate, key = source.path_of(tls.certificate), source.path_of(tls.key)
    try:
        load(certificate, key)
    except CertificateUnusable as error:
        raise source.error(f"tls: {error}", where) from None
    return TlsConfig(str(certificate), str(key))


def _need_keys(source: ConfigSource, host: str, has_keys: Callable[[], bool], *, is_override: bool) -> None:
    """Check that there is an API key if other machines can reach the daemon. Raises `ConfigError`."""
    try:
        has_one = has_keys()
    except CommandFailed as error:
        raise ConfigError(str(error)) from None
    if not has_one:
        raise ConfigError(
            f"refusing to listen on {host!r}, where others can reach it, without an API key. "
            "Make one first: mlxctl keys create NAME",
            None if is_override else source.path,
            None if is_override else source.line(("server", "host")),
        )


def _models(source: ConfigSource, raw: Any) -> dict[str, ModelConfig]:
    if not isinstance(raw, dict):
        raise source.error("models must be a table: write [models.NAME]", ("models",))
    models: dict[str, ModelConfig] = {}
    for name, body in raw.items():
        where = ("models", name)
        if reason := invalid_name_reason(name):
            raise source.error(f"model name {name!r} {reason}", where)
        models[name] = model = _model(source, name, body, where)
        is_sparse = model.sparse_prefill > 0
        if model.draft and ((model.speculate == "off" and not is_sparse) or model.deterministic):
            other = "deterministic" if model.deterministic else "speculate = 'off'"
            raise source.error(f"draft: with {other} nothing is drafted", (*where, "draft"))
        if is_sparse and not model.draft:
            raise source.error("sparse_prefill: 'draft' names no model to choose tokens", (*where, "sparse_prefill"))
        if model.kv_bits and model.kind not in ("auto", "text"):
            raise source.error("kv_bits is for models that generate text", (*where, "kv_bits"))
        if model.keep_warm_s and (model.kind not in ("auto", "text") or model.experts == "disk"):
            text = "keep_warm is for models that generate text and have their experts in memory"
            raise source.error(text, (*where, "keep_warm"))
        if model.warm and model.kind not in ("auto", "text"):
            raise source.error("warm is for models that generate text", (*where, "warm"))
        if reason := _invalid_kv_events_reason(model.kv_events):
            raise source.error(reason, (*where, "kv_events"))
        if reason := _experts_reason(model):
            raise source.error(reason, where)
        if reason := unknown_parser_reason(model.parser):
            raise source.error(reason, (*where, "parser"))
        for alias in model.aliases:
            if reason := _invalid_alias_reason(alias):
                raise source.error(f"alias {alias!r} {reason}", (*where, "aliases"))
    return models


def _experts_reason(model: ModelConfig) -> str:
    """Return the reason why a model's experts cannot be stored as configured; empty if they can."""
    if model.experts == "memory":
        return ""
    if model.max_running == "auto" or model.max_running > RUNNING_MAX:
        return (
            f"max_running: with experts on disk at most {RUNNING_MAX} run at once; more need most experts in each step"
        )
    if model.speculate != "off" or model.draft:
        return "speculate: with experts on disk nothing is drafted; each token of a draft needs experts of its own"
    return ""


def _invalid_kv_events_reason(address: str) -> str:
    """Return the reason why events cannot be published at an address; empty if they can."""
    if not address:
        return ""
    match = KV_EVENTS_ADDRESS.fullmatch(address)
    # Missed events are replayed at the next port.
    if match is None or not 0 < int(match[2]) < (1 << 16) - 1:
        return f"kv_events: {address!r} is no address such as tcp://127.0.0.1:5557"
    # ZeroMQ cannot bind a socket to this name.
    return "kv_events: localhost is no address; write 127.0.0.1" if match[1] == "localhost" else ""


def _model(source: ConfigSource, name: str, body: Any, where: tuple[str, ...]) -> ModelConfig:
    table = source.table(body, ModelConfig, where)
    profiles, adapters = table.pop("profiles", {}), table.pop("adapters", {})
    table["name"] = name
    if table.get("experts") == "disk":
        table = {"max_running": RUNNING_MAX, "speculate": "off"} | table
    table["path"] = source.model_path(table.get("path", name))
    if table.get("draft"):
        table["draft"] = source.model_path(table["draft"])
    model = source.convert(table, ModelConfig, where)
    return structs.replace(
        model,
        profiles=_profiles(source, profiles, (*where, "profiles")),
        adapters=_adapters(source, adapters, model.kind, (*where, "adapters")),
        chat_template=_template(source, model.chat_template, (*where, "chat_template")),
        warm=tuple(str(source.path_of(file)) for file in model.warm),
    )


def _profiles(source: ConfigSource, raw: Any, where: tuple[str, ...]) -> dict[str, ProfileConfig]:
    if not isinstance(raw, dict):
        raise source.error("profiles must be a table: write [models.NAME.profiles.PROFILE]", where)
    profiles: dict[str, ProfileConfig] = {}
    for name, body in raw.items():
        at = (*where, name)
        reason = "must not contain ':'" if ":" in name else invalid_name_reason(name)
        if reason:
            raise source.error(f"profile name {name!r} {reason}", at)
        profiles[name] = source.struct(body, ProfileConfig, at)
    return profiles


def _adapters(source: ConfigSource, raw: Any, kind: str, where: tuple[str, ...]) -> dict[str, str]:
    """Read the paths of adapters by name. The worker checks later whether they suit the model."""
    if not isinstance(raw, dict):
        raise source.error('adapters must be a table: write [models.NAME.adapters] and ADAPTER = "path"', where)
    if raw and kind not in ("auto", "text"):
        raise source.error(f"adapters are for models that generate text, and kind is {kind!r}", where)
    if len(raw) > ADAPTERS_MAX:
        raise source.error(f"{len(raw)} adapters; a model has at most {ADAPTERS_MAX}", where)
    adapters: dict[str, str] = {}
    for name, path in raw.items():
        at = (*where, name)
        if reason := invalid_adapter_name_reason(name):
            raise source.error(f"adapter name {name!r} {reason}", at)
        if not isinstance(path, str) or not path:
            raise source.error(f"adapter {name!r} needs the path of its folder", at)
        adapters[name] = source.model_path(path)
    return adapters


def _template(source: ConfigSource, given: str, where: tuple[str, ...]) -> str:
    """Return a chat template that is given as text or by its file. Raises `ConfigError`."""
    if not given:
        return ""
    text = given if _is_jinja(given) else source.text(given, where)
    if not _is_jinja(text):
        raise source.error(f"chat_template: {given} holds no Jinja template", where)
    if len(msgspec.json.encode(text)) > TEMPLATE_BYTES_MAX:
        raise source.error(f"chat_template: is longer than {TEMPLATE_BYTES_MAX} bytes", where)
    return text


def _is_jinja(text: str) -> bool:
    return "{{" in text or "{%" in text


def _found_models() -> dict[str, ModelConfig]:
    demos = {name: ModelConfig(name=name, path=name) for name in DEMOS}
    names = [name for name in cached_models() if name not in (*DEMOS, "default") and not invalid_name_reason(name)]
    # The first answer of a new installation does not wait for a load.
    demos["demo"] = structs.replace(demos["demo"], aliases=("default",), preload=not names)
    return demos | {name: ModelConfig(name=name, path=name) for name in names}


def _refuse_duplicates(source: ConfigSource, models: dict[str, ModelConfig]) -> None:
    owner: dict[str, str] = {}
    for model in models.values():
        for alias in model.aliases:
            where = ("models", model.name, "aliases")
            if alias in models and alias != model.name:
                raise source.error(f"alias {alias!r} of model {model.name!r} is the name of another model", where)
            if alias == model.name or owner.setdefault(alias, model.name) != model.name:
                taken = owner.get(alias, model.name)
                raise source.error(f"alias {alias!r} of model {model.name!r} already belongs to {taken!r}", where)
    for model in models.values():
        for profile in model.profiles:
            name = f"{model.name}:{profile}"
            if name in models or name in owner:
                where = ("models", model.name, "profiles", profile)
                raise source.error(f"profile {profile!r} of model {model.name!r} is the name of another model", where)


def _refuse_taken_adapters(source: ConfigSource, models: dict[str, ModelConfig]) -> None:
    if (taken := taken_name(models)) is not None:
        model, adapter, owner = taken
        where = ("models", model, "adapters", adapter)
        raise source.error(f"adapter {adapter!r} of model {model!r} has a name that {owner} has already", where)


def _check_references(source: ConfigSource, server: ServerConfig, models: dict[str, ModelConfig]) -> None:
    """Check that `default` and `small` are names that a client could request."""
    names = Names(models)
    for key, name in (("default", server.default), ("small", server.small)):
        if not name:
            continue
        try:
            names.locate(name)
        except ModelNotFound as error:
            raise source.error(f"{key}: {error.message}", ("server", key)) from None


def invalid_adapter_name_reason(name: str) -> str | None:
    """Return the reason why an adapter cannot have this name."""
    return "must not contain ':'" if ":" in name else invalid_name_reason(name)


def taken_name(models: Mapping[str, ModelConfig]) -> tuple[str, str, str] | None:
    """Return a model, its adapter whose name is not unique, and the other owner of that name; None if all names are
    unique.
    """
    owners = {name: f"the model {model.name!r}" for model in models.values() for name in model.names}
    owners |= {
        f"{model.name}:{name}": f"a profile of {model.name!r}" for model in models.values() for name in model.profiles
    }
    for model in models.values():
        for each in model.adapted:
            for name in each.names:
                if name in owners:
                    return model.name, each.adapter, owners[name]
                owners[name] = f"an adapter of {model.name!r}"
    return None


def invalid_name_reason(name: str) -> str | None:
    """Return the reason why a table cannot have this name."""
    if "*" in name:
        return "must not contain '*': patterns belong in aliases"
    if name.startswith("-"):
        return "must not begin with '-'"
    return _invalid_alias_reason(name)


def _invalid_alias_reason(alias: str) -> str | None:
    if not alias:
        return "is empty"
    if any(c.isspace() or not c.isprintable() for c in alias):
        return "must not contain spaces or control characters"
    if len(alias.encode()) > NAME_BYTES_MAX:
        return f"is longer than {NAME_BYTES_MAX} bytes"
    return None

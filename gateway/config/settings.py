"""The configuration as frozen structs: every key, its type and its default. `load.py` reads it from the file.

Days and months in a time zone. Budgets and usage are counted in these periods.

Settings of other machines and of groups: upstreams, ranks and their hosts.
"""

import sys
from datetime import date, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, structs

from gateway.command_failed import CommandFailed
from gateway.state_dir import admin_socket, keys_path, log_path, run_dir, usage_path
from protocol.spec import DEFAULT_MAX_RUNNING, LOCAL
from protocol.to_worker import (
    AnswerTokens,
    Penalty,
    Probability,
    RepetitionPenalty,
    SparseKeep,
    Temperature,
    TokenCount,
    TopK,
)


def day_of(now: float, zone: tzinfo | None) -> date:
    """Return the day of a Unix time. The zone None is the machine's own."""
    return datetime.fromtimestamp(now, zone).date()


def begin_of(day: date, zone: tzinfo | None) -> float:
    """Return the Unix time when a day starts. The result is right even if clocks change on that day."""
    return datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()


def next_day(day: date) -> date:
    return day + timedelta(days=1)


def next_month(day: date) -> date:
    """Return the first day of the following month."""
    return date(day.year + day.month // 12, day.month % 12 + 1, 1)


Seconds = Annotated[float, Meta(ge=0, le=30 * 86400)]


class UpstreamConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[upstreams.NAME]`: a remote endpoint to which requests may fall back. Paths are relative to this file."""

    name: str
    # The base URL includes the version for `openai` (`https://openrouter.ai/api/v1`) but not for `anthropic`.
    url: str
    dialect: Literal["openai", "anthropic"] = "openai"
    key_file: str = ""
    # Maps local names of models to the upstream's names.
    models: dict[str, str] = {}
    plain_http: bool = False


class HostConfig(Struct, frozen=True):
    """A host in a host file: its destination for ssh, the addresses of its ranks, and its RDMA devices. There is one
    device, or several, for each host of the file in order.
    """

    ssh: str
    ips: tuple[str, ...] = ()
    rdma: tuple[str | tuple[str, ...] | None, ...] = ()


class HostFile(Struct, frozen=True):
    """A host file of mlx.launch. `envs` are environment variables of all ranks, as NAME=VALUE."""

    hosts: tuple[HostConfig, ...] = ()
    backend: str = ""
    envs: tuple[str, ...] = ()


class GroupConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Section `group` of a model: processes, called ranks, that run the model together, each with a part of it. Without
    ranks, one process runs the whole model.
    """

    # One entry `local` for each rank, if the group runs on this machine alone.
    nodes: tuple[str, ...] = ()
    # `tensor` gives each rank a part of every layer; `pipeline` gives each rank some whole layers.
    parallel: Literal["auto", "tensor", "pipeline"] = "auto"
    backend: Literal["auto", "ring", "nccl", "jaccl"] = "auto"
    # Host file of mlx.launch, for a group over several machines. Its path is relative to the configuration file, and
    # its first host is this machine.
    hosts: str = ""
    # Content of the host file.
    launch: HostFile = HostFile()

    @property
    def ranks(self) -> tuple[str, ...]:
        """Location of each rank: `local`, or the ssh destination of its host."""
        # mlx.launch uses no ssh for ranks at 127.0.0.1.
        names = (LOCAL if host.ssh == "127.0.0.1" else host.ssh for host in self.launch.hosts[1:])
        return (LOCAL, *names) if self.launch.hosts else self.nodes


CONFIG_NAME: Final = "mlxd.toml"
# Fields that are not keys of the file: the origin of the configuration, names of tables, and content of other files.
NOT_IN_FILE: Final = frozenset({"home", "config_path", "name", "adapter", "launch"})
# A model's name and its worker's epoch must fit into a ZeroMQ routing id, of at most 255 bytes.
NAME_BYTES_MAX: Final = 200

Bytes = Annotated[int, Meta(ge=1)] | Literal["auto"]
LogLevel = Literal["debug", "info", "warning", "error", "critical"]
PreventSleep = Literal["busy", "always", "never"]
# Whether workers leave GPU time to the display. With `auto` they do so while a person uses the machine.
Desktop = Literal["auto"] | bool
# The use of the desktop is detected with `ioreg` and `pmset`, which only macOS has.
CAN_SEE_DESKTOP: Final = sys.platform == "darwin"
# The machine is kept awake with `caffeinate`, which only macOS has.
CAN_HOLD_AWAKE: Final = sys.platform == "darwin"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ConfigError(CommandFailed):
    """The configuration cannot be used; the message has the file and line if they are known."""

    def __init__(self, message: str, path: Path | None = None, line: int | None = None) -> None:
        place = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(place + message)
        self.path = path
        self.line = line


class TlsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`tls` of the server: PEM files with the certificate and its chain, and with its key. Empty means plain HTTP."""

    certificate: str = ""
    key: str = ""


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[server]`. Keys in the file may omit `_s` and `_bytes`, as in `drain = "30s"` and `max_body = "32MiB"`."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8484
    # Ollama's clients may use this second port, which has the same API; 0 opens none.
    ollama_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    tls: TlsConfig = TlsConfig()
    log_level: LogLevel = "info"
    drain_s: Seconds = 30.0
    # Whether a Mac is kept awake: while requests run or a model loads, always, or never.
    prevent_sleep: PreventSleep = "busy"
    # Whether workers make short GPU submissions with pauses, so that a person can work at the machine.
    desktop: Desktop = "auto"
    max_body_bytes: Annotated[int, Meta(ge=1024, le=1 << 31)] = 32 * 1024 * 1024
    request_timeout_s: Seconds = 0.0
    queue_timeout_s: Seconds = 600.0
    # Maximum size of the stored answers of the Responses API, for each key. Clients can continue from a stored answer.
    # With 0 no answer is stored.
    response_store_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 256 * 1024 * 1024
    # Proxies whose X-Forwarded-For header is trusted.
    trusted_proxies: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    # Host names under which clients may reach this machine, in addition to the loopback names. If the list is not
    # empty, every `Host` header is checked.
    hosts: tuple[str, ...] = ()
    # Whether `/metrics` requires a key that may read it, once any key exists.
    metrics_auth: bool = True
    # `default` is the model for requests that name no model, and `small` that for requests of a vendor's small model.
    # If empty, those requests are refused.
    default: str = ""
    small: str = ""
    # A request that takes longer is logged as a warning with the time of each phase. 0 disables this.
    slow_request_s: Seconds = 30.0
    # Number of newest requests that are kept with their answers in `home/captures`, for debugging. 0 disables this.
    capture: Annotated[int, Meta(ge=0, le=10_000)] = 0
    # While the daemon runs, adapters may be loaded from these folders and from `home/adapters`.
    adapter_folders: tuple[str, ...] = ()
    # URL to which traces are sent, as OTLP over HTTP. If empty, no traces are made.
    otlp_endpoint: str = ""


class SamplingDefaults(Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling defaults of requests. None means the model's own default, or the API's if the model has none."""

    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    max_tokens: AnswerTokens | None = None


class ThinkingDefaults(Struct, frozen=True, forbid_unknown_fields=True):
    """Thinking defaults of requests. None means the default of the API and the model."""

    enabled: bool | None = None
    effort: Effort | None = None
    budget: TokenCount | None = None


class ProfileConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[models.NAME.profiles.PROFILE]`. Requests name it as `NAME:PROFILE`; all other settings are the model's."""

    sampling: SamplingDefaults = SamplingDefaults()
    thinking: ThinkingDefaults = ThinkingDefaults()


class CacheConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`cache` of a model: bytes of its prefix cache in memory and on disk. 0 means off, None a fraction of its memory
    share.

    All models share one folder on disk; its limit is the largest that any model sets.
    """

    ram_bytes: Annotated[int, Meta(ge=0)] | None = None
    disk_bytes: Annotated[int, Meta(ge=0)] = 10 * 1024**3


class FallbackConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`fallback` of a model: upstreams, in order, for requests that cannot be served here."""

    to: tuple[str, ...] = ()
    # Reasons to fall back: the model is unavailable, its queue is full or slow, or the prompt exceeds its context.
    when: tuple[Literal["unavailable", "queue", "context"], ...] = ("unavailable",)


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[models.NAME]`. `path`: a folder, a Hugging Face repository in the local cache, or `demo`; default: the name."""

    name: str
    path: str
    aliases: tuple[str, ...] = ()
    preload: bool = False
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    context: Annotated[int, Meta(ge=0)] = 0
    # Maximum number of concurrently generated sequences; `auto` is the best number that a calibration found.
    max_running: Annotated[int, Meta(ge=1, le=1024)] | Literal["auto"] = DEFAULT_MAX_RUNNING
    # Whether a request computes the same shapes in every run: it runs alone, in chunks by position, from its first
    # token.
    deterministic: bool = False
    # Whether tokens are drafted from earlier text where measurements show that this is faster.
    speculate: Literal["auto", "off"] = "auto"
    # Folder or repository of a draft model: a smaller model with the same tokenizer, or a drafter made for this model.
    # Empty means none.
    draft: str = ""
    # Fraction of a long prompt that is computed if the request asks for it. The draft model chooses the tokens. 0 means
    # off.
    sparse_prefill: SparseKeep = 0.0
    # Task of the model: text generation, embeddings, scores of text pairs, or audio. `auto` derives the task from the
    # files.
    kind: Literal["auto", "text", "embed", "rerank", "audio"] = "auto"
    # Whether embeddings may be shortened even if the model's files do not declare that it was trained for this.
    matryoshka: bool = False
    sampling: SamplingDefaults = SamplingDefaults()
    thinking: ThinkingDefaults = ThinkingDefaults()
    profiles: dict[str, ProfileConfig] = {}
    # Maps names to folders or repositories of LoRA adapters. Requests use `NAME:ADAPTER` or the adapter's name alone.
    adapters: dict[str, str] = {}
    trust_remote_code: bool = False
    # Model family whose parser reads the model's reasoning and tool calls. Empty detects it by template and vocabulary.
    parser: str = ""
    # Jinja template that replaces the model's own. In the configuration file, this may also be the path of a template.
    chat_template: str = ""
    cache: CacheConfig = CacheConfig()
    # Bytes of KV for running requests. None means a fixed fraction of the memory share that the weights leave.
    kv_bytes: Annotated[int, Meta(ge=1)] | None = None
    # Bits of a quantized KV cache; None keeps the model's own precision. Quantization changes answers, and their
    # headers say so.
    kv_bits: Literal[8, 4] | None = None
    # The model's share of the memory budget.
    memory_bytes: Bytes = "auto"
    # Where a model's experts are stored. `disk` needs a model folder made by `mlxctl repack`.
    experts: Literal["memory", "disk"] = "memory"
    # A pinned model is never unloaded to make room.
    pin: bool = False
    # The model is unloaded after this time without a request; 0 means never.
    ttl_s: Seconds = 0.0
    # Until this time after its newest request, an idle model computes a token every 1.5 s, so that macOS keeps the
    # weights ready for the GPU; 0 means never.
    keep_warm_s: Seconds = 0.0
    fallback: FallbackConfig = FallbackConfig()
    group: GroupConfig = GroupConfig()
    # Address at which the worker publishes changes of its prefix cache, for routers. Missed changes can be replayed at
    # the next port. Events reveal prompts as token ids to every subscriber. Empty means that nothing is published.
    kv_events: str = ""
    # Files with chat requests whose prompts are put into the prefix cache after each load.
    warm: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    # Whether the conversation with its newest answer is prefilled while the model is idle.
    prefill_next_turn: bool = True
    # Adapter that a request names. This field is never in the file.
    adapter: str = ""

    @property
    def full_name(self) -> str:
        """Name of the model, or full name of the requested adapter."""
        return f"{self.name}:{self.adapter}" if self.adapter else self.name

    @property
    def names(self) -> tuple[str, ...]:
        """Name and aliases of the model, or all names of the requested adapter."""
        own = (self.name, *self.aliases)
        return (self.full_name, self.adapter, *(f"{name}:{self.adapter}" for name in own[1:])) if self.adapter else own

    @property
    def root(self) -> str:
        """Path of the model, or of the requested adapter."""
        return self.adapters.get(self.adapter, "") if self.adapter else self.path

    @property
    def adapted(self) -> "list[ModelConfig]":
        """Copies of this configuration, one per adapter, with `adapter` set."""
        return [structs.replace(self, adapter=name) for name in self.adapters]

    @property
    def slots(self) -> int:
        """Expected maximum number of concurrent sequences, used until the worker has reported its own."""
        return DEFAULT_MAX_RUNNING if self.max_running == "auto" else self.max_running


class MemoryConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[memory]`: the memory budget of all models together, and the number of models."""

    budget_bytes: Bytes = "auto"
    # Maximum number of models in memory at the same time; 0 means no limit.
    max_loaded: Annotated[int, Meta(ge=0, le=10_000)] = 0


class MediaConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[media]`: limits of images, video, audio and PDFs in requests, and from where they may be fetched."""

    # Maximum bytes of one image, video, audio clip or PDF, and of a file to transcribe.
    max_size_bytes: Annotated[int, Meta(ge=1024, le=48 * 1024 * 1024)] = 32 * 1024 * 1024
    # `public` allows http and https URLs with addresses of the public internet; `off` allows none.
    urls: Literal["off", "public"] = "off"
    # Folders below which a `file:` URL may point.
    folders: tuple[str, ...] = ()


class BatchesConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[batches]`: limits of files and batches on the disk."""

    # Maximum bytes of all files, batches and results together; 0 turns batches off.
    disk_bytes: Annotated[int, Meta(ge=0, le=1 << 44)] = 2 * 1024**3


class UiConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[ui]`: which clients may administer mlxd on the web page. The page itself, with its chat, is always served."""

    admin: Literal["loopback", "network", "off"] = "loopback"


class Config(Struct, frozen=True):
    """The whole checked configuration. `models` has the order of the file."""

    home: Path
    server: ServerConfig
    models: dict[str, ModelConfig]
    config_path: Path
    memory: MemoryConfig = MemoryConfig()
    media: MediaConfig = MediaConfig()
    batches: BatchesConfig = BatchesConfig()
    ui: UiConfig = UiConfig()
    upstreams: dict[str, UpstreamConfig] = {}

    @property
    def run_dir(self) -> Path:
        return run_dir(self.home)

    @property
    def prefix_cache_dir(self) -> Path:
        return self.home / "cache" / "prefix"

    @property
    def prefix_cache_bytes(self) -> int:
        """Maximum size of the cache folder that all models share."""
        return max((model.cache.disk_bytes for model in self.models.values()), default=0)

    @property
    def adapter_dir(self) -> Path:
        """Folder from which adapters may always be loaded."""
        return self.home / "adapters"

    @property
    def log_path(self) -> Path:
        return log_path(self.home)

    @property
    def keys_path(self) -> Path:
        return keys_path(self.home)

    @property
    def capture_dir(self) -> Path:
        return self.home / "captures"

    @property
    def usage_path(self) -> Path:
        return usage_path(self.home)

    @property
    def ledger_dir(self) -> Path:
        return self.home / "state" / "usage"

    @property
    def store_path(self) -> Path:
        return self.home / "state" / "responses.sqlite"

    @property
    def journal_dir(self) -> Path:
        return self.home / "state" / "background"

    @property
    def batches_dir(self) -> Path:
        return self.home / "state" / "batches"

    @property
    def admin_socket(self) -> Path:
        return admin_socket(self.home)


def url_of(server: ServerConfig, host: str = "", port: int = 0) -> str:
    """Return the base URL of a server: the configured one, or the one for an address on which the server listens."""
    host = host or server.host
    scheme = "https" if server.tls.certificate else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port or server.port}"


def file_key(field: str) -> str:
    """Return a field's usual key in the file, which is its name without the unit."""
    return field.removesuffix("_s").removesuffix("_bytes") if field.endswith(("_s", "_bytes")) else field

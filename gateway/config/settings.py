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
from protocol.spec import DEFAULT_MAX_RUNNING, LOCAL, HostFile
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
    # Base URL, such as `https://openrouter.ai/api/v1` or `https://api.anthropic.com`. Required.
    url: str
    # API of the upstream. Requests are not translated.
    dialect: Literal["openai", "anthropic"] = "openai"
    # File with the upstream's API key. Empty: no key is sent.
    key_file: str = ""
    # Models here, each with its name there: `{ big = "z-ai/glm-4.7" }`.
    models: dict[str, str] = {}
    # Allow plain HTTP, which shows keys and prompts to the network.
    plain_http: bool = False


class GroupConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Section `group` of a model: processes, called ranks, that run the model together, each with a part of it. Without
    ranks, one process runs the whole model.
    """

    # `local` once for each rank on this machine. Without `nodes` and `hosts`, one process runs the model.
    nodes: tuple[str, ...] = ()
    # Each rank has a part of every layer (`tensor`) or some layers (`pipeline`). `auto`: `pipeline` over a ring where
    # possible, else `tensor`.
    parallel: Literal["auto", "tensor", "pipeline"] = "auto"
    # `ring` is TCP, `nccl` CUDA, `jaccl` RDMA over Thunderbolt. `auto`: `nccl` with MLX's CUDA build, else `ring`.
    backend: Literal["auto", "ring", "nccl", "jaccl"] = "auto"
    # Host file of mlx.launch for several machines, this one first. See docs/groups.md#over-several-machines.
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

    # PEM file of the certificate, followed by its chain. With both files the server speaks HTTPS only. See
    # docs/configuration.md#tls.
    certificate: str = ""
    # PEM file of the certificate's key, without a passphrase. Only mlxd's user should be able to read it.
    key: str = ""


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[server]`. Keys in the file may omit `_s` and `_bytes`, as in `drain = "30s"` and `max_body = "32MiB"`."""

    # Address to listen on. Beyond the loopback, an API key is needed first.
    host: str = "127.0.0.1"
    # TCP port; 0 takes a free one.
    port: Annotated[int, Meta(ge=0, le=65535)] = 8484
    # Second port, for apps that know only Ollama's 11434; 0 opens none. See docs/ollama.md.
    ollama_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    # Certificate and key for HTTPS. See docs/configuration.md#tls.
    tls: TlsConfig = TlsConfig()
    # Least severe level in the log. See docs/monitoring.md.
    log_level: LogLevel = "info"
    # Time for running requests after SIGTERM. Requests that wait for a load end at once.
    drain_s: Seconds = 30.0
    # When a Mac is kept awake. `busy`: during requests and loads, and for 30 s after. On other systems, `always` is an
    # error.
    prevent_sleep: PreventSleep = "busy"
    # Leave GPU time to the display. `auto`: on a Mac in use. See docs/configuration.md#desktop.
    desktop: Desktop = "auto"
    # Largest request body; raise it for large media. See docs/configuration.md#bodies.
    max_body_bytes: Annotated[int, Meta(ge=1024, le=1 << 31)] = 32 * 1024 * 1024
    # Longest time of a request; 0 is no limit. A request may set a shorter `timeout`.
    request_timeout_s: Seconds = 0.0
    # Longest wait of a request for its model.
    queue_timeout_s: Seconds = 600.0
    # Disk space for each key's stored responses; 0 stores none and refuses background responses. See
    # docs/responses.md#stored-responses.
    response_store_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 256 * 1024 * 1024
    # Addresses or networks (`10.0.0.0/8`) of proxies whose `X-Forwarded-For` is used. See
    # docs/configuration.md#hosts-and-proxies.
    trusted_proxies: tuple[str, ...] = ()
    # Origins whose web pages may call the API.
    cors: tuple[str, ...] = ()
    # Host names that clients may use besides `localhost`, without port. See docs/configuration.md#hosts-and-proxies.
    hosts: tuple[str, ...] = ()
    # `/metrics` needs a key of role `metrics` or `admin`, once there are keys or beyond the loopback.
    metrics_auth: bool = True
    # Model for requests that name none, or name `default`. Empty: such requests are refused. See
    # docs/configuration.md#names.
    default: str = ""
    # Model for requests that name a vendor's small model. See docs/configuration.md#names.
    small: str = ""
    # A request that takes longer is logged as a warning; 0 logs none.
    slow_request_s: Seconds = 30.0
    # Number of newest requests to keep with input and output, at most for a day and in 64 MiB. See
    # docs/monitoring.md#captured-requests.
    capture: Annotated[int, Meta(ge=0, le=10_000)] = 0
    # Folders from which adapters may be loaded at run time. See docs/adapters.md.
    adapter_folders: tuple[str, ...] = ()
    # URL for traces, as OTLP over HTTP; needs the extra `otel`. See docs/monitoring.md.
    otlp_endpoint: str = ""


class SamplingDefaults(Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling defaults of requests. None means the model's own default, or the API's if the model has none."""

    # 0 always takes the likeliest token.
    temperature: Temperature | None = None
    # Keep only the likeliest tokens that together have this probability; 0 keeps one.
    top_p: Probability | None = None
    # Keep only so many of the likeliest tokens; 0 keeps all.
    top_k: TopK | None = None
    # Keep only tokens at least this likely relative to the likeliest.
    min_p: Probability | None = None
    # Above 1, tokens that were used become less likely.
    repetition_penalty: RepetitionPenalty | None = None
    # Applied once to each token that was used.
    presence_penalty: Penalty | None = None
    # Applied for each use of a token.
    frequency_penalty: Penalty | None = None
    # Most tokens of an answer.
    max_tokens: AnswerTokens | None = None


class ThinkingDefaults(Struct, frozen=True, forbid_unknown_fields=True):
    """Thinking defaults of requests. None means the default of the API and the model."""

    # Whether to think, if the chat template has a switch for it.
    enabled: bool | None = None
    # Without `enabled`, `none` and `minimal` mean not to think, and the others to think.
    effort: Effort | None = None
    # Most tokens of reasoning; after them the model must answer.
    budget: TokenCount | None = None


class ProfileConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[models.NAME.profiles.PROFILE]`. Requests name it as `NAME:PROFILE`; all other settings are the model's."""

    # Sampling defaults; a key that is absent here comes from the model.
    sampling: SamplingDefaults = SamplingDefaults()
    # Thinking defaults; a key that is absent here comes from the model.
    thinking: ThinkingDefaults = ThinkingDefaults()


class CacheConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`cache` of a model: bytes of its prefix cache in memory and on disk. 0 means off, None a fraction of its memory.

    All models share one folder on disk; its limit is the largest that any model sets.
    """

    # Prefix cache in memory; 0 is off. Absent: a quarter of the model's memory after its weights.
    ram_bytes: Annotated[int, Meta(ge=0)] | None = None
    # Prefix cache on disk; 0 is off. All models share one folder, limited by the largest value. See
    # docs/configuration.md#cache.
    disk_bytes: Annotated[int, Meta(ge=0)] = 10 * 1024**3


class FallbackConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`fallback` of a model: upstreams, in order, for requests that cannot be served here."""

    # Upstreams for requests that cannot be served here, in this order, if their API key may leave. See
    # docs/upstreams.md.
    to: tuple[str, ...] = ()
    # `unavailable`: the model cannot be served. `queue`: it is full, or `queue_timeout` has passed. `context`: the
    # prompt is too long.
    when: tuple[Literal["unavailable", "queue", "context"], ...] = ("unavailable",)


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[models.NAME]`. `path`: a folder, a Hugging Face repository in the local cache, or `demo`; default: the name."""

    name: str
    # Folder, repository in the local Hugging Face cache, or `demo`. Absent: the model's name. See
    # docs/configuration.md#paths.
    path: str
    # Other names of the model; `*` stands for any text. See docs/configuration.md#names.
    aliases: tuple[str, ...] = ()
    # Load the model at the start, before its first request.
    preload: bool = False
    # Type of the weights. `auto`: as stored, float32 on a CPU. Weights that need more precision keep it.
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    # Most tokens of prompt and answer together. It lowers the limit in `config.json`, or supplies a missing one; 0
    # keeps the model's own.
    context: Annotated[int, Meta(ge=0)] = 0
    # Sequences generated at once; 1,024 more may wait. `auto`: as `mlxctl calibrate` has measured, or 16. See
    # docs/cli.md.
    max_running: Annotated[int, Meta(ge=1, le=1024)] | Literal["auto"] = DEFAULT_MAX_RUNNING
    # The same request and seed give the same bits in every run: requests run one at a time and reuse no prefix. See
    # docs/models.md.
    deterministic: bool = False
    # Draft tokens, and verify several in one step, where that is faster. Answers stay the same. See
    # docs/speculation.md.
    speculate: Literal["auto", "off"] = "auto"
    # Smaller model with the same tokens, or drafter made for this model. See
    # docs/speculation.md#draft-models-and-drafters-in-a-folder-of-their-own.
    draft: str = ""
    # Part of a long prompt to compute for requests with sparse prefill that name no part; 0 refuses sparse prefill. See
    # docs/speculation.md#sparse-prefill.
    sparse_prefill: SparseKeep = 0.0
    # Task of the model, if its files and name do not show it.
    kind: Literal["auto", "text", "embed", "rerank", "audio"] = "auto"
    # Allow embeddings with fewer `dimensions` even if the model's files declare none. See docs/embeddings.md.
    matryoshka: bool = False
    # Sampling defaults of requests. See docs/configuration.md#sampling.
    sampling: SamplingDefaults = SamplingDefaults()
    # Thinking defaults of requests. See docs/configuration.md#thinking.
    thinking: ThinkingDefaults = ThinkingDefaults()
    # The same model with other defaults, under further names. See docs/configuration.md#profiles.
    profiles: dict[str, ProfileConfig] = {}
    # LoRA and DoRA adapters: names, each with a folder or repository. See docs/adapters.md.
    adapters: dict[str, str] = {}
    # Run Python code that comes with the model.
    trust_remote_code: bool = False
    # Family whose format of reasoning and tool calls is parsed. Empty: detected from the template. See docs/tools.md.
    parser: str = ""
    # Jinja template in place of the model's own: its text, or a file of at most 1 MiB.
    chat_template: str = ""
    # The prefix cache. See docs/configuration.md#cache.
    cache: CacheConfig = CacheConfig()
    # Memory for the KV of running sequences. Absent: most of the model's memory after its weights.
    kv_bytes: Annotated[int, Meta(ge=1)] | None = None
    # Bits for each number of KV. Fewer bits save memory and change answers. Absent: the model's own type. See
    # docs/memory.md#quantized-kv.
    kv_bits: Literal[8, 4] | None = None
    # Part of the memory budget. `auto`: estimated from the files, with more lent when there is room. See
    # docs/memory.md.
    memory_bytes: Bytes = "auto"
    # `disk`: read experts when they are chosen, from a folder that `mlxctl repack` wrote. `max_running` must be 2 and
    # `speculate` off. See docs/experts.md.
    experts: Literal["memory", "disk"] = "memory"
    # Never unload the model to make room for another, as after `mlxctl pin`.
    pin: bool = False
    # Unload the model after this time without a request; 0 never does.
    ttl_s: Seconds = 0.0
    # Keep the weights of an idle model on a Mac's GPU for this time. See docs/configuration.md#keep_warm.
    keep_warm_s: Seconds = 0.0
    # Upstreams for requests that cannot be served here. See docs/upstreams.md.
    fallback: FallbackConfig = FallbackConfig()
    # Processes that run the model together. See docs/configuration.md#group.
    group: GroupConfig = GroupConfig()
    # Address for events of the prefix cache, with token ids of prompts: `tcp://127.0.0.1:5557`. See
    # docs/fleet.md#events-of-the-prefix-cache.
    kv_events: str = ""
    # Files of requests whose prompts are computed after each load. See docs/configuration.md#warm.
    warm: Annotated[tuple[str, ...], Meta(max_length=64)] = ()
    # After an answer, prefill the conversation while no client waits. See docs/slow-requests.md#the-next-turn.
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

    # Memory of all workers. `auto`: the GPU limit of a Mac, or the cgroup or RAM on Linux, less a reserve. See
    # docs/memory.md.
    budget_bytes: Bytes = "auto"
    # Most models in memory; 0 is no limit.
    max_loaded: Annotated[int, Meta(ge=0, le=10_000)] = 0


class MediaConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[media]`: limits of images, video, audio and PDFs in requests, and from where they may be fetched."""

    # Largest image, video, audio, PDF, or file to transcribe, whatever `max_body` is. See docs/vision.md.
    max_size_bytes: Annotated[int, Meta(ge=1024, le=48 * 1024 * 1024)] = 32 * 1024 * 1024
    # `public`: fetch URLs of hosts that have only addresses of the public internet. See docs/vision.md.
    urls: Literal["off", "public"] = "off"
    # Folders in which `file:` URLs may point, at any depth. Empty: they are refused.
    folders: tuple[str, ...] = ()


class BatchesConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[batches]`: limits of files and batches on the disk."""

    # Disk space for files, batches and results; 0 turns batches off.
    disk_bytes: Annotated[int, Meta(ge=0, le=1 << 44)] = 2 * 1024**3


class UiConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[ui]`: which clients may administer mlxd on the web page. The page itself, with its chat, is always served."""

    # From where the page may administer: this machine, every address, or nowhere. See docs/web.md.
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

"""The configuration as frozen structs: every key, its type and its default. `load.py` reads it from the file."""

import re
import socket
import sys
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, structs

from gateway.config.remote_settings import HostFile, PeerConfig, Seconds, UpstreamConfig
from gateway.failed import CommandFailed
from gateway.state_dir.home_paths import admin_socket, keys_path, log_path, run_dir, usage_path
from protocol.spec import DEFAULT_MAX_RUNNING, LOCAL
from protocol.to_worker import REPETITION_PENALTY_MAX, REPETITION_PENALTY_MIN

CONFIG_NAME: Final = "mlxd.toml"
# Fields that tell where the configuration came from, that a table's own key gives, or that another file holds.
NOT_IN_FILE: Final = frozenset({"home", "config_path", "name", "adapter", "launch"})
# A worker's ZeroMQ routing id holds 255 bytes, the model's name and its epoch; the name is also in argv.
NAME_BYTES_MAX: Final = 200

Temperature = Annotated[float, Meta(ge=0, le=2)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bytes = Annotated[int, Meta(ge=1)] | Literal["auto"]
Connections = Annotated[int, Meta(ge=1, le=1 << 20)] | Literal["auto"]
LogLevel = Literal["debug", "info", "warning", "error", "critical"]
PreventSleep = Literal["busy", "always", "never"]
# Whether workers leave the display its part of the GPU; `auto` does so while a person uses the machine.
Desktop = Literal["auto"] | bool
# The desktop is observed through `ioreg` and `pmset`.
CAN_SEE_DESKTOP: Final = sys.platform == "darwin"
# The machine is kept awake by `caffeinate`.
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
    """`tls` of the server: PEM files of the certificate with its chain, and of its key. Empty means plain HTTP."""

    certificate: str = ""
    key: str = ""


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[server]`. In the file `_s` and `_bytes` may be left out of a key: `drain = "30s"`, `max_body = "32MiB"`."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8484
    # A second port with the same API, where Ollama's clients look for it; 0 opens none.
    ollama_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    tls: TlsConfig = TlsConfig()
    log_level: LogLevel = "info"
    # Format of stderr; `auto` is for people on a terminal and JSON elsewhere. The log file is always JSON.
    log_format: Literal["auto", "json", "console"] = "auto"
    # The log file is in `home/logs`; this many older files of this size are kept.
    log_file: bool = True
    log_max_bytes: Annotated[int, Meta(ge=64 * 1024, le=1 << 40)] = 16 * 1024 * 1024
    log_keep: Annotated[int, Meta(ge=0, le=1000)] = 8
    drain_s: Seconds = 30.0
    # Whether a Mac is kept awake: while requests run or a model loads, always, or never.
    prevent_sleep: PreventSleep = "busy"
    # Whether GPU submissions are short and with pauses, for a machine that a person works at.
    desktop: Desktop = "auto"
    write_timeout_s: Seconds = 30.0
    max_body_bytes: Annotated[int, Meta(ge=1024, le=1 << 31)] = 32 * 1024 * 1024
    # Bound of all bodies together, each held until its request ends; `auto` is a part of the machine's memory.
    body_memory_bytes: Bytes = "auto"
    request_timeout_s: Seconds = 0.0
    queue_timeout_s: Seconds = 600.0
    # IANA time zone of the days and months of budgets and usage; empty is the machine's.
    time_zone: str = ""
    # Months of usage that are kept, including the current one.
    usage_months: Annotated[int, Meta(ge=1, le=1200)] = 13
    # Percent of a model's queue that one key may fill while there are other keys.
    queue_share: Annotated[int, Meta(ge=1, le=100)] = 50
    # Stored answers of the Responses API, for each key, which clients may continue from. 0 bytes keeps none.
    response_store_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 256 * 1024 * 1024
    response_store_age_s: Seconds = 30 * 86400.0
    # Journal of running background responses, with which a restarted daemon continues them. 0 bytes keeps none.
    response_journal_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 256 * 1024 * 1024
    # Proxies whose X-Forwarded-For header is trusted.
    trusted_proxies: tuple[str, ...] = ()
    # Requests without a valid key, per minute and address; more are answered with 429, and 0 is no limit.
    unauthorized_rpm: Annotated[int, Meta(ge=0, le=1_000_000)] = 300
    # Maximum of connections in all, and from one address; `auto` is what the limit of open files leaves, and half of
    # that.
    max_connections: Connections = "auto"
    max_connections_per_address: Connections = "auto"
    cors: tuple[str, ...] = ()
    # Names of this machine that clients may use, besides the loopback's; with any, every `Host` header is checked.
    hosts: tuple[str, ...] = ()
    # Once there is a key, `/metrics` requires one that may read it.
    metrics_auth: bool = True
    # `vllm` also exports metrics under vLLM's names.
    metrics_compat: Literal["", "vllm"] = ""
    # Models for requests that name no model, or a vendor's small model. Empty refuses such requests.
    default: str = ""
    small: str = ""
    # A slower request is logged as a warning with the time of each phase; 0 logs none.
    slow_request_s: Seconds = 30.0
    # The newest requests and their answers are kept whole in `home/captures` for debugging; 0 keeps none.
    capture: Annotated[int, Meta(ge=0, le=10_000)] = 0
    capture_max_bytes: Annotated[int, Meta(ge=64 * 1024, le=1 << 40)] = 64 * 1024 * 1024
    capture_age_s: Seconds = 86400.0
    # Folders, besides `home/adapters`, whose adapters may be loaded while the daemon runs.
    adapter_folders: tuple[str, ...] = ()
    # Traces are sent here, as OTLP over HTTP; empty makes none.
    otlp_endpoint: str = ""
    # Name of this machine in a fleet; empty is the host name.
    node: Annotated[str, Meta(max_length=200, pattern=r"^[A-Za-z0-9._-]*$")] = ""

    @property
    def node_name(self) -> str:
        return self.node or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:200]


class SamplingDefaults(Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling defaults of requests; None leaves the model's own default, then the API's."""

    temperature: Temperature | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=REPETITION_PENALTY_MIN, le=REPETITION_PENALTY_MAX)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None


class ThinkingDefaults(Struct, frozen=True, forbid_unknown_fields=True):
    """Thinking defaults of requests; None leaves it to the API and the model."""

    enabled: bool | None = None
    effort: Effort | None = None
    budget: Annotated[int, Meta(ge=0, le=1 << 40)] | None = None


class ProfileConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[models.NAME.profiles.PROFILE]`, requested as `NAME:PROFILE`; settings that it lacks are the model's."""

    sampling: SamplingDefaults = SamplingDefaults()
    thinking: ThinkingDefaults = ThinkingDefaults()


class CacheConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`cache` of a model: bytes of prefix cache in memory and on disk; 0 is off, None a part of its share of memory.

    All models share one folder on disk, whose cap is the largest that any of them sets. Prefixes of fewer tokens than
    `disk_min_tokens` are not written: computing them again takes no longer, and every write wears the disk.
    """

    ram_bytes: Annotated[int, Meta(ge=0)] | None = None
    disk_bytes: Annotated[int, Meta(ge=0)] = 10 * 1024**3
    disk_min_tokens: Annotated[int, Meta(ge=0)] = 512


class SparsePrefillConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`sparse_prefill` of a model. Requests that ask for it run this part of a long prompt, chosen by its draft model;
    0 is off."""

    keep: Annotated[float, Meta(ge=0, le=1)] = 0.0
    from_tokens: Annotated[int, Meta(ge=0, le=1 << 40)] = 8192


class KvEventsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`kv_events` of a model: addresses at which its worker publishes changes of its prefix cache, for routers.

    Events reveal prompts as token ids to every subscriber, so `plain` must allow addresses beyond this machine.
    """

    endpoint: str = ""
    replay: str = ""
    topic: str = ""
    plain: bool = False


class FallbackConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`fallback` of a model: upstreams, in order, for requests that cannot be served here."""

    to: tuple[str, ...] = ()
    # Reasons to fall back: the model is unavailable, its queue is full or slow, or the prompt exceeds its context.
    when: tuple[Literal["unavailable", "queue", "context"], ...] = ("unavailable",)


class GroupConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`group` of a model: processes that run it together, each with a part; without ranks it is one process."""

    # `local` for each rank, of a group on this machine alone.
    nodes: tuple[str, ...] = ()
    # Whether each rank has a part of every layer, or all of some layers.
    parallel: Literal["auto", "tensor", "pipeline"] = "auto"
    backend: Literal["auto", "ring", "nccl", "jaccl"] = "auto"
    # Number of layers of each rank in a pipeline.
    split: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    # A file of mlx.launch, of a group over several machines, relative to this file; this machine is its first host.
    hosts: str = ""
    # The interpreter that mlxd is installed for on the other machines; empty is the path of this one's.
    python: str = ""
    # What is in the file `hosts`.
    launch: HostFile = HostFile()

    @property
    def ranks(self) -> tuple[str, ...]:
        """The node of each rank: `local`, or the destination of its host for ssh."""
        # mlx.launch starts by itself what is at 127.0.0.1.
        names = (LOCAL if host.ssh == "127.0.0.1" else host.ssh for host in self.launch.hosts[1:])
        return (LOCAL, *names) if self.launch.hosts else self.nodes


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[models.NAME]`. `path`: a folder, a Hugging Face repository in the local cache, or `demo`; default: the name."""

    name: str
    path: str
    aliases: tuple[str, ...] = ()
    preload: bool = False
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    context: Annotated[int, Meta(ge=0)] = 0
    # Maximum of concurrently generated sequences; `auto` is the useful number that a calibration found.
    max_running: Annotated[int, Meta(ge=1, le=1024)] | Literal["auto"] = DEFAULT_MAX_RUNNING
    max_waiting: Annotated[int, Meta(ge=0, le=1_000_000)] = 1024
    prefill_chunk: Annotated[int, Meta(ge=16, le=65536)] = 512
    # How rows share a forward pass; `auto` is the mode that the load's self-check found exact.
    batching: Literal["auto", "together", "equal", "single"] = "auto"
    # Whether a request computes the same shapes in every run: alone, in chunks by position, from its first token.
    deterministic: bool = False
    # Whether drafts are made from known text, where they are measured to be faster.
    speculate: Literal["auto", "off"] = "auto"
    # Folder or repository of a smaller model with the same tokens, or of a drafter for this model; empty is none.
    draft: str = ""
    sparse_prefill: SparsePrefillConfig = SparsePrefillConfig()
    # Task of the model: text generation, embeddings, scores of pairs, or audio; `auto` follows its files.
    kind: Literal["auto", "text", "embed", "rerank", "audio"] = "auto"
    # Whether embeddings may be shortened even if the model's files do not declare it as trained for that.
    matryoshka: bool = False
    load_timeout_s: Seconds = 600.0
    sampling: SamplingDefaults = SamplingDefaults()
    thinking: ThinkingDefaults = ThinkingDefaults()
    profiles: dict[str, ProfileConfig] = {}
    # Folders or repositories of LoRA adapters by name, requested as `NAME:ADAPTER` or by the adapter's name alone.
    adapters: dict[str, str] = {}
    trust_remote_code: bool = False
    # The family whose reasoning and tool calls the model writes; empty is detected by its template and vocabulary.
    parser: str = ""
    # Jinja template that replaces the model's own; the file may also give the path of a template.
    chat_template: str = ""
    cache: CacheConfig = CacheConfig()
    # Bytes of KV for running requests; None is most of the memory share that the weights leave.
    kv_bytes: Annotated[int, Meta(ge=1)] | None = None
    # Bits of a quantized KV cache; None is the model's own precision. Fewer bits change answers, which report them.
    kv_bits: Literal[8, 4] | None = None
    # Log level of the model's worker; None is the server's.
    log_level: LogLevel | None = None
    # The model's share of the memory budget.
    memory_bytes: Bytes = "auto"
    # Experts on disk need a folder that `mlxctl repack` has made.
    experts: Literal["memory", "disk"] = "memory"
    # Bytes of experts that are cached in memory if they are on disk.
    expert_cache_bytes: Bytes = "auto"
    # A pinned model is never unloaded to make room.
    pin: bool = False
    # Time without a request after which the model is unloaded; 0 is never.
    ttl_s: Seconds = 0.0
    fallback: FallbackConfig = FallbackConfig()
    group: GroupConfig = GroupConfig()
    kv_events: KvEventsConfig = KvEventsConfig()
    # The adapter that a request names; never in the file.
    adapter: str = ""

    @property
    def full_name(self) -> str:
        """The model's name, or the full name of the requested adapter."""
        return f"{self.name}:{self.adapter}" if self.adapter else self.name

    @property
    def names(self) -> tuple[str, ...]:
        """All names: the model's own and its aliases, or those of the requested adapter."""
        own = (self.name, *self.aliases)
        return (self.full_name, self.adapter, *(f"{name}:{self.adapter}" for name in own[1:])) if self.adapter else own

    @property
    def root(self) -> str:
        """Path of the model, or of the requested adapter."""
        return self.adapters.get(self.adapter, "") if self.adapter else self.path

    @property
    def adapted(self) -> "list[ModelConfig]":
        """The model once for each of its adapters, as requests see it."""
        return [structs.replace(self, adapter=name) for name in self.adapters]

    @property
    def slots(self) -> int:
        """Concurrent sequences, as far as is known before the worker reports them."""
        return DEFAULT_MAX_RUNNING if self.max_running == "auto" else self.max_running


class MemoryConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[memory]`: the budget of all models together, and when one may replace another."""

    budget_bytes: Bytes = "auto"
    # Number of models in memory at once; 0 is no limit.
    max_loaded: Annotated[int, Meta(ge=0, le=10_000)] = 0
    # A loaded model stays at least this long, whatever other models are requested.
    min_residency_s: Seconds = 10.0


class MediaConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[media]`: bounds of images, video and audio in requests, and the sources they may be fetched from."""

    # Bytes of one medium, and the number that a request may have.
    max_size_bytes: Annotated[int, Meta(ge=1024, le=48 * 1024 * 1024)] = 32 * 1024 * 1024
    max_count: Annotated[int, Meta(ge=0, le=4096)] = 64
    # Pixels of an image by its header; a larger one is never decoded.
    max_pixels: Annotated[int, Meta(ge=1024, le=1 << 30)] = 64_000_000
    # Bytes of the media of all running requests together.
    in_flight_bytes: Annotated[int, Meta(ge=1024, le=1 << 40)] = 512 * 1024 * 1024
    # Whether http and https URLs are fetched: never, or from addresses of the public internet.
    urls: Literal["off", "public"] = "off"
    fetch_timeout_s: Annotated[float, Meta(gt=0, le=600)] = 10.0
    # Folders below which a `file:` URL may point.
    folders: tuple[str, ...] = ()


class AudioConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[audio]`: bounds of transcriptions, translations and speech."""

    # Bounds of an uploaded file: its bytes, and its duration.
    max_size_bytes: Annotated[int, Meta(ge=1024, le=48 * 1024 * 1024)] = 25 * 1024 * 1024
    max_duration_s: Annotated[float, Meta(gt=0, le=86400)] = 7200.0
    # Characters of a text to speak, and the duration of its speech.
    max_input: Annotated[int, Meta(ge=1, le=1_000_000)] = 4096
    max_speech_s: Annotated[float, Meta(gt=0, le=7200)] = 900.0


class UiConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[ui]`: from where a session of the page may administer. The page itself, with its chat, is always served."""

    admin: Literal["loopback", "network", "off"] = "loopback"


class Config(Struct, frozen=True):
    """The whole configuration, checked. `models` keeps the order of the file."""

    home: Path
    server: ServerConfig
    models: dict[str, ModelConfig]
    config_path: Path
    memory: MemoryConfig = MemoryConfig()
    media: MediaConfig = MediaConfig()
    audio: AudioConfig = AudioConfig()
    ui: UiConfig = UiConfig()
    peers: dict[str, PeerConfig] = {}
    upstreams: dict[str, UpstreamConfig] = {}

    @property
    def run_dir(self) -> Path:
        return run_dir(self.home)

    @property
    def prefix_cache_dir(self) -> Path:
        return self.home / "cache" / "prefix"

    @property
    def prefix_cache_bytes(self) -> int:
        """The cap of the cache folder that all models share."""
        return max((model.cache.disk_bytes for model in self.models.values()), default=0)

    @property
    def adapter_dir(self) -> Path:
        """The folder that adapters may always be loaded from."""
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
    def admin_socket(self) -> Path:
        return admin_socket(self.home)


def url_of(server: ServerConfig, host: str = "", port: int = 0) -> str:
    """Return the base URL of a server, as configured, or for the given address that it listens on."""
    host = host or server.host
    scheme = "https" if server.tls.certificate else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port or server.port}"


def file_key(field: str) -> str:
    """Return a field's preferred key in the file, which has no unit."""
    return field.removesuffix("_s").removesuffix("_bytes") if field.endswith(("_s", "_bytes")) else field

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
from protocol.messages import REPETITION_PENALTY_MAX, REPETITION_PENALTY_MIN
from protocol.spec import LOCAL, USUAL_RUNNING

CONFIG_NAME: Final = "mlxd.toml"
# A name travels in argv and in a ZeroMQ routing id, which holds 255 bytes with its epoch.
NAME_BYTES_MAX: Final = 200

Temperature = Annotated[float, Meta(ge=0, le=2)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bytes = Annotated[int, Meta(ge=1)] | Literal["auto"]
Connections = Annotated[int, Meta(ge=1, le=1 << 20)] | Literal["auto"]
LogLevel = Literal["debug", "info", "warning", "error", "critical"]
PreventSleep = Literal["busy", "always", "never"]
# Whether workers leave a display its part of the machine; `auto` is while a person is seen at it.
Desktop = Literal["auto"] | bool
# By `ioreg` and `pmset`.
CAN_SEE_DESKTOP: Final = sys.platform == "darwin"
# By `caffeinate`.
CAN_HOLD_AWAKE: Final = sys.platform == "darwin"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ConfigError(CommandFailed):
    """The configuration cannot be used; with file and line when known."""

    def __init__(self, message: str, path: Path | None = None, line: int | None = None) -> None:
        place = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(place + message)
        self.path = path
        self.line = line


class TlsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`tls` of the server: PEM files, that of the certificate with its chain. Empty: plain HTTP."""

    certificate: str = ""
    key: str = ""


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[server]`. In the file `_s` and `_bytes` may be left out of a key: `drain = "30s"`, `max_body = "32MiB"`."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8484
    # Where Ollama's clients look for it, beside `port` and in all else the same; 0 is nowhere.
    ollama_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    tls: TlsConfig = TlsConfig()
    log_level: LogLevel = "info"
    # Of what goes to stderr; `auto` is for people on a terminal and JSON elsewhere. The file is always JSON.
    log_format: Literal["auto", "json", "console"] = "auto"
    # In `home/logs`; this many older files of this size are kept.
    log_file: bool = True
    log_max_bytes: Annotated[int, Meta(ge=64 * 1024, le=1 << 40)] = 16 * 1024 * 1024
    log_keep: Annotated[int, Meta(ge=0, le=1000)] = 8
    drain_s: Seconds = 30.0
    # Whether a Mac is kept awake: while requests run or a model loads, always, or never.
    prevent_sleep: PreventSleep = "busy"
    # Short submissions and rests of the GPU, for a machine that somebody works at.
    desktop: Desktop = "auto"
    write_timeout_s: Seconds = 30.0
    max_body_bytes: Annotated[int, Meta(ge=1024, le=1 << 31)] = 32 * 1024 * 1024
    # Of all bodies together, from their first byte to their request's end; `auto` is a part of the machine's memory.
    body_memory_bytes: Bytes = "auto"
    request_timeout_s: Seconds = 0.0
    queue_timeout_s: Seconds = 600.0
    # By which days and months of budgets and usage begin, of the IANA database; empty is the machine's.
    time_zone: str = ""
    # Months of usage that are kept, the one that runs included.
    usage_months: Annotated[int, Meta(ge=1, le=1200)] = 13
    # Percent of a model's queue that one key may fill while there are other keys.
    queue_share: Annotated[int, Meta(ge=1, le=100)] = 50
    # Of the Responses API, for clients that come back to an answer: for each key. 0 bytes keeps none.
    response_store_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 256 * 1024 * 1024
    response_store_age_s: Seconds = 30 * 86400.0
    # Of background responses that run, for a daemon that goes on with them after a restart: in all. 0 bytes keeps none.
    response_journal_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 256 * 1024 * 1024
    # Proxies whose X-Forwarded-For tells the client's address.
    trusted_proxies: tuple[str, ...] = ()
    # Requests without a valid key, a minute and address; more are a 429, and 0 is no limit.
    unauthorized_rpm: Annotated[int, Meta(ge=0, le=1_000_000)] = 300
    # At once, in all and from one address; `auto` is what the limit of open files leaves, and half of that.
    max_connections: Connections = "auto"
    max_connections_per_address: Connections = "auto"
    cors: tuple[str, ...] = ()
    # Names of this machine beside the loopback's that clients may use; with any, `Host` is checked for all of them.
    hosts: tuple[str, ...] = ()
    # From the first key on, `/metrics` needs one that may read it.
    metrics_auth: bool = True
    # `vllm`: also under vLLM's names.
    metrics_compat: Literal["", "vllm"] = ""
    # What answers a request that names no model, and one that asks for a vendor's small model. Empty: nothing does.
    default: str = ""
    small: str = ""
    # A request that takes longer is warned of, with where its time went; 0 warns of none.
    slow_request_s: Seconds = 30.0
    # The newest requests, with all that was asked and answered, kept in `home/captures` for debugging; 0 keeps none.
    capture: Annotated[int, Meta(ge=0, le=10_000)] = 0
    capture_max_bytes: Annotated[int, Meta(ge=64 * 1024, le=1 << 40)] = 64 * 1024 * 1024
    capture_age_s: Seconds = 86400.0
    # Beside `home/adapters`: folders below which an adapter may lie that is loaded while the daemon runs.
    adapter_folders: tuple[str, ...] = ()
    # Where traces go, as OTLP over HTTP; empty makes none.
    otlp_endpoint: str = ""
    # Name of this machine in a fleet; empty is its host name.
    node: Annotated[str, Meta(max_length=200, pattern=r"^[A-Za-z0-9._-]*$")] = ""

    @property
    def node_name(self) -> str:
        return self.node or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:200]


class SamplingDefaults(Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling of requests that do not set it; None leaves the model's own default, and then the API's."""

    temperature: Temperature | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=REPETITION_PENALTY_MIN, le=REPETITION_PENALTY_MAX)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None


class ThinkingDefaults(Struct, frozen=True, forbid_unknown_fields=True):
    """Thinking of requests that do not set it; None leaves it to the API and the model."""

    enabled: bool | None = None
    effort: Effort | None = None
    budget: Annotated[int, Meta(ge=0, le=1 << 40)] | None = None


class ProfileConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[models.NAME.profiles.PROFILE]`, asked for as `NAME:PROFILE`; where it is silent, the model counts."""

    sampling: SamplingDefaults = SamplingDefaults()
    thinking: ThinkingDefaults = ThinkingDefaults()


class CacheConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`cache` of a model: bytes of prefix cache in memory and on disk; 0 is off, None a part of its share of memory.

    On disk all models share one folder, whose cap is the largest that any of them names. Prefixes of fewer tokens than
    `disk_min_tokens` are not written: computing them again takes no longer, and every write wears the disk.
    """

    ram_bytes: Annotated[int, Meta(ge=0)] | None = None
    disk_bytes: Annotated[int, Meta(ge=0)] = 10 * 1024**3
    disk_min_tokens: Annotated[int, Meta(ge=0)] = 512


class SparsePrefillConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`sparse_prefill` of a model: requests that ask for it run this part of a prompt of so many tokens or more, which
    its draft model chooses; 0 is off."""

    keep: Annotated[float, Meta(ge=0, le=1)] = 0.0
    from_tokens: Annotated[int, Meta(ge=0, le=1 << 40)] = 8192


class KvEventsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`kv_events` of a model: addresses at which its worker publishes what its prefix cache holds, for routers.

    They tell prompts as token ids, to all that connect: so beyond this machine only where `plain` says so.
    """

    endpoint: str = ""
    replay: str = ""
    topic: str = ""
    plain: bool = False


class FallbackConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`fallback` of a model: upstreams, in order, to which its requests go when they cannot be served here."""

    to: tuple[str, ...] = ()
    # The model cannot be served, its queue is full or too slow, or the prompt is longer than its context.
    when: tuple[Literal["unavailable", "queue", "context"], ...] = ("unavailable",)


class GroupConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`group` of a model: processes that run it together, each with a part; without ranks it is one process."""

    # `local` for each rank, of a group on this machine alone.
    nodes: tuple[str, ...] = ()
    # A part of each layer a rank, or some layers.
    parallel: Literal["auto", "tensor", "pipeline"] = "auto"
    backend: Literal["auto", "ring", "nccl", "jaccl"] = "auto"
    # Layers by rank of a pipeline.
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
    # Sequences generated at once; `auto` is as many as a calibration has found to be of use.
    max_running: Annotated[int, Meta(ge=1, le=1024)] | Literal["auto"] = USUAL_RUNNING
    max_waiting: Annotated[int, Meta(ge=0, le=1_000_000)] = 1024
    prefill_chunk: Annotated[int, Meta(ge=16, le=65536)] = 512
    # How rows share a forward pass; `auto` is as the self-check of the load finds them exact.
    batching: Literal["auto", "together", "equal", "single"] = "auto"
    # The same request computes the same shapes in every run: alone, in chunks by position, from its first token.
    deterministic: bool = False
    # Drafts of next tokens, from text that is known already, where they are measured to pay.
    speculate: Literal["auto", "off"] = "auto"
    # A smaller model of the same tokens, or a drafter made for this one, as a folder or repository; empty is none.
    draft: str = ""
    sparse_prefill: SparsePrefillConfig = SparsePrefillConfig()
    # What it is for: text that it generates, embeddings, scores of pairs, or audio; `auto` is as its files say.
    kind: Literal["auto", "text", "embed", "rerank", "audio"] = "auto"
    # Its embeddings may be cut to fewer dimensions, also where its files do not declare that it was trained for it.
    matryoshka: bool = False
    load_timeout_s: Seconds = 600.0
    sampling: SamplingDefaults = SamplingDefaults()
    thinking: ThinkingDefaults = ThinkingDefaults()
    profiles: dict[str, ProfileConfig] = {}
    # Folders, or repositories, of LoRA adapters by name: asked for as `NAME:ADAPTER`, or by the adapter's name alone.
    adapters: dict[str, str] = {}
    trust_remote_code: bool = False
    # Which family's reasoning and tool calls the model writes; empty is by its template and vocabulary.
    parser: str = ""
    # Jinja, in place of the model's own; in the file it may also be the path of a file that holds it.
    chat_template: str = ""
    cache: CacheConfig = CacheConfig()
    # Bytes of KV for running requests; None is most of what the weights leave of its share of memory.
    kv_bytes: Annotated[int, Meta(ge=1)] | None = None
    # Bits of a number of KV; None is as the model computes it. Fewer change answers, which name them.
    kv_bits: Literal[8, 4] | None = None
    # Of its worker; None is the server's.
    log_level: LogLevel | None = None
    # Its share of the memory budget.
    memory_bytes: Bytes = "auto"
    # Where its experts are: in memory, or on disk, in a folder that `mlxctl repack` has made.
    experts: Literal["memory", "disk"] = "memory"
    # Of the experts in memory where they are on disk.
    expert_cache_bytes: Bytes = "auto"
    # Never unloaded to make room.
    pin: bool = False
    # Unloaded after this long without a request; 0 is never.
    ttl_s: Seconds = 0.0
    fallback: FallbackConfig = FallbackConfig()
    group: GroupConfig = GroupConfig()
    kv_events: KvEventsConfig = KvEventsConfig()
    # Of a request: the one of its adapters that it names.
    adapter: str = ""

    @property
    def full_name(self) -> str:
        """The name of the model, or of the adapter of it that a request names."""
        return f"{self.name}:{self.adapter}" if self.adapter else self.name

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that it has: its own and its aliases, or those of the adapter."""
        own = (self.name, *self.aliases)
        return (self.full_name, self.adapter, *(f"{name}:{self.adapter}" for name in own[1:])) if self.adapter else own

    @property
    def root(self) -> str:
        """Path of what answers: the model, or the adapter."""
        return self.adapters.get(self.adapter, "") if self.adapter else self.path

    @property
    def adapted(self) -> "list[ModelConfig]":
        """The model with each of its adapters, as requests see it."""
        return [structs.replace(self, adapter=name) for name in self.adapters]

    @property
    def slots(self) -> int:
        """Sequences generated at once, as far as that is known before its worker says."""
        return USUAL_RUNNING if self.max_running == "auto" else self.max_running


class MemoryConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[memory]`: what all models may take together, and when one makes room for another."""

    budget_bytes: Bytes = "auto"
    # Models in memory at once; 0 is no limit.
    max_loaded: Annotated[int, Meta(ge=0, le=10_000)] = 0
    # A loaded model stays at least this long, whatever other models are requested.
    min_residency_s: Seconds = 10.0


class MediaConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[media]`: bounds of images, video and audio in requests, and where they may be fetched from."""

    # Of one medium, and how many a request may have.
    max_size_bytes: Annotated[int, Meta(ge=1024, le=48 * 1024 * 1024)] = 32 * 1024 * 1024
    max_count: Annotated[int, Meta(ge=0, le=4096)] = 64
    # Of an image, as its header says; nothing larger is decoded.
    max_pixels: Annotated[int, Meta(ge=1024, le=1 << 30)] = 64_000_000
    # Of all requests together, until they have ended.
    in_flight_bytes: Annotated[int, Meta(ge=1024, le=1 << 40)] = 512 * 1024 * 1024
    # Whether an http or https URL is fetched: never, or from addresses of the public internet.
    urls: Literal["off", "public"] = "off"
    fetch_timeout_s: Annotated[float, Meta(gt=0, le=600)] = 10.0
    # Folders below which a `file:` URL may point.
    folders: tuple[str, ...] = ()


class AudioConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[audio]`: bounds of transcriptions, translations and speech."""

    # Of a file that is sent, as it is and as it sounds.
    max_size_bytes: Annotated[int, Meta(ge=1024, le=48 * 1024 * 1024)] = 25 * 1024 * 1024
    max_duration_s: Annotated[float, Meta(gt=0, le=86400)] = 7200.0
    # Characters of a text to speak, and how long its speech may get.
    max_input: Annotated[int, Meta(ge=1, le=1_000_000)] = 4096
    max_speech_s: Annotated[float, Meta(gt=0, le=7200)] = 900.0


class UiConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[ui]`: from where a session of the page may administer. The page itself, with its chat, is always served."""

    admin: Literal["loopback", "network", "off"] = "loopback"


class Config(Struct, frozen=True):
    """All of it, checked. `models` keeps the order of the file."""

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
        """The cap of the folder that all models share."""
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
    """The base URL of a server, as configured, or where it really listens."""
    host = host or server.host
    scheme = "https" if server.tls.certificate else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port or server.port}"


def file_key(field: str) -> str:
    """The key of a field as the file spells it best: without its unit."""
    return field.removesuffix("_s").removesuffix("_bytes") if field.endswith(("_s", "_bytes")) else field

"""Bodies of `/ui/api`, and events of its feed. Bodies that `mlxctl` also reads are in `gateway.control_types`."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from gateway.access.key import Expiry, KeyLimits
from gateway.control_types import MemoryStatus, ModelStatus, ReloadResult, RequestView
from gateway.model_files.metadata import ListedModel
from gateway.model_files.pull_queue import PullStatus

Name = Annotated[str, Meta(min_length=1, max_length=200)]
# No part of a name may begin with a dot or a dash.
_PART = "[A-Za-z0-9][A-Za-z0-9._-]*"
# A repository is ORG/NAME or ORG/NAME@REVISION.
RepositoryName = Annotated[str, Meta(max_length=300, pattern=rf"^{_PART}/{_PART}(@{_PART}(/{_PART})*)?\Z")]
# The page cannot create admin keys, and a key keeps its role.
Role = Literal["user", "metrics"]


class LogIn(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST session`: the code after `#code=` of the link."""

    code: Annotated[str, Meta(min_length=1, max_length=128)]


class LoggedIn(Struct, frozen=True):
    """Answer to a login. `token` is a bearer token for `/ui/api` and `/v1`. It expires if it is unused for `idle_s`."""

    token: str
    idle_s: float
    version: str


class OwnUsage(Struct, frozen=True):
    """Usage of the visitor's API key since counting began."""

    requests: int
    prompt_tokens: int
    completion_tokens: int
    running: int
    rejections: dict[str, int]


class Me(Struct, frozen=True):
    """`GET me`. `visitor` is `session`, `key`, or `open` on a loopback without keys. Only a session may administer."""

    visitor: Literal["session", "key", "open"]
    may_administer: bool
    # The value of `admin` in the `[ui]` table of the configuration.
    admin: Literal["loopback", "network", "off"]
    version: str
    models: list[str]
    key: str | None = None
    usage: OwnUsage | None = None


class ModelFilesList(Struct, frozen=True):
    """`GET models`. The `state` of a model that is only in the cache is `not configured`."""

    models: list[ListedModel]
    available_bytes: int


class HubModel(Struct, frozen=True):
    """A repository on the hub. Unknown facts are None. `obstacles` are the reasons why it cannot be loaded."""

    repository: str
    downloads: int | None
    is_here: bool
    fits: bool | None
    verdict: str
    obstacles: tuple[str, ...] = ()
    disk_bytes: int | None = None
    weights_bytes: int | None = None
    context: int | None = None
    model_type: str = ""
    # What mlxd's own list recommends the model for; empty for other models.
    purpose: str = ""


class HubModels(Struct, frozen=True):
    """`GET hub/search` and `GET hub/recommend`. `is_offline` means that the hub was not reached and this is mlxd's own
    list.
    """

    models: list[HubModel]
    available_bytes: int
    is_offline: bool = False


class HubOrder(Struct, frozen=True):
    """A query for the child process `gateway.web.hub_child`: words to search for, or a repository."""

    verb: Literal["search", "recommend", "info"]
    available_bytes: int
    words: Annotated[list[str], Meta(max_length=16)] = []
    repository: str = ""


class HubAnswer(Struct, frozen=True):
    """The answer to a `HubOrder`: models, or an error."""

    models: HubModels | None = None
    error: str = ""


class PullOrder(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST pulls`."""

    repository: RepositoryName


class Pulls(Struct, frozen=True):
    """`GET pulls`: all downloads, including ended ones, the newest last."""

    pulls: list[PullStatus]


class ConfigShown(Struct, frozen=True):
    """`GET config`: the current configuration with all defaults, as TOML and as values (bytes, seconds)."""

    file: str
    toml: str
    values: dict[str, Any]


class ConfigChecked(Struct, frozen=True):
    """`POST config/check`: whether the file is valid, and what a reload would change. `diff` is a unified diff of the
    current configuration and the file's; empty if they are equal.
    """

    ok: bool
    error: str = ""
    line: int | None = None
    changes: ReloadResult | None = None
    diff: str = ""


class ConfigReloaded(Struct, frozen=True):
    """`POST config/reload`."""

    done: ReloadResult
    diff: str


class KeyFields(KeyLimits, frozen=True, kw_only=True):
    """Limits of a key, as in `mlxctl keys create`. 0 means no limit; empty `models` means all models."""

    models: tuple[Name, ...] = ()
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    # `expires` None means that the key never expires.
    expires: Expiry | None = None


class KeyOrder(KeyFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST keys/create`."""

    name: Name
    role: Role = "user"
    shares_cache: bool = False


class KeyRef(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST keys/rotate`, `POST keys/revoke`."""

    name: Name


class KeyView(KeyFields, frozen=True, kw_only=True):
    """A key without its secret. Usage numbers are totals since counting began; times are Unix times, 0 for never."""

    name: str
    prefix: str
    role: Literal["user", "admin", "metrics"]
    is_disabled: bool
    shares_cache: bool
    created: float
    last_used: float
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    running: int = 0
    rejections: dict[str, int] = field(default_factory=dict[str, int])


class KeyList(Struct, frozen=True):
    """`GET keys`. `is_open` means that no key was ever made, so every program on this machine may use mlxd."""

    keys: list[KeyView]
    is_open: bool


class KeySecret(Struct, frozen=True):
    """Answer to `keys/create` and `keys/rotate`. Only this answer shows the secret."""

    key: KeyView
    secret: str


class KeyRevoked(Struct, frozen=True):
    """Answer to `keys/revoke`. If no key is left, requests without a session are refused until a key is made."""

    name: str
    left: int


class ClientFile(Struct, frozen=True):
    """A part of a client's configuration file."""

    path: str
    form: str
    text: str


class ClientSetup(Struct, frozen=True):
    """`GET connect`: one client's settings, and the names of all `clients`. `YOUR-KEY` stands for the key."""

    client: str
    files: list[ClientFile]
    command: str
    note: str
    clients: list[str]


class Chart(Struct, frozen=True):
    """Samples of one model, one per `interval_s`, the newest last. All lists have the same length."""

    tokens_per_s: list[float]
    prompt_tokens_per_s: list[float]
    running: list[int]
    waiting: list[int]
    footprint_bytes: list[int]


class Charts(Struct, frozen=True):
    """`GET history`: samples of up to ten minutes. `until` is the Unix time of the newest sample."""

    until: float
    interval_s: float
    models: dict[str, Chart]


class LogLine(Struct, frozen=True):
    """One line of the log. `fields` are its additional fields in the log file."""

    time: str
    level: str
    logger: str
    message: str
    fields: dict[str, Any] = {}
    exception: str = ""


class LogLines(Struct, frozen=True):
    """`GET logs`, and the feed's event `log`: lines, the oldest first. `dropped` counts lines that an event had no room
    for.
    """

    lines: list[LogLine]
    dropped: int = 0


class ModelTick(Struct, frozen=True):
    """Numbers of a model that change, named as in `ModelStatus`. Rates are those of the last second."""

    name: str
    state: str
    pid: int
    stage: str
    loaded_bytes: int
    total_bytes: int
    running: int
    waiting: int
    inside: int
    share_bytes: int
    footprint_bytes: int
    kv_bytes: int
    weights_bytes: int
    context: int
    slots: int
    tokens_per_s: float
    prompt_tokens_per_s: float
    generation_tokens: int
    prompt_tokens: int
    prompt_tokens_cached: int
    restarts: int
    is_pinned: bool
    is_gated: bool
    is_waiting: bool
    last_failure: str


class FeedSnapshot(Struct, frozen=True):
    """Event `snapshot`: the first event of a stream. It is sent again to a viewer that has missed events."""

    time: float
    version: str
    url: str
    uptime_s: float
    is_draining: bool
    models: list[ModelStatus]
    memory: MemoryStatus
    requests: list[RequestView]
    requests_in_all: int
    pulls: list[PullStatus]
    captures_on: bool


class FeedTick(Struct, frozen=True, omit_defaults=True):
    """Event `tick`: changes, sent once a second.

    `models` are those with changed numbers, `removed` the names of removed models. `requests` are the oldest 50; they
    are sent at the next tick if a request starts, ends or changes state, and every other second if only counters
    change. `pulls` are sent if a download differs.
    """

    time: float
    models: list[ModelTick] = []
    removed: list[str] = []
    memory: MemoryStatus | None = None
    requests: list[RequestView] | None = None
    requests_in_all: int | None = None
    pulls: list[PullStatus] | None = None
    is_draining: bool | None = None


class StateChange(Struct, frozen=True):
    """Event `state`, sent immediately: a model's new state. `time` is a Unix time."""

    time: float
    model: str
    state: str


class FeedPing(Struct, frozen=True):
    """Event `ping`, sent if nothing else was sent for 15 s."""

    time: float

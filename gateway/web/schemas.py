"""Bodies of `/ui/api`, and events of its feed. Those that `mlxctl` also reads are in `gateway.control_types`."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from gateway.access.key import Expiry, KeyLimits
from gateway.control_types import MemoryStatus, ModelStatus, ReloadResult, RequestView
from gateway.model_files.listing import ListedModel
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
    """Answer to a login. `token` is a bearer token for `/ui/api` and `/v1`, which expires if unused for `idle_s`."""

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
    """`GET me`. `visitor` is `session`, `key`, or `open` on a loopback without keys; only a session administers."""

    visitor: Literal["session", "key", "open"]
    may_administer: bool
    # The configured [ui] admin.
    admin: Literal["loopback", "network", "off"]
    version: str
    models: list[str]
    key: str | None = None
    usage: OwnUsage | None = None


class OrderAccepted(Struct, frozen=True):
    """202: the order was accepted. The feed has its progress, and the model's `last_failure` its failure."""

    model: str
    order: Literal["load", "unload", "restart", "pin", "unpin"]


class ModelFilesList(Struct, frozen=True):
    """`GET models`. The `state` of a model that is only in the cache is `not configured`."""

    models: list[ListedModel]
    available_bytes: int


class HubModel(Struct, frozen=True):
    """A repository of the hub; unknown facts are None. `obstacles` are the reasons why it cannot be loaded."""

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


class HubModels(Struct, frozen=True):
    """`GET hub/search` and `GET hub/recommend`. `is_offline`: this is mlxd's own list, as the hub was not reached."""

    models: list[HubModel]
    available_bytes: int
    is_offline: bool = False


class HubOrder(Struct, frozen=True):
    """A query for the process `gateway.web.hub_child`: words to search for, or a repository."""

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
    """`GET pulls`: all downloads, the newest last, ended ones included."""

    pulls: list[PullStatus]


class ConfigShown(Struct, frozen=True):
    """`GET config`: the configuration in force with every default, as TOML and as values (bytes, seconds)."""

    file: str
    toml: str
    values: dict[str, Any]


class ConfigChecked(Struct, frozen=True):
    """`POST config/check`: whether the file is valid, and what a reload would change. `diff` is a unified diff of the
    effective configurations, empty without changes."""

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
    """Limits of a key, as in `mlxctl keys create`. 0 is no limit; empty `models` allows all."""

    models: tuple[Name, ...] = ()
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    # None never expires.
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
    """A key without its secret. Usage counts since counting began; times are Unix times, 0 for never."""

    name: str
    prefix: str
    role: Literal["user", "admin", "metrics", "peer"]
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
    """`GET keys`. `is_open`: there has never been a key, so every program of this machine may use mlxd."""

    keys: list[KeyView]
    is_open: bool


class KeySecret(Struct, frozen=True):
    """Answer to `keys/create` and `keys/rotate`, which shows the secret this once."""

    key: KeyView
    secret: str


class KeyRevoked(Struct, frozen=True):
    """Answer to `keys/revoke`. If no key is left, every request without a session is refused until one is made."""

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
    """One model's samples, one per `interval_s`, the newest last; all lists have the same length."""

    tokens_per_s: list[float]
    prompt_tokens_per_s: list[float]
    running: list[int]
    waiting: list[int]
    footprint_bytes: list[int]


class Charts(Struct, frozen=True):
    """`GET history`: up to ten minutes. `until` is the Unix time of the newest sample."""

    until: float
    interval_s: float
    models: dict[str, Chart]


class LogLine(Struct, frozen=True):
    """One line of the log; `fields` are the additional ones of its line in the file."""

    time: str
    level: str
    logger: str
    message: str
    fields: dict[str, Any] = {}
    exception: str = ""


class LogLines(Struct, frozen=True):
    """`GET logs`, and the feed's event `log`: the oldest first. `dropped` counts lines beyond the size of an event."""

    lines: list[LogLine]
    dropped: int = 0


class ModelTick(Struct, frozen=True):
    """Changing numbers of a model, named as in `ModelStatus`. Rates are those of the last second."""

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
    """Event `snapshot`: the first event, repeated for a viewer that has missed some."""

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
    """Event `tick`, once a second, with changes only.

    `models` have changed numbers, `removed` are names of removed models. `requests` are the oldest 50, sent as soon as
    one starts, ends or changes state, and every other second if only counters change; `pulls` as soon as one differs.
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
    """Event `state`, sent at once: a model's new state; `time` is a Unix time."""

    time: float
    model: str
    state: str


class FeedPing(Struct, frozen=True):
    """Event `ping`, sent when nothing else was sent for 15 s."""

    time: float

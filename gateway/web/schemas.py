"""Bodies of `/ui/api`, and the events of its feed. Those that `mlxctl` reads too are in `gateway.control_types`."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from gateway.access.key import Expiry, Limit, Percent
from gateway.control_types import MemoryStatus, ModelStatus, ReloadResult, RequestView
from gateway.model_files.listing import ListedModel

Name = Annotated[str, Meta(min_length=1, max_length=200)]
# No part begins with a dot or a dash.
_PART = "[A-Za-z0-9][A-Za-z0-9._-]*"
# ORG/NAME or ORG/NAME@REVISION of the hub.
RepositoryName = Annotated[str, Meta(max_length=300, pattern=rf"^{_PART}/{_PART}(@{_PART}(/{_PART})*)?\Z")]
# A key keeps its role, and no key of the page's is an admin's.
Role = Literal["user", "metrics"]

# -- the visitor -------------------------------------------------------------------------------------------------------


class LogIn(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST session`: the code after `#code=` of the link."""

    code: Annotated[str, Meta(min_length=1, max_length=128)]


class LoggedIn(Struct, frozen=True):
    """`token` goes into `Authorization: Bearer`, of `/ui/api` and of `/v1`; it ends when unused for `idle_s`."""

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
    # [ui] admin of the configuration.
    admin: Literal["loopback", "network", "off"]
    version: str
    models: list[str]
    key: str | None = None
    usage: OwnUsage | None = None


# -- models ------------------------------------------------------------------------------------------------------------


class OrderAccepted(Struct, frozen=True):
    """202: the order is carried out; the feed has its progress, and `last_failure` of the model how it failed."""

    model: str
    order: Literal["load", "unload", "restart", "pin", "unpin"]


class ModelFilesList(Struct, frozen=True):
    """`GET models`. `state` of a model is `not configured` where only the cache has it."""

    models: list[ListedModel]
    available_bytes: int


class HubModel(Struct, frozen=True):
    """A repository of the hub; None is what the hub does not tell, `obstacles` are why it cannot be loaded."""

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
    """`GET hub/search` and `GET hub/recommend`. `is_offline`: the hub was not reached, and this is mlxd's own list."""

    models: list[HubModel]
    available_bytes: int
    is_offline: bool = False


class HubOrder(Struct, frozen=True):
    """A question for `gateway.web.hub_child`, a process that asks the hub: words to search for, or a repository."""

    verb: Literal["search", "recommend", "info"]
    available_bytes: int
    words: Annotated[list[str], Meta(max_length=16)] = []
    repository: str = ""


class HubAnswer(Struct, frozen=True):
    """Its answer: the models, or why there are none."""

    models: HubModels | None = None
    error: str = ""


class PullOrder(Struct, frozen=True, forbid_unknown_fields=True):
    """`POST pulls`."""

    repository: RepositoryName


class PullStatus(Struct, frozen=True):
    """One download. `waiting` for the one before; `failed` and `cancelled` ones keep what has come: order it again.

    `left_s` is None while the rate is not known. `message` is the end's sentence; `path` the folder of a finished one.
    """

    id: str
    repository: str
    state: Literal["waiting", "running", "done", "failed", "cancelled"]
    downloaded_bytes: int = 0
    total_bytes: int = 0
    bytes_per_s: float = 0.0
    left_s: float | None = None
    message: str = ""
    path: str = ""


class Pulls(Struct, frozen=True):
    """`GET pulls`: the newest last, ended ones included."""

    pulls: list[PullStatus]


# -- configuration and keys --------------------------------------------------------------------------------------------


class ConfigShown(Struct, frozen=True):
    """`GET config`: the configuration in force with every default, as TOML and as values (bytes, seconds)."""

    file: str
    toml: str
    values: dict[str, Any]


class ConfigChecked(Struct, frozen=True):
    """`POST config/check`: whether the file could be used, and what a reload would change. `diff` is a unified diff of
    the effective configurations, empty where nothing changes."""

    ok: bool
    error: str = ""
    line: int | None = None
    changes: ReloadResult | None = None
    diff: str = ""


class ConfigReloaded(Struct, frozen=True):
    """`POST config/reload`."""

    done: ReloadResult
    diff: str


class KeyFields(Struct, frozen=True, kw_only=True):
    """Limits of a key, as `mlxctl keys create` has them; 0 is none, `models` empty all."""

    models: tuple[Name, ...] = ()
    rpm: Limit = 0
    tpm: Limit = 0
    concurrency: Limit = 0
    max_sequences: Limit = 0
    max_tokens: Limit = 0
    queue_share: Percent = 0
    requests_per_day: Limit = 0
    tokens_per_day: Limit = 0
    requests_per_month: Limit = 0
    tokens_per_month: Limit = 0
    alert_at: Percent = 80
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    # None is never.
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
    """A key without its secret; usage since counting began, times in seconds since 1970 (0 for never)."""

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
    rejections: dict[str, int] = {}


class KeyList(Struct, frozen=True):
    """`GET keys`. `is_open`: there has never been a key, so that every program of this machine may use mlxd."""

    keys: list[KeyView]
    is_open: bool


class KeySecret(Struct, frozen=True):
    """Answer to `keys/create` and `keys/rotate`: the only time that the secret is shown."""

    key: KeyView
    secret: str


class KeyRevoked(Struct, frozen=True):
    """Answer to `keys/revoke`. With none left, every request without a session is refused until one is made."""

    name: str
    left: int


class ClientFile(Struct, frozen=True):
    """A part of a client's configuration file, as it is to be there."""

    path: str
    form: str
    text: str


class ClientSetup(Struct, frozen=True):
    """`GET connect`: one client's settings, and the names of all `clients`. A key is never in it: `YOUR-KEY` is."""

    client: str
    files: list[ClientFile]
    command: str
    note: str
    clients: list[str]


# -- charts and logs ---------------------------------------------------------------------------------------------------


class Chart(Struct, frozen=True):
    """One model: a number for each `interval_s`, the newest last; all lists are equally long."""

    tokens_per_s: list[float]
    prompt_tokens_per_s: list[float]
    running: list[int]
    waiting: list[int]
    footprint_bytes: list[int]


class Charts(Struct, frozen=True):
    """`GET history`: up to ten minutes. `until` is the time of the newest number, in seconds since 1970."""

    until: float
    interval_s: float
    models: dict[str, Chart]


class LogLine(Struct, frozen=True):
    """One line of the log; `fields` stand beside its message in the file."""

    time: str
    level: str
    logger: str
    message: str
    fields: dict[str, Any] = {}
    exception: str = ""


class LogLines(Struct, frozen=True):
    """`GET logs`, and the feed's event `log`: the oldest first. `dropped` lines were too many for one event."""

    lines: list[LogLine]
    dropped: int = 0


# -- the feed ----------------------------------------------------------------------------------------------------------


class ModelTick(Struct, frozen=True):
    """Changing numbers of a model; names are those of `ModelStatus`. Rates are of the last second."""

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
    """Event `snapshot`: the first one, and again for a viewer that has missed some."""

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
    """Event `tick`, once a second: what has changed, and nothing else.

    `models` are those with changed numbers, `removed` names that are gone, `requests` all of the oldest 50 as soon as
    one comes, goes or changes its state, every other second while only counters change; `pulls` as soon as one differs.
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
    """Event `state`, at once: a model's state, `time` in seconds since 1970."""

    time: float
    model: str
    state: str


class FeedPing(Struct, frozen=True):
    """Event `ping`, when nothing else was sent for 15 s."""

    time: float

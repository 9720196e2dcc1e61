"""This machine as the host of other gateways' ranks: its memory, its copies of models, and the processes of ranks."""

import importlib.metadata
import platform
import secrets
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import structs

from gateway.config.settings import Config, ModelConfig
from gateway.model_files.hub_cache import cached_models
from gateway.model_files.served_form import FormReader
from gateway.nodes.networks import interfaces, objection, trusted_ips
from gateway.workers.memory.broker import Broker
from gateway.workers.supervisor.ports import WorkerPort
from protocol import __version__
from protocol.group import Versions
from protocol.node_agent import Described, Reserve
from protocol.spec import WorkerSpec

# Epochs are counted up from 1.
EPOCH_MAX: Final = 1 << 32
# Fields of a rank's specification that its gateway decides: numbers, and names that are no paths. All others are this
# machine's own, whatever was sent.
THEIRS: Final = (
    "name",
    "epoch",
    "dtype",
    "context",
    "max_running",
    "max_waiting",
    "prefill_chunk",
    "batching",
    "deterministic",
    "cache_bytes",
    "kv_bytes",
    "group",
    "rank",
)


class ThisHost:
    """`NodeHost` of this machine. `config` is the one in force; `start` starts a process, and raises `OSError`.

    `links` are the addresses of this gateway's own sockets.
    """

    def __init__(
        self,
        config: Callable[[], Config],
        broker: Broker,
        start: Callable[[WorkerSpec], WorkerPort],
        links: tuple[str, str],
    ) -> None:
        self._config = config
        self._broker = broker
        self._start = start
        self._down, self._up = links
        self._forms = FormReader()
        self._boot = secrets.randbits(48)

    def describe(self, call: int, form: str) -> Described:
        config, broker = self._config(), self._broker
        free = max(0, min(broker.budget - broker.granted, broker.machine.available()))
        return Described(
            call,
            config.server.node_name,
            self._boot,
            versions(),
            f"{platform.system()} {platform.machine()}",
            broker.budget,
            free,
            form,
            trusted_ips(config.node, interfaces()),
        )

    def find(self, model: str, form: str) -> str:
        """Of what the configuration names and what the model cache has, in that order; first what is called alike."""
        paths = [each.path for each in self._config().models.values()] + cached_models()
        for path in sorted(dict.fromkeys(paths), key=lambda path: path != model):
            if form and form == self.form(path):
                return path
        return ""

    def form(self, path: str) -> str:
        """The form of this machine's copy, empty where there is none. Reads files."""
        return self._forms.read(path, ())

    async def grant(self, label: str, size_bytes: int) -> None:
        await self._broker.admit_guest(label, size_bytes)

    def give_back(self, label: str, pid: int) -> None:
        self._broker.end_guest(label, pid)

    def spawn(self, label: str, path: str, spec: bytes, order: Reserve) -> WorkerPort:
        sent = msgspec.json.decode(spec, type=WorkerSpec)  # a DecodeError is a ValueError
        if problem := _problem(sent) or _mismatch(sent, order) or self._objection(sent):
            raise ValueError(problem)
        assert sent.rank is not None, "checked"
        model = self._model(path)
        own = WorkerSpec(
            path=path,
            down=self._down,
            up=self._up,
            trust_remote_code=model is not None and model.trust_remote_code,
            log_level=self._config().server.log_level,
            memory_bytes=order.size_bytes,
            **{field: getattr(sent, field) for field in THEIRS},
        )
        # Two groups may run one model here, and this gateway may run it as well.
        name = label.replace(" ", "-")
        # Each rank here has a reservation of its own.
        return self._start(structs.replace(own, name=name, rank=structs.replace(sent.rank, beside=1, is_reserved=True)))

    def _objection(self, spec: WorkerSpec) -> str:
        """The reason why it must not listen where its gateway says."""
        assert spec.rank is not None, "checked"
        return objection(spec.rank.ip, self._config().node, interfaces())

    def _model(self, path: str) -> ModelConfig | None:
        return next((each for each in self._config().models.values() if each.path == path), None)


def versions() -> Versions:
    """Those of this installation."""
    return Versions(__version__, _version("mlx"), _version("mlx-lm"))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _problem(spec: WorkerSpec) -> str:
    group, rank = spec.group, spec.rank
    if group is None or rank is None or not 0 < rank.rank < group.size:
        return "a follower's specification is expected: a group, and a rank above 0"
    if not 0 < spec.epoch <= EPOCH_MAX:
        return f"epoch {spec.epoch} is none"
    if not all(address.startswith("tcp://") for address in (rank.plan, rank.watch)):
        return "a rank of another machine is reached by TCP"
    return ""


def _mismatch(spec: WorkerSpec, order: Reserve) -> str:
    """The difference between a rank's specification and what its memory was reserved for; empty for none."""
    assert spec.group is not None, "checked"
    assert spec.rank is not None, "checked"
    start = group_name(spec)
    if start != order.group:
        return f"it is of {start}, and the memory was reserved for {order.group}"
    rank, size = spec.rank.rank, spec.group.size
    if (rank, size) != (order.rank, order.size):
        return f"it is rank {rank} of {size}, and the memory was reserved for rank {order.rank} of {order.size}"
    return ""


def group_name(spec: WorkerSpec) -> str:
    """The name of one start of a group, as reservations for it have it."""
    return f"{spec.name}#{spec.epoch}"

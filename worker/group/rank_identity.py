"""Identity of a rank: versions and files, which must be equal on all ranks."""

from dataclasses import dataclass
from importlib.metadata import version

from protocol import __version__
from protocol.failures import Code
from protocol.group import JoinGroup, Versions
from protocol.model_digest import TOKENIZER_FILES, digest, files_digest, weights_digest
from protocol.spec import WorkerSpec
from worker.errors import LoadFailed
from worker.model.loader import resolve


@dataclass(frozen=True, slots=True)
class Identity:
    """Facts that must be equal on all ranks. `form` is a digest of the files, and of the settings that affect
    results."""

    versions: Versions
    form: str


def identity_of(spec: WorkerSpec) -> Identity:
    """Return the identity of this rank. Raises `LoadFailed`."""
    path = resolve(spec.path)
    try:
        weights = weights_digest(path)
        files = files_digest(path, ("config.json", *TOKENIZER_FILES, *sorted(file.name for file in path.glob("*.py"))))
    except (OSError, ValueError) as error:
        raise LoadFailed(Code.MODEL_CORRUPT, f"{path} cannot be read: {error}") from error
    versions = Versions(__version__, version("mlx"), version("mlx-lm"))
    return Identity(versions, digest(weights, files, spec.dtype, spec.group, spec.trust_remote_code))


def mismatch(own: Identity, join: JoinGroup, node: str, epoch: int) -> LoadFailed | None:
    """Return the reason why a rank cannot join this group; None if the rank matches."""
    place = f"rank {join.rank} ({node}, {join.host})"
    if join.versions != own.versions:
        theirs, ours = (" ".join([v.mlxd, v.mlx, v.mlx_lm]) for v in (join.versions, own.versions))
        return LoadFailed(Code.INCOMPATIBLE, f"{place} runs mlxd, mlx and mlx-lm {theirs}, and rank 0 {ours}")
    if join.form != own.form:
        return LoadFailed(Code.MODEL_CORRUPT, f"{place} has other files of the model, or other settings, than rank 0")
    if join.epoch != epoch:
        return LoadFailed(Code.INCOMPATIBLE, f"{place} is of another start, {join.epoch} instead of {epoch}")
    return None

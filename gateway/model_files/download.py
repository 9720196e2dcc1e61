"""Downloads into the Hugging Face cache that resume where an earlier attempt stopped.

The hub's own library restarts each file in a new process, which costs hours for a large model: huggingface_hub 2.4
gives its partial files new names, and hf_xet 1.8, whose cache of chunks is off, transfers the whole file again. So
large files are downloaded here to where that library would put them (`blobs/SHA256`) and verified by their checksum.
The library then finds them there and adds the small files, links and references. Until then no process sees an
incomplete model.
"""

import fcntl
import glob
import hashlib
import shutil
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

import httpx2
from huggingface_hub import constants, get_session, hf_hub_url, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, disable_progress_bars, hf_raise_for_status
from msgspec import Struct

from gateway.model_files.hub import HubFailed, RemoteFile, Repository, token, translated_errors
from gateway.model_files.hub_cache import cache_dir, folder_of

TRANSFERS_MAX: Final = 4
# A transfer is given up after this many consecutive failures without a byte received between them.
ATTEMPTS: Final = 6
RETRY_DELAY_S: Final = 1.0
# This much disk space must stay free, because a full disk breaks more than the download.
RESERVE_BYTES: Final = 256 * 1024 * 1024
_TRANSIENT_STATUSES: Final = frozenset({408, 425, 429, 500, 502, 503, 504})


class DownloadPlan(Struct, frozen=True):
    """Plan of a download. `here_bytes` counts the bytes that are on this machine already, including partial files."""

    repository: Repository
    files: tuple[RemoteFile, ...]
    large: tuple[RemoteFile, ...]
    total_bytes: int
    here_bytes: int

    @property
    def missing_bytes(self) -> int:
        return self.total_bytes - self.here_bytes


class Space(Struct, frozen=True):
    """Needed and free space on the disk that has the cache."""

    folder: str
    free_bytes: int
    needed_bytes: int

    @property
    def is_enough(self) -> bool:
        return self.needed_bytes == 0 or self.free_bytes >= self.needed_bytes + RESERVE_BYTES


def plan(repository: Repository, patterns: Sequence[str]) -> DownloadPlan:
    """Select the files of a repository that match `patterns`, and those of them that the cache lacks. Raises
    `HubFailed`.
    """
    files = repository.matching(patterns)
    if not files:
        raise HubFailed(f"no file of {repository.id} matches {', '.join(patterns)}")
    lacking = [file for file in files if not _is_here(repository, file)]
    # A large file that is complete but not yet verified is included.
    large = tuple(filter(_is_ours, lacking))
    total = sum(file.size_bytes for file in files)
    to_come = sum(file.size_bytes for file in lacking) - sum(_size_so_far(repository, file) for file in large)
    return DownloadPlan(repository, files, large, total, total - to_come)


def space(plan: DownloadPlan) -> Space:
    """Compare the plan's missing bytes with the free space of the cache's disk."""
    folder = cache_dir()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return Space(str(folder), shutil.disk_usage(there).free, plan.missing_bytes)


def fetch(plan: DownloadPlan, arrived: Callable[[int], None]) -> Path:
    """Download all files and return the snapshot's folder. Raises `HubFailed`. Several threads call `arrived` with
    numbers of bytes.
    """
    disable_progress_bars()
    stop = threading.Event()
    pool = ThreadPoolExecutor(TRANSFERS_MAX, "pull")
    try:
        # The largest files start first, so that they are not left over to be transferred one by one.
        files = sorted(plan.large, key=lambda file: file.size_bytes, reverse=True)
        transfers = [pool.submit(_transfer, plan.repository, file, arrived, stop) for file in files]
        done, _ = wait(transfers, return_when=FIRST_EXCEPTION)
        for transfer in done:
            transfer.result()
    finally:
        # An interrupt also stops the transfers. Partial files stay.
        stop.set()
        pool.shutdown(cancel_futures=True)
    return _complete(plan)


def _complete(plan: DownloadPlan) -> Path:
    """Have the hub's library add the other files and the links. Raises `HubFailed`."""
    repository = plan.repository
    names = [glob.escape(file.name) for file in plan.files]
    path = ""
    # The commit is completed first, which moves no reference. The reference is moved last, to a complete snapshot.
    for revision in dict.fromkeys((repository.commit, repository.revision)):
        with translated_errors(repository.id, repository.revision), _translated_disk_errors():
            path = snapshot_download(
                repository.id, revision=revision, cache_dir=cache_dir(), token=token(), allow_patterns=names
            )
    return Path(path)


def _transfer(repository: Repository, file: RemoteFile, arrived: Callable[[int], None], stop: threading.Event) -> None:
    """Download a file to its place in the cache, continuing an earlier attempt. Raises `HubFailed`."""
    blob = _blob(repository, file)
    part = _part(blob)
    with _translated_disk_errors():
        blob.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as out:
            _lock(out, file)
            if blob.exists():  # Another process has just finished the file.
                part.unlink(missing_ok=True)
                return
            if out.tell() > file.size_bytes:
                _empty(out)
            _receive(repository, file, out, arrived, stop)
            if stop.is_set():
                return
            if _sha256(part) != file.sha256:
                part.unlink()
                raise HubFailed(f"{file.name} was damaged in transit and has been deleted; pull it again")
            part.replace(blob)


def _receive(
    repository: Repository, file: RemoteFile, out: BinaryIO, arrived: Callable[[int], None], stop: threading.Event
) -> None:
    """Receive until the file is complete; a broken connection is opened again. Raises `HubFailed`."""
    url = hf_hub_url(repository.id, file.name, revision=repository.commit)
    failures = 0
    while (have := out.tell()) < file.size_bytes and not stop.is_set():
        with translated_errors(repository.id, repository.revision):
            try:
                _stream(url, file.size_bytes, out, arrived, stop)
            except (httpx2.TransportError, HfHubHTTPError) as error:
                if isinstance(error, HfHubHTTPError) and error.response.status_code not in _TRANSIENT_STATUSES:
                    raise
                failures = 1 if out.tell() > have else failures + 1
                if failures >= ATTEMPTS:
                    raise
                stop.wait(RETRY_DELAY_S * failures)


def _stream(url: str, size: int, out: BinaryIO, arrived: Callable[[int], None], stop: threading.Event) -> None:
    """Send one request for the missing bytes."""
    have = out.tell()
    # The bytes of a compressed answer could not be counted.
    headers = build_hf_headers(token=token()) | {"accept-encoding": "identity"}
    if have:
        headers["range"] = f"bytes={have}-"
    timeout_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=headers, timeout=timeout_s, follow_redirects=True) as response:
        hf_raise_for_status(response)
        if have and response.status_code != 206:
            # The server has sent the whole file, because it does not support ranges.
            _empty(out)
            arrived(-have)
        for chunk in response.iter_bytes():
            out.write(chunk)
            out.flush()
            arrived(len(chunk))
            if stop.is_set():
                return
    if out.tell() != size:
        raise httpx2.RemoteProtocolError(f"{out.tell()} bytes of {size} came")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _lock(out: BinaryIO, file: RemoteFile) -> None:
    """Lock a partial file until it is closed, because two writers would corrupt it. Raises `HubFailed`."""
    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise HubFailed(f"{file.name} is being downloaded by another process") from None


def _empty(out: BinaryIO) -> None:
    # Truncating does not change the file position, which counts the received bytes.
    out.seek(0)
    out.truncate()


@contextmanager
def _translated_disk_errors() -> Generator[None, None, None]:
    """Translate errors of a full or read-only disk. Raises `HubFailed`."""
    try:
        yield
    # These errors are subclasses of OSError, but do not come from the disk.
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise
    except OSError as error:
        raise HubFailed(f"the cache {cache_dir()} cannot be written: {error.strerror or error}") from None


def _is_ours(file: RemoteFile) -> bool:
    """Whether this module downloads the file. Small files, and those too large for HTTP, are left to the
    hub's library.
    """
    return bool(file.sha256) and file.size_bytes <= constants.MAX_HTTP_DOWNLOAD_SIZE


def _is_here(repository: Repository, file: RemoteFile) -> bool:
    cached = try_to_load_from_cache(repository.id, file.name, cache_dir(), repository.commit)
    return isinstance(cached, str) or (_is_ours(file) and _blob(repository, file).exists())


def _size_so_far(repository: Repository, file: RemoteFile) -> int:
    try:
        size = _part(_blob(repository, file)).stat().st_size
    except OSError:
        return 0
    # A file that is too long is downloaded from its beginning.
    return size if size <= file.size_bytes else 0


def _blob(repository: Repository, file: RemoteFile) -> Path:
    return folder_of(repository.id) / "blobs" / file.sha256


def _part(blob: Path) -> Path:
    """Return the path of a partial file, named so that the hub's own tools find it and clean it up."""
    return blob.with_name(f"{blob.name}.incomplete")

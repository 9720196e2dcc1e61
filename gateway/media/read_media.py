"""Turns media references into bytes with a digest. The bytes are decoded, fetched or read, within configured limits.

Counter of the media bytes of all requests. Bytes count from when they are read until their request ends.

Media that the request itself contains, as base64 or data URIs. Large ones are decoded in a thread.
"""

import asyncio
import binascii
import hashlib
import os
import stat
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, cast
from urllib.parse import unquote, urlsplit

import msgspec

from gateway.config.settings import MediaConfig
from gateway.errors import FULL_RETRY_AFTER_S, BadRequest, Unavailable
from gateway.media.host_names import HostNames
from gateway.media.media_reference import DATA, IMAGE, STORED, FetchFailed, Reference, TooManyBytes
from gateway.telemetry.metrics import MediaNumbers
from protocol.codec import MAX_FRAME_BYTES
from protocol.spec import MEDIA_MAX
from protocol.to_worker import ChatPrompt, Media

IN_FLIGHT_BYTES_MAX: Final = 512 * 1024 * 1024


def quota_bytes(limit_bytes: int, has_others: bool) -> int:
    """Return the limit for one key. If there are other keys, it is half of the bytes, but at least as many as one
    request may send.
    """
    return max(limit_bytes // 2, min(limit_bytes, MAX_FRAME_BYTES)) if has_others else limit_bytes


class InFlightBytes:
    """Counter of bytes with a limit for all keys together and one for each key. Used on the event loop only."""

    def __init__(self, has_others: Callable[[], bool] = bool, limit_bytes: int = IN_FLIGHT_BYTES_MAX) -> None:
        """`limit_bytes` is for all owners together; `has_others` returns whether there are several owners."""
        self.limit_bytes = limit_bytes
        self._has_others = has_others
        self._held: Counter[str] = Counter()
        self.numbers = MediaNumbers()

    def lease(self) -> "MediaLease":
        return MediaLease(self)

    def take(self, owner: str, size_bytes: int) -> None:
        """Count more bytes of an owner. Raises `Unavailable` if a limit would be exceeded."""
        limit = self.limit_bytes
        if self.numbers.used_bytes + size_bytes > limit:
            self._refuse("The media of the requests that run fill the memory set aside for them. Try again later.")
        if self._held[owner] + size_bytes > quota_bytes(limit, self._has_others()):
            self._refuse("The media of this key's requests fill its share of the memory for media. Try again later.")
        self.numbers.used_bytes += size_bytes
        self._held[owner] += size_bytes

    def give_back(self, owner: str, size_bytes: int) -> None:
        self.numbers.used_bytes -= size_bytes
        self._held[owner] -= size_bytes
        if not self._held[owner]:
            del self._held[owner]

    def _refuse(self, message: str) -> None:
        self.numbers.refused += 1
        raise Unavailable(message, FULL_RETRY_AFTER_S, "media_memory_full")


class MediaLease:
    """Counts the media bytes of one request. The request's record owns the lease and closes it when the request has
    ended.
    """

    __slots__ = ("_counted", "owner", "size_bytes")

    def __init__(self, counted: InFlightBytes) -> None:
        self._counted = counted
        # Key to whose share the bytes count. It is set before the first byte.
        self.owner = ""
        self.size_bytes = 0

    def grow(self, more_bytes: int) -> None:
        """Count more bytes. Raises `Unavailable`."""
        self._counted.take(self.owner, more_bytes)
        self.size_bytes += more_bytes

    def close(self) -> None:
        self._counted.give_back(self.owner, self.size_bytes)
        self.size_bytes = 0


# vLLM's prefix for a video as a list of JPEG files, separated by commas, which needs no video decoder.
# With a vision model each page of a PDF counts as an image.
COUNT_MAX: Final = MEDIA_MAX
FRAMES: Final = "data:video/jpeg;base64,"
FRAMES_MAX: Final = 2048
_SPACE: Final = str.maketrans("", "", " \t\r\n")
_URL_SAFE: Final = str.maketrans("-_", "+/")
_SHOWN_MAX: Final = 40


def invalid(reference: Media, reason: str) -> BadRequest:
    """Return the error for an invalid image, video, audio clip or document."""
    return BadRequest(f"'{reference.param}': {reason}.", reference.param, f"invalid_{reference.kind}")


def too_large(reference: Reference, limit_bytes: int) -> BadRequest:
    """Return the error for an image, video, audio clip or document that is too large."""
    code = "image_too_large" if reference.kind == IMAGE else f"invalid_{reference.kind}"
    return BadRequest(f"'{reference.param}' is larger than {limit_bytes} bytes.", reference.param, code)


def decode(reference: Reference, limit_bytes: int) -> tuple[bytes, int]:
    """Return the bytes of a medium, and the number of frames if the bytes are a list of video frames, else 0.

    Raises `BadRequest`.
    """
    if reference.encoded:
        return _bytes(reference, reference.encoded, limit_bytes), 0
    if reference.url[: len(FRAMES)].lower() == FRAMES and reference.kind == "video":
        return _frames(reference, limit_bytes)
    head, comma, encoded = reference.url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise invalid(reference, f"a data URI must be base64, not {head[:_SHOWN_MAX]!r}")
    return _bytes(reference, encoded, limit_bytes), 0


def _frames(reference: Reference, limit_bytes: int) -> tuple[bytes, int]:
    frames = reference.url[len(FRAMES) :].split(",", FRAMES_MAX)
    if len(frames) > FRAMES_MAX:
        raise invalid(reference, f"at most {FRAMES_MAX} frames are taken")
    parts: list[bytes] = []
    size = 0
    for frame in frames:
        data = _bytes(reference, frame, limit_bytes)
        parts += (len(data).to_bytes(4, "big"), data)
        size += 4 + len(data)
        if size > limit_bytes:
            raise too_large(reference, limit_bytes)
    return b"".join(parts), len(frames)


def _bytes(reference: Reference, encoded: str, limit_bytes: int) -> bytes:
    if len(encoded) // 4 * 3 > limit_bytes + 4:
        raise too_large(reference, limit_bytes)
    try:
        data = _strict(encoded)
    except ValueError:
        raise invalid(reference, "it is not valid base64") from None
    if not data:
        raise invalid(reference, "it is empty")
    if len(data) > limit_bytes:
        raise too_large(reference, limit_bytes)
    return data


def _strict(encoded: str) -> bytes:
    """Decode base64. Encoders differ, so line ends, missing padding and the URL-safe alphabet are accepted.

    Raises `ValueError`.
    """
    try:
        return binascii.a2b_base64(encoded, strict_mode=True)
    except binascii.Error:
        text = encoded.translate(_SPACE).translate(_URL_SAFE).rstrip("=")
        return binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)


# Maximum concurrent fetches of one request.
FETCHES_MAX: Final = 4
# Maximum time in which all URLs of a request are fetched.
FETCH_TIMEOUT_S: Final = 10.0
# Maximum concurrent fetches in total, and for one key. Each fetch needs a file descriptor.
FETCHES_OF_ALL_MAX: Final = 32
FETCHES_OF_KEY_MAX: Final = 8
DIGEST_BYTES: Final = 32
_FILE: Final = "file:"

Stored = Callable[[Sequence[bytes]], Awaitable[dict[bytes, bytes]]]
# The arguments are the key, the URL, the maximum bytes, the time limit in seconds, and a callback for each piece's
# size.
Fetch = Callable[[str, str, int, float, Callable[[int], None]], Awaitable[bytes]]


def digest_of(data: bytes) -> bytes:
    """Return the BLAKE2b-256 digest of `data`, under which prefixes, features and stored media are kept."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def fetch_public() -> Fetch:
    """Return a function that fetches public URLs with shared DNS lookups. It raises `FetchFailed`."""
    names = HostNames()

    async def fetch(owner: str, url: str, limit_bytes: int, timeout_s: float, take: Callable[[int], None]) -> bytes:
        # The HTTP client is imported at the first fetch, because most daemons fetch nothing.
        from gateway.media.public_url import Fetcher

        return await Fetcher(partial(names.resolve, owner)).fetch(url, limit_bytes, timeout_s, take)

    return fetch


def bounded(
    fetch: Fetch, numbers: MediaNumbers, of_all: int = FETCHES_OF_ALL_MAX, of_key: int = FETCHES_OF_KEY_MAX
) -> Fetch:
    """Wrap `fetch` to count and limit concurrent fetches. Further fetches wait until a place is free."""
    places = asyncio.Semaphore(of_all)
    places_of: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(of_key))

    async def wait_and_fetch(
        owner: str, url: str, limit_bytes: int, timeout_s: float, take: Callable[[int], None]
    ) -> bytes:
        async with places_of[owner], places:
            numbers.fetching += 1
            try:
                return await fetch(owner, url, limit_bytes, timeout_s, take)
            finally:
                numbers.fetching -= 1

    return wait_and_fetch


@dataclass(frozen=True, slots=True)
class MediaReader:
    """Limits and functions for reading one request's media. `offload` runs expensive work in a thread.

    `stored` returns stored bytes of the request's tenant by digest; None if media are not stored.
    """

    settings: MediaConfig
    lease: MediaLease
    fetch: Fetch
    offload: Callable[[Callable[[], Media]], Awaitable[Media]]
    stored: Stored | None = None


async def resolve(prompt: ChatPrompt, reading: MediaReader, optional: AbstractSet[int] = frozenset()) -> ChatPrompt:
    """Return the prompt with the bytes of all its media. Raises `ApiError`.

    A medium with one of the `optional` indices has no bytes if it cannot be read, or if there are too many: the newest
    are read.
    """
    references = cast(tuple[Reference, ...], prompt.media)
    limit = COUNT_MAX
    required = [reference for index, reference in enumerate(references) if index not in optional]
    if len(required) > limit:
        raise too_many(len(required), limit, required[limit].param)
    unread = frozenset(sorted(optional)[: max(0, len(references) - limit)])
    kept = await _stored(references, reading)
    fetched = await _fetched(references, reading, optional)
    media: list[Media] = []
    # Digests of stored media that are already verified. A prompt may refer to the same medium often.
    hashed: set[bytes] = set()
    # Media are read one by one and counted as their bytes arrive, so that a request that exceeds a limit ends early.
    for index, reference in enumerate(references):
        if index in unread:
            media.append(_empty(reference))
            continue
        try:
            medium = await reading.offload(partial(_read, reference, index, kept, fetched, hashed, reading))
        except BadRequest:
            if index not in optional:
                raise
            medium = _empty(reference)
        if index not in fetched and not reference.url.startswith(STORED):
            reading.lease.grow(len(medium.data))
        media.append(medium)
    return msgspec.structs.replace(prompt, media=tuple(media))


def _empty(reference: Reference) -> Media:
    return Media(reference.kind, digest_of(b""), b"", reference.options, reference.param)


def too_many(count: int, limit: int, param: str) -> BadRequest:
    """Return the error for a request with too many media."""
    message = f"The request has {count} images, videos, audio clips and documents; at most {limit} are taken."
    return BadRequest(message, param, "too_many_media")


def is_inline(reference: Reference) -> bool:
    """Whether the request itself contains the medium's bytes."""
    return bool(reference.encoded) or reference.url[: len(DATA)].lower() == DATA


def _read(
    reference: Reference,
    index: int,
    kept: dict[bytes, bytes],
    fetched: dict[int, bytes],
    hashed: set[bytes],
    reading: MediaReader,
) -> Media:
    limit_bytes = reading.settings.max_size_bytes
    options = reference.options
    if index in fetched:
        data = fetched[index]
    elif reference.url.startswith(STORED):
        return _stored_medium(reference, kept, hashed)
    elif reference.url[: len(_FILE)].lower() == _FILE:
        data = _file(reference, reading.settings.folders, limit_bytes)
    elif not is_inline(reference):
        raise invalid(reference, "it is neither a data URI nor a URL")
    else:
        data, frames = decode(reference, limit_bytes)
        options = options | {"frames": frames} if frames else options
    if not data:
        raise invalid(reference, "it is empty")
    return Media(reference.kind, digest_of(data), data, options, reference.param)


def _stored_medium(reference: Reference, kept: dict[bytes, bytes], hashed: set[bytes]) -> Media:
    digest = _digest(reference)
    if digest is None or (data := kept.get(digest)) is None:
        raise _not_fetched(reference, "nothing is kept under this digest, or no longer; send its bytes again")
    if not data:
        raise invalid(reference, "it is empty")
    if digest not in hashed:
        digest = digest_of(data)
        hashed.add(digest)
    return Media(reference.kind, digest, data, reference.options, reference.param)


def _is_remote(reference: Reference) -> bool:
    scheme = reference.url.partition(":")[0].lower()
    if reference.encoded or f"{scheme}:" in (DATA, _FILE) or reference.url.startswith(STORED):
        return False
    return scheme in ("http", "https")


async def _fetched(
    references: Sequence[Reference], reading: MediaReader, optional: AbstractSet[int]
) -> dict[int, bytes]:
    """Return the bytes behind URLs, by index. Those that are optional and cannot be fetched are left out."""
    remote = {index: reference for index, reference in enumerate(references) if _is_remote(reference)}
    if not remote:
        return {}
    if reading.settings.urls == "off":
        reason = "URLs are not fetched here; send the bytes as a data URI (operator: [media] urls)"
        _check_optional(references, remote, optional, reason)
        return {}
    at_once = asyncio.Semaphore(FETCHES_MAX)

    async def fetch(index: int, reference: Reference) -> bytes | None:
        async with at_once:
            try:
                return await _fetch(reference, reading)
            except BadRequest:
                if index in optional:
                    return None
                raise

    fetches: dict[int, asyncio.Task[bytes | None]] = {}
    try:
        async with asyncio.timeout(FETCH_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            fetches |= {at: tasks.create_task(fetch(at, reference)) for at, reference in remote.items()}
    except TimeoutError:
        late = [index for index, task in fetches.items() if task.cancelled()]
        reason = f"it took longer than {FETCH_TIMEOUT_S:g} seconds"
        _check_optional(references, late, optional, reason)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    ended = {index: task.result() for index, task in fetches.items() if not task.cancelled()}
    return {index: data for index, data in ended.items() if data is not None}


def _check_optional(
    references: Sequence[Reference], missing: Iterable[int], optional: AbstractSet[int], reason: str
) -> None:
    """Raises `BadRequest` for the first medium that is missing and not optional."""
    for index in missing:
        if index not in optional:
            raise _not_fetched(references[index], reason)


async def _fetch(reference: Reference, reading: MediaReader) -> bytes:
    settings, lease = reading.settings, reading.lease
    try:
        return await reading.fetch(lease.owner, reference.url, settings.max_size_bytes, FETCH_TIMEOUT_S, lease.grow)
    except TooManyBytes:
        raise too_large(reference, settings.max_size_bytes) from None
    except FetchFailed as error:
        raise _not_fetched(reference, str(error)) from None


def _file(reference: Reference, folders: Sequence[str], limit_bytes: int) -> bytes:
    """Read a local file, which must be below one of `folders` after links are resolved."""
    try:
        parts = urlsplit(reference.url)
        path = Path(unquote(parts.path)).resolve(strict=True)
        is_below = any(path.is_relative_to(Path(folder).resolve()) for folder in folders)
        if parts.netloc not in ("", "localhost") or not is_below:
            raise PermissionError
        # Opening a pipe without O_NONBLOCK would block until the pipe has a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise PermissionError
            data = file.read(limit_bytes + 1)
    except (OSError, ValueError, RuntimeError):
        reason = "no file that may be read is there (operator: [media] folders)"
        raise _not_fetched(reference, reason) from None
    if len(data) > limit_bytes:
        raise too_large(reference, limit_bytes)
    return data


async def _stored(references: Sequence[Reference], reading: MediaReader) -> dict[bytes, bytes]:
    """Read media that earlier responses stored. Their digests are verified like those of all other media."""
    wanted = [digest for reference in references if (digest := _digest(reference)) is not None]
    if not wanted or reading.stored is None:
        return {}
    kept = await reading.stored(wanted)
    # Each reference counts, because the prompt contains the bytes once per reference.
    reading.lease.grow(sum(len(kept.get(digest, b"")) for digest in wanted))
    return kept


def _digest(reference: Reference) -> bytes | None:
    if not reference.url.startswith(STORED):
        return None
    try:
        digest = bytes.fromhex(reference.url.removeprefix(STORED))
    except ValueError:
        return None
    return digest if len(digest) == DIGEST_BYTES else None


def _not_fetched(reference: Reference, reason: str) -> BadRequest:
    return BadRequest(f"'{reference.param}' could not be fetched: {reason}.", reference.param, "media_fetch_failed")

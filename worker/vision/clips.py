"""Video clips: lists of JPEG frames, and files if PyAV is installed. Frames are decoded on demand."""

import struct
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from typing import Any, Final, Protocol

import numpy as np
from PIL import Image

from protocol.failures import Code
from protocol.to_worker import Media
from worker.errors import RequestInvalid
from worker.vision.images import ImageHeader, MediaLimits, decode, read_header, refused

_NO_PYAV: Final = (
    "{} need PyAV, which is not installed: install mlxd with its extra media (pip install 'mlxd[media]'). {}"
)
_FRAMES_INSTEAD: Final = "A list of JPEG frames (data:video/jpeg;base64,…) needs nothing."
_LENGTH: Final = struct.Struct(">I")
# Allowed container formats, which all embed their media: a playlist or a concatenation could name other files and URLs.
_FORMATS: Final = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,mp3,flac,wav,w64,aac,aiff,amr,caf,asf"
# Frames per second of a list of frames without a rate.
_DEFAULT_RATE: Final = 2.0
# If the next wanted frame is more than this many frames ahead, the decoder seeks to a key frame; otherwise it reads on.
_SEEK_FRAMES: Final = 48


class EncodedClip(Protocol):
    """Video that is not decoded yet; `rate` is in frames per second."""

    count: int
    rate: float
    width: int
    height: int

    def frames(self, indices: Sequence[int]) -> list[Image.Image]:
        """Decode these frames as RGB, upright. Raises `RequestInvalid`."""
        ...


@dataclass(slots=True, frozen=True)
class FrameSampling:
    """Selection of a clip's frames for a model: `rate` per second, at least `least`, at most `most`, and a multiple of
    `factor`.
    """

    rate: float = 2.0
    least: int = 4
    most: int = 768
    factor: int = 2

    def indices(self, clip: EncodedClip, options: dict[str, int | float]) -> list[int]:
        """Return indices spread over the clip. A list of frames is already sampled, so all its frames are used."""
        most = min(self.most, clip.count)
        if "num_frames" in options:
            wanted = float(options["num_frames"])
        elif "frames" in options:
            wanted = float(clip.count)
        else:
            wanted = max(clip.count / clip.rate * float(options.get("fps", self.rate)), self.least)
        number = max(1, int(min(wanted, most)))
        if number > self.factor:
            number -= number % self.factor
        return np.linspace(0, clip.count - 1, number).round().astype(int).tolist()


def open_clip(media: Media, limits: MediaLimits) -> EncodedClip:
    """Open the clip of a request's video without decoding or counting its frames. Raises `RequestInvalid`."""
    for name in ("fps", "num_frames"):
        if (value := media.options.get(name, 1)) <= 0:
            raise refused(f"{name} is {value:g}; it must be positive.", media.param, Code.INVALID_REQUEST)
    if "frames" in media.options:
        return FrameList(media, limits)
    return VideoFile(media, limits)


def reason_of(error: object) -> str:
    """Return FFmpeg's message without Python's error number and file name, or a fixed text for other errors."""
    return str(getattr(error, "strerror", None) or "it is damaged")


def open_file(av: Any, data: bytes) -> Any:
    """Open a media file from memory with PyAV, which may open no other file or URL."""
    return av.open(BytesIO(data), options={"format_whitelist": _FORMATS, "protocol_whitelist": "none"})


def pyav(files: str, instead: str, param: str) -> Any:
    """Return the module PyAV. Raises `RequestInvalid` if it is not installed; `instead` names an alternative."""
    if find_spec("av") is None:
        raise refused(_NO_PYAV.format(files, instead), param, Code.UNSUPPORTED_MODALITY)
    return import_module("av")


class FrameList:
    """Clip that is a sequence of JPEG files of one size, each preceded by its length in 4 bytes."""

    def __init__(self, media: Media, limits: MediaLimits) -> None:
        self._param = media.param
        self._files = _split(media)
        self.count = len(self._files)
        self.rate = float(media.options.get("fps", _DEFAULT_RATE))
        self._headers = [self._header(index, file, limits) for index, file in enumerate(self._files)]
        first = self._headers[0]
        self.width, self.height = first.width, first.height
        for index, header in enumerate(self._headers):
            if (header.width, header.height) != (self.width, self.height):
                message = f"Frame {index} of the video has another size than the first."
                raise refused(message, self._param, Code.INVALID_VIDEO)

    def frames(self, indices: Sequence[int]) -> list[Image.Image]:
        return [decode(self._files[index], self._headers[index], self._param) for index in indices]

    def _header(self, index: int, file: bytes, limits: MediaLimits) -> ImageHeader:
        try:
            return read_header(file, limits, self._param)
        except RequestInvalid as error:
            message = f"Frame {index} of the video: {error.failure.message}"
            raise refused(message, self._param, Code.INVALID_VIDEO) from error


def _split(media: Media) -> list[bytes]:
    files: list[bytes] = []
    at = 0
    while at + _LENGTH.size <= len(media.data):
        (length,) = _LENGTH.unpack_from(media.data, at)
        at += _LENGTH.size
        files.append(media.data[at : at + length])
        at += length
    if at != len(media.data) or len(files) != int(media.options["frames"]) or not files:
        raise refused("The video's list of frames is broken.", media.param, Code.INVALID_VIDEO)
    return files


class VideoFile:
    """Video file that PyAV can decode. The first frame is decoded for its size and rotation; sound is ignored."""

    def __init__(self, media: Media, limits: MediaLimits) -> None:
        self._data = media.data
        self._param = media.param
        with _opened(media.data, media.param) as container:
            stream = _stream(container, media.param)
            # The size is checked before a frame is decoded, and again on the frame, which may be larger.
            self._check_pixels(stream.width, stream.height, limits)
            first = next(iter(container.decode(stream)), None)
            rate = stream.average_rate or stream.guessed_rate
            seconds = float((stream.duration or 0) * (stream.time_base or 0)) or (container.duration or 0) / 1e6
            self.rate = float(rate or _DEFAULT_RATE)
            self.count = int(stream.frames or seconds * self.rate) or 1
            if first is None:
                raise refused("The video holds no frame.", media.param, Code.INVALID_VIDEO)
            self._check_pixels(first.width, first.height, limits)
            self.width, self.height = _upright(first).size

    def frames(self, indices: Sequence[int]) -> list[Image.Image]:
        images: list[Image.Image] = []
        with _opened(self._data, self._param) as container:
            stream = _stream(container, self._param)
            at, frame, frames = -1, None, iter(container.decode(stream))
            for wanted in indices:
                if wanted - at > _SEEK_FRAMES and stream.time_base:
                    container.seek(self._time(stream, wanted), stream=stream)
                    at, frames = wanted - _SEEK_FRAMES, iter(container.decode(stream))
                while at < wanted and (following := next(frames, None)) is not None:
                    frame = following
                    at = self._index(stream, frame, at + 1)
                if frame is None:
                    raise refused("The video is broken: a frame is missing.", self._param, Code.INVALID_VIDEO)
                # If the file ends before the frame count in its header, its last frame replaces the missing frames.
                images.append(_upright(frame).resize((self.width, self.height)))
        return images

    def _check_pixels(self, width: int, height: int, limits: MediaLimits) -> None:
        if width * height > limits.pixels:
            message = f"The video has {width} × {height} pixels; at most {limits.pixels} are taken."
            raise refused(message, self._param, Code.IMAGE_TOO_LARGE)

    def _time(self, stream: Any, index: int) -> int:
        return int(index / self.rate / stream.time_base) + (stream.start_time or 0)

    def _index(self, stream: Any, frame: Any, otherwise: int) -> int:
        if frame.pts is None or not stream.time_base:
            return otherwise
        return round(float((frame.pts - (stream.start_time or 0)) * stream.time_base) * self.rate)


@contextmanager
def _opened(data: bytes, param: str) -> Generator[Any]:
    """Open a file with PyAV. Errors that PyAV raises for broken files are translated to refusals."""
    av = pyav("Video files", _FRAMES_INSTEAD, param)
    try:
        with open_file(av, data) as container:
            yield container
    except (av.error.FFmpegError, ValueError) as error:
        raise refused(f"The video cannot be read: {reason_of(error)}.", param, Code.INVALID_VIDEO) from error


def _stream(container: Any, param: str) -> Any:
    if not container.streams.video:
        raise refused("The file holds no video.", param, Code.INVALID_VIDEO)
    if container.streams.video[0].codec_context is None:
        raise refused("The video's coding is not known.", param, Code.INVALID_VIDEO)
    return container.streams.video[0]


def _upright(frame: Any) -> Image.Image:
    image: Image.Image = frame.to_image()
    turn = getattr(frame, "rotation", 0) or 0
    return image.rotate(turn, expand=True) if turn else image

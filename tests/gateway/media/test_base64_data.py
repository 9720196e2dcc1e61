"""Bytes that a request holds itself."""

import base64

import pytest

from gateway.errors import ApiError
from gateway.media.media_reference import Reference
from gateway.media.read_media import decode

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
LIMIT = 4096


def reference(url: str = "", encoded: str = "", kind: str = "image") -> Reference:
    return Reference(kind, b"", b"", {}, "messages[0].content[1]", url=url, encoded=encoded)


def refused(given: Reference, limit: int = LIMIT) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode(given, limit)
    assert (caught.value.status, caught.value.param) == (400, "messages[0].content[1]")
    return caught.value


@pytest.mark.parametrize("head", ["data:image/png;base64,", "data:;base64,", "data:text/plain;charset=x;base64,",
                                  "DATA:IMAGE/PNG;BASE64,"])  # fmt: skip
def test_a_data_uri_is_its_bytes_whatever_media_type_it_names(head: str) -> None:
    assert decode(reference(head + base64.b64encode(PNG).decode()), LIMIT) == (PNG, 0)


@pytest.mark.parametrize(
    "encoded",
    [
        base64.b64encode(PNG).decode(),
        base64.encodebytes(PNG).decode(),
        base64.urlsafe_b64encode(PNG).decode(),
        base64.b64encode(PNG).decode().rstrip("="),
    ],
)
def test_base64_is_taken_as_encoders_write_it(encoded: str) -> None:
    assert decode(reference(encoded=encoded), LIMIT) == (PNG, 0)


@pytest.mark.parametrize("url", ["data:image/png;base64,%%%", "data:image/png;base64,", "data:image/svg+xml,<svg/>",
                                 "data:image/png;base64,iVBO=Rw0", "data:"])  # fmt: skip
def test_what_is_not_base64_is_an_invalid_image(url: str) -> None:
    assert refused(reference(url)).code == "invalid_image"


def test_more_bytes_than_one_may_have_are_refused() -> None:
    encoded = base64.b64encode(PNG).decode()

    assert decode(reference(encoded=encoded), len(PNG))[0] == PNG
    assert refused(reference(encoded=encoded), len(PNG) - 1).code == "image_too_large"
    assert refused(reference(encoded="A" * 100_000)).code == "image_too_large"


def test_a_list_of_jpeg_frames_is_each_after_its_length() -> None:
    frames = [b"\xff\xd8one", b"\xff\xd8three"]
    url = "data:video/jpeg;base64," + ",".join(base64.b64encode(frame).decode() for frame in frames)

    assert decode(reference(url, kind="video"), LIMIT) == (b"\0\0\0\5\xff\xd8one\0\0\0\7\xff\xd8three", 2)
    assert refused(reference(url + ",", kind="video")).code == "invalid_video"
    assert refused(reference(url, kind="video"), 15).code == "invalid_video"
    assert refused(reference(url)).code == "invalid_image"

"""Forms: fields and a file as they were sent, and every bound of them."""

import httpx2
import pytest

from gateway.errors import BadRequest
from gateway.http.bodies import FIELD_BYTES_MAX, PARTS_MAX, read_form

TYPE = "multipart/form-data; boundary=b"


def body(*parts: tuple[str, bytes]) -> bytes:
    return b"".join(
        b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), value)
        for name, value in parts
    ) + (b"--b--\r\n")


def test_a_form_of_httpx2_is_read_as_it_was_sent() -> None:
    data = bytes(range(256)) * 100 + b"\r\n--b\r\n"
    request = httpx2.Request(
        "POST", "http://a", data={"model": "né", "t": ["a", "b"]}, files={"file": ("../../a.wav", data, "audio/wav")}
    )
    form = read_form(request.read(), request.headers["content-type"], "file")
    assert form.fields == (("model", "né"), ("t", "a"), ("t", "b"))
    assert form.file == data


def test_without_a_file_there_is_none() -> None:
    assert read_form(body(("model", b"a")), TYPE, "file").file is None


@pytest.mark.parametrize(
    ("data", "content_type", "words"),
    [
        (body(("a", b"b")), "application/json", "must be multipart"),
        (body(("a", b"b")), "multipart/form-data", "boundary"),
        (body(("a", b"b")), "multipart/form-data; boundary=" + "b" * 300, "cannot be read"),
        (body(("a", b"b"))[:-4], TYPE, "cannot be read"),
        (b"", TYPE, "no end"),
        (b"--b\r\nContent-Type: text/plain\r\n\r\nx\r\n--b--\r\n", TYPE, "no name"),
        (b"--b\r\n" + b"A: b\r\n" * 20 + b"\r\nx\r\n--b--\r\n", TYPE, "cannot be read"),
        (b"--b\r\nA: " + b"b" * 9000 + b"\r\n\r\nx\r\n--b--\r\n", TYPE, "cannot be read"),
        (body(("a", b"\xff")), TYPE, "UTF-8"),
        (body(("a", b"b" * (FIELD_BYTES_MAX + 1))), TYPE, "larger"),
        (body(*[("a", b"b")] * (PARTS_MAX + 1)), TYPE, "parts"),
        (body(("file", b"a"), ("file", b"b")), TYPE, "more than one"),
    ],
)
def test_what_is_no_form_is_a_400(data: bytes, content_type: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        read_form(data, content_type, "file")

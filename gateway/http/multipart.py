"""Parser of `multipart/form-data` (RFC 7578). It returns plain fields, and one file as bytes."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.errors import BadRequest

FORM: Final = b"multipart/form-data"
PARTS_MAX: Final = 64
FIELD_BYTES_MAX: Final = 256 * 1024
# Maximum size of the body without the file: the other fields, and the bytes between parts.
ROOM_BYTES: Final = 1024 * 1024
_HEADERS_MAX: Final = 8
_HEADER_BYTES_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class MultipartForm:
    """Fields in the order of their parts; a name may occur several times. `file` is None if the form has no file."""

    fields: tuple[tuple[str, str], ...]
    file: bytes | None
    filename: str = ""


def read_form(body: bytes, content_type: str, file_field: str) -> MultipartForm:
    """Parse a body. `file_field` is the name of the field that has the file. Raises `BadRequest`."""
    reader = FormParser(content_type, file_field)
    reader.feed(body)
    return reader.end()


class FormParser:
    """Parser of a body that arrives in pieces. Methods raise `BadRequest`."""

    def __init__(self, content_type: str, file_field: str, on_file: Callable[[bytes], None] | None = None) -> None:
        """`on_file` is called with each piece of the file, which is then not part of the form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != FORM or not boundary:
            raise BadRequest("The body must be multipart/form-data with a boundary.", code="invalid_content_type")
        self._parts = reader = _Reader(file_field, on_file)
        with _translated():
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": reader.begin,
                    "on_header_field": reader.name_header,
                    "on_header_value": reader.value_header,
                    "on_header_end": reader.end_header,
                    "on_headers_finished": reader.headed,
                    "on_part_data": reader.take,
                    "on_part_end": reader.end,
                    "on_end": reader.close,
                },
                max_header_count=_HEADERS_MAX,
                max_header_size=_HEADER_BYTES_MAX,
            )

    def feed(self, data: bytes) -> None:
        """Parse the next piece of the body."""
        with _translated():
            self._parser.write(data)

    def end(self) -> MultipartForm:
        """Return the form of a body that has arrived."""
        reader = self._parts
        with _translated():
            self._parser.finalize()
        if not reader.is_whole:
            raise BadRequest("The form cannot be read: it has no end.", code="invalid_form")
        return MultipartForm(tuple(reader.fields), reader.file, reader.filename)


@contextmanager
def _translated() -> Generator[None]:
    try:
        yield
    except FormParserError as error:
        raise BadRequest(f"The form cannot be read: {error}.", code="invalid_form") from None


class _Reader:
    """State of the parser: the current part and the completed parts."""

    def __init__(self, file_field: str, on_file: Callable[[bytes], None] | None) -> None:
        self.fields: list[tuple[str, str]] = []
        self.file: bytes | None = None
        self.filename = ""
        self._on_file = on_file
        self.is_whole = False
        self._file_field = file_field
        self._parts = 0
        self._header: tuple[bytes, bytes] = (b"", b"")
        self._disposition = b""
        self._name = ""
        self._is_file = False
        self._pieces: list[bytes] = []
        self._size = 0

    def begin(self) -> None:
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise BadRequest(f"The form has more than {PARTS_MAX} parts.", code="invalid_form")
        self._disposition, self._name, self._pieces, self._size = b"", "", [], 0

    def name_header(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._header[0] + data[start:end], self._header[1])

    def value_header(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._header[0], self._header[1] + data[start:end])

    def end_header(self) -> None:
        if self._header[0].lower() == b"content-disposition":
            self._disposition = self._header[1]
        self._header = (b"", b"")

    def headed(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"")
        if not name:
            raise BadRequest("A part of the form has no name.", code="invalid_form")
        self._name = name.decode("utf-8", errors="replace")
        self._is_file = self._name == self._file_field
        if self._is_file and self.file is not None:
            raise BadRequest(f"The form has more than one '{self._name}'.", self._name, "invalid_value")
        if self._is_file:
            self.filename = options.get(b"filename", b"").decode("utf-8", errors="replace")

    def take(self, data: bytes, start: int, end: int) -> None:
        self._size += end - start
        if not self._is_file and self._size > FIELD_BYTES_MAX:
            message = f"'{self._name[:100]}' is larger than {FIELD_BYTES_MAX} bytes."
            raise BadRequest(message, self._name[:100], "invalid_value")
        if self._is_file and self._on_file is not None:
            self._on_file(data[start:end])
        else:
            self._pieces.append(data[start:end])

    def end(self) -> None:
        value = b"".join(self._pieces)
        self._pieces = []
        if self._is_file:
            self.file = value
            return
        try:
            self.fields.append((self._name, value.decode("utf-8")))
        except UnicodeDecodeError:
            message = f"'{self._name[:100]}' is not valid UTF-8."
            raise BadRequest(message, self._name[:100], "invalid_value") from None

    def close(self) -> None:
        self.is_whole = True

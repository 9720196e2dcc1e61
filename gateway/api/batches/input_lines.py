"""Lines of a batch's input file, in OpenAI's form: how they are checked, found again and read."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Raw, Struct

from gateway.api.batches.records import LineProblem

# Maximum lines of a batch, and characters of a line's id, as in OpenAI's API.
LINES_MAX: Final = 50_000
CUSTOM_ID_CHARS_MAX: Final = 512
# Only the first problems of a file are reported.
PROBLEMS_MAX: Final = 100
METHOD: Final = "POST"


class InputLine(Struct, frozen=True):
    """One request. `url` is the path of its endpoint."""

    custom_id: str
    method: str
    url: str
    body: Raw


class _LineFields(Struct, frozen=True):
    """Fields of a body that matter here. The endpoint reports what is wrong with them, but for `stream`."""

    model: object = ""
    stream: object = None
    background: object = None


@dataclass(frozen=True, slots=True)
class LinePlace:
    """Place of a line in the input file, and the model that it names."""

    custom_id: str
    offset: int
    size: int
    model: str


@dataclass(frozen=True, slots=True)
class ScannedInput:
    """Lines of an input file, or the problems for which the batch fails."""

    lines: list[LinePlace]
    problems: list[LineProblem]

    @property
    def model(self) -> str | None:
        """The model that all lines name; None if they name several."""
        models = {line.model for line in self.lines}
        return models.pop() if len(models) == 1 else None


_line = msgspec.json.Decoder(InputLine)
_fields = msgspec.json.Decoder(_LineFields)


def scan(path: Path, endpoint: str, line_bytes_max: int, lines_max: int = LINES_MAX) -> ScannedInput:
    """Check all lines of a file. May run in any thread. Raises `OSError`."""
    lines, problems, seen = list[LinePlace](), list[LineProblem](), set[str]()
    for number, (offset, text) in enumerate(_texts(path, line_bytes_max), 1):
        if not text.strip():
            continue
        if len(lines) >= lines_max:
            problems.append(LineProblem("too_many_tasks", f"The batch has more than {lines_max} requests."))
            break
        checked = _check(text, number, endpoint, seen, line_bytes_max)
        if isinstance(checked, LineProblem):
            problems.append(checked)
            if len(problems) >= PROBLEMS_MAX:
                break
        else:
            seen.add(checked.custom_id)
            lines.append(LinePlace(checked.custom_id, offset, len(text), model_of(checked)))
    if not lines and not problems:
        problems.append(LineProblem("empty_file", "The input file has no requests."))
    return ScannedInput(lines, problems)


def read_line(path: Path, place: LinePlace) -> InputLine:
    """Read a line again. Raises `OSError`."""
    with path.open("rb") as file:
        file.seek(place.offset)
        return _line.decode(file.read(place.size))


def model_of(line: InputLine) -> str:
    """Return the model that a line names, or an empty text."""
    model = _fields_of(line).model
    return model if isinstance(model, str) else ""


def unsupported_field(line: InputLine) -> str:
    """Return the name of a field that asks for what a line of a batch cannot have, or an empty text."""
    fields = _fields_of(line)
    if fields.stream is True:
        return "stream"
    return "background" if fields.background is True else ""


def _fields_of(line: InputLine) -> _LineFields:
    try:
        return _fields.decode(line.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _LineFields()  # The endpoint refuses the body.


def _texts(path: Path, line_bytes_max: int) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the text of each line. A line that is too long is cut, and ends the file."""
    offset = 0
    with path.open("rb") as file:
        while text := file.readline(line_bytes_max + 1):
            yield offset, text
            if len(text) > line_bytes_max:
                return
            offset += len(text)


def _check(text: bytes, number: int, endpoint: str, seen: set[str], line_bytes_max: int) -> InputLine | LineProblem:
    if len(text) > line_bytes_max:
        return LineProblem("line_too_long", f"The line is longer than {line_bytes_max} bytes.", number)
    try:
        line = _line.decode(text)
    except msgspec.ValidationError as error:
        what = str(error).replace("`", "'")
        code = "missing_required_parameter" if "missing required field" in what else "invalid_request"
        return LineProblem(code, f"The line is no request: {what}.", number, _param(str(error)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return LineProblem("invalid_json_line", "This line is not parseable as valid JSON.", number)
    if not 1 <= len(line.custom_id) <= CUSTOM_ID_CHARS_MAX:
        message = f"'custom_id' must have 1 to {CUSTOM_ID_CHARS_MAX} characters."
        return LineProblem("invalid_custom_id", message, number, "custom_id")
    if line.custom_id in seen:
        message = f"The custom_id {line.custom_id[:100]!r} is used by another line."
        return LineProblem("duplicate_custom_id", message, number, "custom_id")
    if line.method != METHOD:
        return LineProblem("invalid_method", "'method' must be POST.", number, "method")
    if line.url != endpoint:
        message = f"The url {line.url[:100]!r} does not match the batch's endpoint {endpoint!r}."
        return LineProblem("mismatched_url", message, number, "url")
    return line


def _param(text: str) -> str | None:
    """Return the field of which msgspec's message tells."""
    if "required field `" in text:
        return text.partition("required field `")[2].rstrip("`")
    return text.partition("`$.")[2].rstrip("`") or None

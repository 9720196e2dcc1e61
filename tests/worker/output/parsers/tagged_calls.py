"""Writers of calls in the notation of each family that writes values between tags."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tests.support.calls import markers
from worker.output.parsers.channels import Channels
from worker.output.parsers.families import FAMILIES
from worker.output.parsers.xml_calls import XmlCalls
from worker.structured.tool_grammar.formats import XML_SHAPES, XmlShape

Call = tuple[str, Mapping[str, str]]


@dataclass(frozen=True)
class Notation:
    form: XmlCalls
    look: XmlShape
    prefix: str = ""
    wrap_at: int = 0


def _tagged() -> dict[str, Notation]:
    found: dict[str, Notation] = {}
    for family, row in FAMILIES.items():
        grammar = row.grammar
        forms = [grammar.body] if isinstance(grammar, Channels) else list(grammar.formats)
        if forms and isinstance(form := forms[0], XmlCalls):
            prefix = " to=write<|message|>" if isinstance(grammar, Channels) else ""
            found[family] = Notation(form, XML_SHAPES[family], prefix, int(family == "deepseek_v4"))
    return found


TAGGED: Final = _tagged()


def rendered(family: str, calls: Sequence[Call]) -> str:
    """The calls as the family's template writes them."""
    known = TAGGED[family]
    form, look = known.form, known.look
    wrap = form.wrap[known.wrap_at] if form.wrap else ""
    wrap_end = form.wrap_end[known.wrap_at] if form.wrap_end else ""
    is_each = look == XML_SHAPES["qwen3_coder"] or not wrap or not form.call
    bodies = [_call(form, look, name, arguments, at) for at, (name, arguments) in enumerate(calls)]
    if is_each:
        opening = wrap + (look.wrap if wrap and form.call else "")
        closing = (look.end + wrap_end) if wrap_end else ""
        return known.prefix + "\n".join(opening + body + closing for body in bodies)
    return known.prefix + wrap + look.wrap + look.end.join(bodies) + look.end + wrap_end


def _call(form: XmlCalls, look: XmlShape, name: str, arguments: Mapping[str, str], at: int) -> str:
    head = look.name.replace("{name}", name).replace("{index}", str(at + 1))
    head_end = "" if form.head_end[0] == "\n" else form.head_end[0]
    params = "".join(_param(form, look, key, value) for key, value in arguments.items())
    return form.call + head + head_end + look.head + params + form.call_end


def _param(form: XmlCalls, look: XmlShape, key: str, value: str) -> str:
    label = look.key.replace("{type}", "string").replace("{is_string}", "true").replace("{key}", key)
    between = look.after + form.value if form.value else ""
    head = form.param + label + form.key_end + between + look.value
    return head + value + look.before_end + form.param_end + look.after


MARKERS: Final = sorted(
    {
        *markers(),
        *(
            mark
            for known in TAGGED.values()
            for mark in (
                *known.form.starts, *known.form.ends, known.form.param_end, known.form.value,
                known.form.param + "path" + known.form.key_end, known.form.call + "f" + known.form.head_end[0],
            )
        ),
    }
    - {""}
)  # fmt: skip

"""PDF files, written by hand: pages with lines of text and a coloured shape, and files broken in ways that occur."""

from dataclasses import dataclass

RED, BLUE = "0.86 0.08 0.08 rg", "0.08 0.08 0.86 rg"


@dataclass(frozen=True, slots=True)
class PdfSheet:
    """A page: lines of text, and a `circle` or a `square` in a colour."""

    text: str = ""
    shape: str = ""
    color: str = RED
    size: tuple[float, float] = (256, 256)


def pdf(*sheets: PdfSheet, extra: str = "") -> bytes:
    """A PDF of these pages, with `extra` entries in its trailer."""
    kids = " ".join(f"{4 + 2 * at} 0 R" for at in range(len(sheets)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(sheets)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for at, sheet in enumerate(sheets):
        content = _drawn(sheet)
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {sheet.size[0]} {sheet.size[1]}] /Contents {5 + 2 * at} 0 R "
            "/Resources << /Font << /F 3 0 R >> >> >>",
            f"<< /Length {len(content)} >>\nstream\n{content}\nendstream",
        ]
    return _file(objects, extra)


def encrypted() -> bytes:
    """A PDF that asks for a password."""
    return pdf(
        PdfSheet("secret"),
        extra=f"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <{'41' * 32}> /U <{'42' * 32}> >> /ID [<00> <00>]",
    )


def _drawn(sheet: PdfSheet) -> str:
    x, y, side = sheet.size[0] * 0.28, sheet.size[1] * 0.375, sheet.size[1] * 0.25
    r, k = side / 2, side * 0.276
    a, b = x + r, y + r
    arcs = [(1, 0, 1, k / r, k / r, 1, 0, 1), (0, 1, -k / r, 1, -1, k / r, -1, 0)]
    arcs += [tuple(-each for each in arc) for arc in arcs]
    curves = " ".join(
        " ".join(f"{(a, b)[at % 2] + r * each:.2f}" for at, each in enumerate(arc[2:])) + " c" for arc in arcs
    )
    shapes = {"": "", "square": f"{x} {y} {side} {side} re f", "circle": f"{a + r} {b} m {curves} f"}
    lines = " ".join(f"({line}) Tj 0 -14 Td" for line in sheet.text.split("\n")) if sheet.text else ""
    return f"{sheet.color} {shapes[sheet.shape]} 0 g BT /F 10 Tf 10 {sheet.size[1] - 20} Td {lines} ET"


def _file(objects: list[str], extra: str) -> bytes:
    data = b"%PDF-1.4\n"
    places: list[int] = []
    for number, content in enumerate(objects, 1):
        places.append(len(data))
        data += f"{number} 0 obj\n{content}\nendobj\n".encode()
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    count, start = len(objects) + 1, len(data)
    data += f"xref\n0 {count}\n0000000000 65535 f \n{table}".encode()
    return data + f"trailer\n<< /Size {count} /Root 1 0 R {extra} >>\nstartxref\n{start}\n%%EOF\n".encode()

"""Markdown of the page, drawn under node: golden documents, texts that grow, and hostile texts."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from tests.gateway.web.hostile import VECTORS
from tests.support.scale import patient

HERE: Final = Path(__file__).parent
PAGE: Final = HERE.parents[2] / "gateway" / "web" / "page"
DOCUMENTS: Final = HERE / "documents.txt"
GOLDEN: Final = HERE / "outlines.json"
# Elements that text of a model may become.
ELEMENTS: Final = (
    "div span p strong em del code br a h3 h4 h5 h6 blockquote ul ol li table thead tbody tr th td hr pre "
    "math semantics mrow mi mn mo mtext mspace mfrac msqrt mroot mstyle mpadded msub msup msubsup munder mover "
    "munderover mtable mtr mtd menclose merror mphantom"
)
ATTRIBUTES: Final = (
    "class href start xmlns display mathvariant stretchy fence separator lspace rspace accent scriptlevel displaystyle "
    "width height minsize maxsize columnalign rowspacing columnspacing notation linethickness mathcolor role"
)

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="there is no node here to run the page's modules")


def documents() -> dict[str, str]:
    parts = re.split(r"^@@ (.+)\n", DOCUMENTS.read_text(), flags=re.MULTILINE)[1:]
    texts = dict(zip(parts[::2], (text.removesuffix("\n") for text in parts[1::2]), strict=True))
    return texts | {"windows line ends": "a\r\n\r\nb\rc"}


def draw(texts: list[str], step: int = 3) -> list[dict[str, Any]]:
    """For each text its outline, whether it is the same when it grows, and the first prefix that is not."""
    command = ["node", "--no-warnings", str(HERE / "outline.mjs"), str(PAGE)]
    given = json.dumps({"documents": texts, "step": step})
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=patient(60), check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_golden_documents_are_drawn_as_before() -> None:
    texts = documents()
    drawn = draw(list(texts.values()))
    outlines = {name: result["outline"] for name, result in zip(texts, drawn, strict=True)}

    assert len(texts) >= 30
    assert outlines == json.loads(GOLDEN.read_text())


def test_a_text_that_grows_is_lexed_like_the_whole() -> None:
    texts = documents()
    for step, each in (1, texts), (11, {"all in one": "\n\n".join(texts.values())}):
        for name, result in zip(each, draw(list(each.values()), step), strict=True):
            assert result["tokens"], name
            assert result["differs"] is None, name


def test_hostile_texts_become_text_and_harmless_elements() -> None:
    for text, result in zip(VECTORS, draw(list(VECTORS)), strict=True):
        outline = result["outline"]
        assert set(re.findall(r"<([a-z][a-z0-9-]*)", outline)) <= set(ELEMENTS.split()), text
        tags = re.findall(r"<[a-z][^>]*>", outline)
        assert {name for tag in tags for name in re.findall(r'\s([a-z-]+)="', tag)} <= set(ATTRIBUTES.split()), text
        assert all(re.match(r"https?://|mailto:", address) for address in re.findall(r' href="([^"]*)"', outline)), text

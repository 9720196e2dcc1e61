"""Images in the chat: attached only where the model sees, sent as data, kept with the conversation."""

import base64
import io
import json
from pathlib import Path

from PIL import Image

from tests.browser.conftest import SCRIPTED_DAEMON, Visiting
from tests.support.daemon import DaemonProcess, write_config
from tests.support.pdfs import PdfSheet, pdf
from tests.support.pool import short_home


def picture(file: Path) -> bytes:
    pixels = io.BytesIO()
    Image.new("RGB", (32, 24), "orange").save(pixels, "PNG")
    file.write_bytes(pixels.getvalue())
    return pixels.getvalue()


def test_an_image_is_sent_as_data_and_is_there_after_a_reload(visiting: Visiting, tmp_path: Path) -> None:
    data = picture(tmp_path / "a.png")
    with short_home() as home:
        write_config(home, ("eye",))
        with DaemonProcess(home, "seeing", module=SCRIPTED_DAEMON) as daemon:
            assert daemon.complete(model="eye").status_code in (200, 400, 500, 503)
            visit = visiting(daemon)
            page = visit.open()
            page.get_by_role("button", name="Model:").click()
            page.keyboard.press("Escape")
            with page.expect_file_chooser() as chooser:
                page.get_by_role("button", name="Attach images, PDFs or text files").click()
            chooser.value.set_files(tmp_path / "a.png")
            page.locator(".composer .chip", has_text="a.png").wait_for()
            thumbnail = page.locator(".composer .chip img.thumbnail")
            assert thumbnail.evaluate("each => each.decode().then(() => each.naturalWidth)") == 32
            visit.send("What is it?")
            visit.answered()
            sent = json.dumps(visit.bodies[-1])
            assert f"data:image/png;base64,{base64.b64encode(data).decode()}" in sent
            page.wait_for_selector(".message.user img")
            page.reload()
            page.wait_for_selector(".message.user img")
            width = page.locator(".message.user img").evaluate("each => each.decode().then(() => each.naturalWidth)")
            assert width == 32


def test_a_model_that_sees_nothing_gets_text_files_and_pdfs_only(
    talkative: DaemonProcess, visiting: Visiting, tmp_path: Path
) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "notes.txt").write_text("a ``` fence")
    data = pdf(PdfSheet("Hello"))
    (tmp_path / "a.pdf").write_bytes(data)
    visit = visiting(talkative)
    page = visit.open()
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Attach PDFs or text files").click()
    chooser.value.set_files([tmp_path / "a.png", tmp_path / "notes.txt", tmp_path / "a.pdf"])
    page.wait_for_selector(".notice.bad:has-text('a.png')")
    page.locator(".composer .chip", has_text="notes.txt").wait_for()
    page.locator(".composer .chip", has_text="a.pdf").wait_for()
    visit.send("Read it.")
    page.wait_for_selector(".message.assistant .markdown")
    page.keyboard.press("Escape")
    visit.answered()

    assert page.locator(".composer .chip").count() == 0
    asked = next(body for body in visit.bodies if "input" in body)
    file, text = asked["input"][0]["content"]
    assert file["type"] == "input_file"
    assert file["filename"] == "a.pdf"
    assert file["file_data"] == f"data:application/pdf;base64,{base64.b64encode(data).decode()}"
    assert "notes.txt:\n````\na ``` fence\n````\n\nRead it." in text["text"]

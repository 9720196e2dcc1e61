"""A batch on the disk: each request has one result, wherever its daemon was killed."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from msgspec import structs

from gateway.api.batches.batch_lines import RECORD_AGE_S, InnerAnswer, StoredBatch, StoredFile, scan, served_line
from gateway.api.batches.batch_runner import RunningBatch
from gateway.api.batches.batch_store import DATA, ERRORS, INPUT, OUTPUT, BatchStore
from gateway.config.settings import BatchesConfig
from gateway.errors import ApiError

pytestmark = pytest.mark.anyio

ENDPOINT = "/v1/chat/completions"
LINE_BYTES = 1 << 16
FILE = StoredFile(id="file-1", tenant="t", purpose="batch", filename="a", size_bytes=9, created=1.0)
BATCH = StoredBatch(
    id="batch_1",
    tenant="t",
    key="t",
    is_everybodys=False,
    endpoint=ENDPOINT,
    created=2.0,
    expires=3.0,
    status="validating",
    input_file="file-1",
)


def line(name: str, **fields: object) -> str:
    made = {"custom_id": name, "method": "POST", "url": ENDPOINT, "body": {"model": "m"}}
    return json.dumps(made | fields) + "\n"


async def store(path: Path) -> BatchStore:
    """As a daemon makes it that has just started."""
    made = BatchStore(path, BatchesConfig, lambda: False)
    await made.load()
    return made


async def begun(path: Path, names: str = "abc", batch: StoredBatch = BATCH) -> tuple[BatchStore, RunningBatch]:
    made = await store(path)
    upload, file = made.folder.open_upload()
    made.folder.append(file, "".join(map(line, names)).encode())
    made.folder.close_upload(file)
    await made.add_upload(upload, 9, FILE)
    await made.add_batch(batch)
    return made, await opened(made)


async def opened(store: BatchStore) -> RunningBatch:
    running = RunningBatch(store.batches[BATCH.id], store, lambda: 5.0)
    await running.open(LINE_BYTES)
    return running


async def answer(running: RunningBatch, status: int = 200) -> str:
    """Answer the next line."""
    place = running.next_line("m")
    body = b'{"usage":{"prompt_tokens":2,"completion_tokens":3}}'
    await running.keep(*served_line(place.custom_id, InnerAnswer(status, "req_1", 0.0, body), is_anthropic=False))
    return place.custom_id


def ids(store: BatchStore, name: str) -> list[str]:
    content = store.folder.part(name, DATA).read_text() if name else ""
    return [json.loads(each)["custom_id"] for each in content.splitlines()]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def test_a_killed_daemon_leaves_results_and_the_next_runs_the_other_lines(tmp_path: Path) -> None:
    _, first = await begun(tmp_path)
    done = [await answer(first), await answer(first, 404)]
    again = await store(tmp_path)
    second = await opened(again)

    assert dict(second.counts) == {"succeeded": 1, "errored": 1}
    assert [await answer(second)] == list({*"abc"} - {*done})
    assert second.has_no_more_lines
    await second.end()
    batch = again.batches[BATCH.id]
    assert batch.status == "completed"
    assert (ids(again, batch.output_file), ids(again, batch.error_file)) == (["a", "c"], ["b"])
    assert batch.tokens is not None
    assert (batch.tokens.prompt, batch.tokens.completion) == (6, 9)
    assert not again.folder.part(BATCH.id, INPUT).exists()


async def test_a_result_that_was_written_half_is_removed_and_its_line_runs_again(tmp_path: Path) -> None:
    made, first = await begun(tmp_path)
    await answer(first)
    whole = made.folder.part(BATCH.id, OUTPUT).read_bytes()
    made.folder.part(BATCH.id, OUTPUT).write_bytes(whole + b'{"id":"batch_req_2","custom_id":"b","resp')
    second = await opened(await store(tmp_path))

    assert made.folder.part(BATCH.id, OUTPUT).read_bytes() == whole
    assert (second.waiting, dict(second.counts)) == (2, {"succeeded": 1})


@pytest.mark.parametrize("moved", [(), (OUTPUT,), (OUTPUT, ERRORS)])
async def test_a_daemon_that_is_killed_while_a_batch_ends_loses_and_repeats_nothing(
    tmp_path: Path, moved: tuple[str, ...]
) -> None:
    made, first = await begun(tmp_path)
    await answer(first)
    await answer(first, 400)
    await answer(first)
    # Up to here `end` has come: the names of the files are stored, and some are renamed.
    new = {OUTPUT: "file-out", ERRORS: "file-err"}
    batch = structs.replace(first.batch, output_file="file-out", error_file="file-err", counts=dict(first.counts))
    await made.update(structs.replace(batch, status="finalizing"))
    for suffix in moved:
        made.folder.part(BATCH.id, suffix).rename(made.folder.part(new[suffix], DATA))
    again = await store(tmp_path)
    second = await opened(again)

    assert second.has_no_more_lines
    await second.end()
    assert again.batches[BATCH.id].status == "completed"
    assert Counter([*ids(again, "file-out"), *ids(again, "file-err")]) == Counter("abc")
    assert again.files["file-out"].size_bytes == again.folder.part("file-out", DATA).stat().st_size


async def test_the_lines_of_a_batch_whose_time_is_over_expire(tmp_path: Path) -> None:
    made, running = await begun(tmp_path)
    await answer(running)
    running.expire()
    await running.end()
    batch = made.batches[BATCH.id]

    assert (batch.status, batch.counts) == ("expired", {"succeeded": 1, "expired": 2})
    errors = made.folder.part(batch.error_file, DATA).read_text().splitlines()
    assert {json.loads(each)["error"]["code"] for each in errors} == {"batch_expired"}
    assert "expired" in batch.reached


async def test_a_batch_that_was_being_cancelled_is_cancelled_by_the_next_daemon(tmp_path: Path) -> None:
    _, first = await begun(tmp_path)
    await first.cancel()
    again = await store(tmp_path)
    second = await opened(again)

    assert second.has_no_more_lines
    await second.end()
    assert (again.batches[BATCH.id].status, again.batches[BATCH.id].counts) == ("cancelled", {"canceled": 3})


async def test_a_batch_outlives_its_input_file(tmp_path: Path) -> None:
    made, running = await begun(tmp_path)
    await made.delete(FILE.id)

    assert (await running.read(running.next_line("m"))).custom_id == "a"
    assert not made.folder.part(FILE.id, DATA).exists()


async def test_what_has_no_record_is_deleted_at_the_next_start_and_what_is_unreadable_stays(tmp_path: Path) -> None:
    made, _ = await begun(tmp_path)
    made.folder.open_upload()
    (tmp_path / "file-lost.data").write_bytes(b"x")
    (tmp_path / "file-odd.json").write_bytes(b"{")
    (tmp_path / "file-odd.data").write_bytes(b"x")
    await store(tmp_path)

    kept = {"file-1.data", "file-1.json", "batch_1.in", "batch_1.json", "file-odd.json", "file-odd.data"}
    assert names(tmp_path) == kept


async def test_files_and_ended_batches_expire(tmp_path: Path) -> None:
    made, running = await begun(tmp_path)

    assert list(made.expired(FILE.created + RECORD_AGE_S - 1)) == []
    assert list(made.expired(FILE.created + RECORD_AGE_S)) == [FILE.id]
    running.expire()
    await running.end()
    assert BATCH.id in made.expired(BATCH.created + RECORD_AGE_S)


async def test_a_batch_on_a_full_disk_keeps_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, running = await begun(tmp_path)
    await answer(running)
    whole = made.folder.part(BATCH.id, OUTPUT).read_bytes()

    def fill(file: int, data: bytes) -> None:
        os.write(file, data[:10])
        raise OSError(28, "No space left on device")

    disk = made.folder._disk  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(disk, "write_all", fill)
    with pytest.raises(ApiError):
        await answer(running)
    monkeypatch.undo()
    assert made.folder.part(BATCH.id, OUTPUT).read_bytes() == whole
    assert running.counts["succeeded"] == 1


def test_a_file_has_so_many_lines_of_such_a_length(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_text("".join(line(f"r{at}") for at in range(4)))
    assert [each.code for each in scan(path, ENDPOINT, LINE_BYTES, lines_max=3).problems] == ["too_many_tasks"]
    assert len(scan(path, ENDPOINT, LINE_BYTES, lines_max=4).lines) == 4
    assert [each.code for each in scan(path, ENDPOINT, 20).problems] == ["line_too_long"]


def test_lines_of_several_models_make_one_batch(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_text(line("a") + "\n  \n" + line("b", body={"model": "n"}) + line("c", body=[]))
    scanned = scan(path, ENDPOINT, LINE_BYTES)

    assert [(each.custom_id, each.model) for each in scanned.lines] == [("a", "m"), ("b", "n"), ("c", "")]
    assert scanned.model is None


async def test_a_batch_that_is_cancelled_while_its_file_is_checked_knows_its_size(tmp_path: Path) -> None:
    made = (await begun(tmp_path))[0]
    running = RunningBatch(made.batches[BATCH.id], made, lambda: 5.0)
    await running.cancel()
    await running.open(LINE_BYTES)
    await running.end()

    batch = made.batches[BATCH.id]
    assert (batch.status, batch.total, batch.counts, batch.model) == ("cancelled", 3, {"canceled": 3}, "m")

"""The stamp of a model's folder changes with each of its files, and with nothing else."""

import os
from pathlib import Path

from gateway.model_files.served_form import model_stamp


def test_a_stamp_changes_when_a_file_is_added_written_or_removed(tmp_path: Path) -> None:
    stamps = [model_stamp(str(tmp_path / "none"))]

    def note() -> None:
        assert model_stamp(str(tmp_path)) == model_stamp(str(tmp_path))
        stamps.append(model_stamp(str(tmp_path)))

    blob = tmp_path.with_name("blob")
    (tmp_path / "model.safetensors").symlink_to(blob)
    (tmp_path / "1_Pooling").mkdir()
    assert model_stamp(str(tmp_path)) == (), "a link to a blob that is not there yet"
    for content in (b"", b"half", b"whole"):
        blob.write_bytes(content)
        note()
    os.utime(blob, ns=(1, 1))
    note()
    (tmp_path / "1_Pooling" / "config.json").write_text("{}")
    note()
    (tmp_path / "1_Pooling" / "config.json").unlink()
    (tmp_path / "config.json").write_text("{}")
    note()
    assert len(set(stamps)) == len(stamps)


def test_hidden_files_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = model_stamp(str(tmp_path))
    (tmp_path / ".DS_Store").write_text("x")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "lock").write_text("x")
    assert model_stamp(str(tmp_path)) == before

"""A file of the disk cache reads back as it was written, or is refused."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from tests.support.caches import KINDS, contents, filled, layout
from worker.kv.spans_and_checkpoints import arrays_of, assemble, copy_state, slice_span
from worker.prefix_cache.file_format import (
    FORMAT,
    Corrupt,
    FileHeader,
    encode,
    file_key,
    is_known,
    load,
    open_file,
)
from worker.prefix_cache.radix_tree import salt_key

TOKENS = np.arange(40, 60, dtype=np.int32)


def write(path: Path, kind: str, *, with_state: bool = True) -> str:
    caches = filled(kind, TOKENS.tolist())
    span, state = slice_span(caches, 0, len(TOKENS)), copy_state(caches) if with_state else None
    mx.eval(arrays_of(span, state or []))
    key = file_key("", salt_key("s"), 0, TOKENS, bool(span))
    record = FileHeader(FORMAT, key, "", salt_key("s"), 0, len(TOKENS), 0, 0, 0, None)
    encoded = encode(record, TOKENS, span, state)
    content = encoded.header + b"".join(encoded.buffers)
    assert len(content) == encoded.size
    path.write_bytes(content)
    return key


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_holds_a_cache_exactly(kind: str, tmp_path: Path) -> None:
    key = write(tmp_path / "file", kind)
    span, state = load(tmp_path / "file", key, with_state=True)
    assert state is not None
    assert contents(assemble(layout(kind), [span], state, len(TOKENS))) == contents(filled(kind, TOKENS.tolist()))
    with (tmp_path / "file").open("rb") as file:
        opened = open_file(file)
    assert opened.tokens.tolist() == TOKENS.tolist()
    assert opened.record.salt == salt_key("s") != "s"


def test_the_checkpoint_is_read_only_when_wanted(tmp_path: Path) -> None:
    key = write(tmp_path / "file", "recurrent")
    assert load(tmp_path / "file", key, with_state=False)[1] is None
    content = bytearray((tmp_path / "file").read_bytes())
    content[-1] ^= 1  # the checkpoint is what comes last
    (tmp_path / "file").write_bytes(content)
    assert load(tmp_path / "file", key, with_state=False)[0]
    with pytest.raises(Corrupt, match="content has been changed"):
        load(tmp_path / "file", key, with_state=True)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.bool_])
def test_every_dtype_survives(dtype: mx.Dtype, tmp_path: Path) -> None:
    state = ArraysCache(2)
    state[0] = (mx.arange(12).reshape(1, 3, 4) * 0.25).astype(dtype)
    mx.eval(state[0])
    key = file_key("", "", 0, TOKENS, has_kv=False)
    encoded = encode(FileHeader(FORMAT, key, "", "", 0, len(TOKENS), 0, 0, 0, None), TOKENS, [], [state])
    (tmp_path / "file").write_bytes(encoded.header + b"".join(encoded.buffers))
    _, restored = load(tmp_path / "file", key, with_state=True)
    assert restored is not None
    assert restored[0][0].dtype == dtype
    assert mx.array_equal(restored[0][0], state[0])
    assert restored[0][1] is None


def refused(path: Path, key: str) -> bool:
    try:
        load(path, key, with_state=True)
    except Corrupt:
        return True
    return False


def test_one_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    key = write(path, "recurrent")
    content = path.read_bytes()
    for at in range(len(content)):
        changed = bytearray(content)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        assert refused(path, key), f"a flipped bit at byte {at} of {len(content)} was not noticed"


def test_a_file_cut_short_or_too_long_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    key = write(path, "sliding")
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        assert refused(path, key), f"{length} of {len(content)} bytes were taken for all"
    path.write_bytes(content + b"\0")
    assert refused(path, key)


def test_a_whole_file_under_another_name_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "file", "plain")
    assert refused(tmp_path / "file", file_key("", salt_key("t"), 0, TOKENS, has_kv=True))


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    mx.save_safetensors(str(path), {"a": mx.ones(3)}, {"format": "mlx"})
    path.with_suffix(".safetensors").rename(path)
    assert refused(path, "k")
    path.write_bytes(b"\0" * 100)
    assert refused(path, "k")
    path.write_bytes(b"\xff" * 100)
    assert refused(path, "k")


def test_a_key_stands_for_the_whole_path() -> None:
    keys = {
        file_key(parent, salt, begin, TOKENS[:count], has_kv)
        for parent in ("", "p")
        for salt in ("", "s")
        for begin in (0, 1)
        for count in (0, 1, 20)
        for has_kv in (False, True)
    }
    assert len(keys) == 2 * 2 * 2 * 3 * 2


def test_only_mlx_lms_own_caches_can_be_written() -> None:
    class Custom(KVCache):
        pass

    known: list[Any] = [KVCache(), RotatingKVCache(4), ArraysCache(1)]
    assert all(is_known(leaf) for leaf in known)
    assert not is_known(Custom())


def test_a_state_without_a_form_in_a_file_is_refused() -> None:
    state = ArraysCache(1)
    state.lengths = {1, 2}  # type: ignore[assignment]
    with pytest.raises(Corrupt):
        encode(FileHeader(FORMAT, "", "", "", 0, 0, 0, 0, 0, None), TOKENS[:0], [], [state])

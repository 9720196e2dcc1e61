"""Keys of nodes in a home: made once, private, and refused where others can read them."""

from pathlib import Path

import pytest

from gateway.nodes.node_keys import NodeKeyUnusable, forget_public, keep_public, own_pair, public_of
from protocol.curve import make_pair


def test_the_own_key_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    own = own_pair(tmp_path)
    file = tmp_path / "keys" / "node.key"
    assert own_pair(tmp_path) == own
    assert file.stat().st_mode & 0o777 == 0o600
    assert own.secret in file.read_text()


def test_a_key_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    own_pair(tmp_path)
    (tmp_path / "keys" / "node.key").chmod(0o644)
    with pytest.raises(NodeKeyUnusable, match="can be read by others"):
        own_pair(tmp_path)


def test_a_file_that_holds_no_key_is_not_overwritten(tmp_path: Path) -> None:
    own_pair(tmp_path)
    file = tmp_path / "keys" / "node.key"
    file.write_text("lost")
    with pytest.raises(NodeKeyUnusable, match="holds no key"):
        own_pair(tmp_path)
    assert file.read_text() == "lost"


def test_a_public_key_of_another_node_is_kept_and_forgotten(tmp_path: Path) -> None:
    other = make_pair().public
    path = keep_public(tmp_path, "studio 2/../x", other)
    assert path.parent == tmp_path / "keys"
    assert public_of(str(path)) == other
    forget_public(tmp_path, "studio 2/../x")
    forget_public(tmp_path, "studio 2/../x")
    assert not path.exists()
    with pytest.raises(NodeKeyUnusable, match="no public key"):
        keep_public(tmp_path, "studio2", "ssh-rsa AAAA")

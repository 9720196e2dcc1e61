import socket
import stat
from pathlib import Path

import pytest

from gateway.http.listen_and_tls import CannotListen, close_all, listen_tcp, listen_unix
from tests.support.scale import patient


def test_every_address_of_a_host_listens_on_one_port() -> None:
    sockets = listen_tcp("localhost", 0)
    try:
        ports = {one.getsockname()[1] for one in sockets}
        assert len(ports) == 1
        with socket.create_connection(("127.0.0.1", ports.pop()), timeout=patient(5)):
            pass
    finally:
        close_all(sockets)


def test_a_port_in_use_is_a_plain_sentence() -> None:
    taken = listen_tcp("127.0.0.1", 0)
    port = taken[0].getsockname()[1]
    try:
        with pytest.raises(CannotListen, match=f"port {port} on 127.0.0.1 is in use.*--port"):
            listen_tcp("127.0.0.1", port)
    finally:
        close_all(taken)


def test_an_address_of_another_machine_is_a_plain_sentence() -> None:
    with pytest.raises(CannotListen, match="not an address of this machine"):
        listen_tcp("192.0.2.1", 0)


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".example"])
def test_what_is_no_name_of_a_host_is_a_plain_sentence(host: str) -> None:
    with pytest.raises(CannotListen, match="is not a name of a host"):
        listen_tcp(host, 0)


def test_a_unix_socket_replaces_a_stale_file_and_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # pytest's own folders are too deep for a socket
    path = Path("admin.sock")
    path.touch()
    one = listen_unix(path)
    try:
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert path.stat().st_mode & 0o777 == 0o600
    finally:
        one.close()


def test_a_unix_socket_path_that_is_too_long_is_a_plain_sentence(tmp_path: Path) -> None:
    with pytest.raises(CannotListen, match="cannot listen on"):
        listen_unix(tmp_path / ("x" * 200))


def test_a_folder_where_a_unix_socket_should_be_is_a_plain_sentence(tmp_path: Path) -> None:
    with pytest.raises(CannotListen, match=f"cannot listen on {tmp_path}"):
        listen_unix(tmp_path)

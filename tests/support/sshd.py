"""A real sshd on a free port of this machine, with throwaway keys: another machine, as far as ssh can tell."""

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, Self

import psutil
import pytest

from tests.support.scale import patient

SSHD: Final = "/usr/sbin/sshd"
# Its destination for ssh.
FAR: Final = "far"
# A sshd of root separates its privileges in this empty folder, which its service makes at each start.
PRIVILEGES: Final = Path("/run/sshd")
ROOT: Final = Path(__file__).parents[2]


def _lack() -> str:
    """The reason why no sshd can be started here."""
    if not os.access(SSHD, os.X_OK) or shutil.which("ssh") is None:
        return f"there is no {SSHD}, or no ssh: apt-get install openssh-server"
    return ""


needs_sshd = pytest.mark.skipif(bool(_lack()), reason=_lack())


class Sshd:
    """`with Sshd(folder) as far`: a server whose keys and logs are in `folder`, and a client that knows it as `far`.

    The client is a program `ssh` in `bin`, for the start of `PATH`: it gives the real one a configuration.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known_hosts = folder / "known_hosts"
        self.authorized = folder / "authorized_keys"
        self.bin = folder / "bin"
        self.log = folder / "sshd.log"

    def __enter__(self) -> Self:
        for name in ("host", "user"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(self.folder / name)]
            subprocess.run(command, check=True)
        self.port = _free_port()
        self.admit()
        self.know()
        (self.folder / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {self.folder}/host\nPidFile none\n"
            f"AuthorizedKeysFile {self.authorized}\nStrictModes no\nUsePAM no\nPermitRootLogin prohibit-password\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        )
        (self.folder / "ssh_config").write_text(
            f"Host {FAR}\n  HostName 127.0.0.1\n  Port {self.port}\n  User {getpass.getuser()}\n"
            f"  IdentityFile {self.folder}/user\n  IdentitiesOnly yes\n  IdentityAgent none\n"
            f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile none\n  HashKnownHosts no\n"
        )
        if os.geteuid() == 0 and sys.platform == "linux":
            PRIVILEGES.mkdir(mode=0o755, exist_ok=True)
        self.bin.mkdir()
        client = self.bin / "ssh"
        client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/ssh_config "$@"\n')
        client.chmod(0o755)
        self.start()
        return self

    def __exit__(self, *details: object) -> None:
        for session in self.sessions():
            session.kill()
        self.stop()

    def start(self) -> None:
        """Listen, after `stop` too. Connections need a server that has not ended."""
        command = [SSHD, "-D", "-f", str(self.folder / "sshd_config"), "-E", str(self.log)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        end = time.monotonic() + patient(20)
        while not _listens(self.port):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def know(self) -> None:
        """The client knows its host key."""
        key = " ".join((self.folder / "host.pub").read_text().split()[:2])
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {key}\n")

    def admit(self) -> None:
        """It takes the user's key."""
        self.authorized.write_text((self.folder / "user.pub").read_text())

    def sessions(self) -> list[psutil.Process]:
        """Its processes for connections."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def ranks(self) -> list[psutil.Process]:
        """Ranks that were started over it and run, also those whose connection has ended."""
        return [process for process in psutil.process_iter() if str(self.folder) in _mark(process)]

    def envs(self) -> list[str]:
        """Variables of a host file by which its ranks find this checkout, and by which they are known here."""
        return [f"PYTHONPATH={ROOT}", f"MLXD_TEST_FAR={self.folder}"]


def _mark(process: psutil.Process) -> str:
    try:
        if "--over-ssh" not in process.cmdline() or process.status() == psutil.STATUS_ZOMBIE:
            return ""
        return process.environ().get("MLXD_TEST_FAR", "")
    except psutil.Error:
        return ""


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0

"""An authority of its own for TLS, and the certificates that it signs, as the files that mlxd reads."""

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from gateway.config.settings import TlsConfig

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates, and is trusted by the clients that have its context."""

    folder: Path
    ca: trustme.CA

    @classmethod
    def make(cls, folder: Path) -> "Authority":
        return cls(folder, trustme.CA())

    @property
    def config(self) -> TlsConfig:
        return TlsConfig(str(self.folder / "fullchain.pem"), str(self.folder / "key.pem"))

    @property
    def key(self) -> Path:
        return self.folder / "key.pem"

    @property
    def certificate(self) -> Path:
        return self.folder / "fullchain.pem"

    def issue(self, *, days: float = 30, starts: float = -1) -> bytes:
        """Write a new certificate and its key over those before. Returns the certificate (DER)."""
        now = datetime.now(UTC)
        issued = self.ca.issue_cert(
            HOST, "localhost", not_before=now + timedelta(days=starts), not_after=now + timedelta(days=days)
        )
        chain = [blob.bytes() for blob in issued.cert_chain_pems]
        self.certificate.write_bytes(b"".join(chain))
        self.key.write_bytes(issued.private_key_pem.bytes())
        self.key.chmod(0o600)
        return ssl.PEM_cert_to_DER_cert(chain[0].decode())

    def client(self) -> ssl.SSLContext:
        """The context of a client that trusts the authority."""
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        return context

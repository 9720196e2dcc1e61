"""TLS certificate and its key: they are read from PEM files, checked, and loaded into an SSL context."""

import ssl
import stat
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

ALPN: Final = ("http/1.1",)

# Tags of the DER encoding. https://www.rfc-editor.org/rfc/rfc5280#section-4.1
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_FORMATS: Final = {_UTC_TIME: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}


class CertificateUnusable(Exception):
    """The certificate or its key cannot be used; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A checked certificate: the SSL context for new connections, and the Unix time when it expires."""

    context: ssl.SSLContext
    expires: float


def load(certificate: Path, key: Path) -> Certificate:
    """Load both files, check that they belong together and that the certificate is valid now. Raises
    `CertificateUnusable`.
    """
    begins, expires = _validity(_read(certificate), certificate)
    _read(key)
    context = _context(certificate, key)
    now = time.time()
    if now >= expires:
        raise CertificateUnusable(f"the certificate in {certificate} expired on {date(expires)}")
    if now < begins:
        raise CertificateUnusable(f"the certificate in {certificate} is not valid before {date(begins)}")
    return Certificate(context, expires)


def is_exposed(key: Path) -> bool:
    """Whether every user of this machine may read the key."""
    try:
        return bool(key.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False


def date(at: float) -> str:
    """Format a time for people."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(ALPN)

    def password() -> str:
        # OpenSSL would prompt on the terminal without this callback.
        raise CertificateUnusable(f"the key in {key} is encrypted; mlxd needs it without a passphrase")

    try:
        context.load_cert_chain(certificate, key, password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise CertificateUnusable(f"the key in {key} is not that of the certificate in {certificate}") from None
        reason = f": {error.reason.replace('_', ' ').lower()}" if error.reason else ""
        raise CertificateUnusable(f"{certificate} and {key} hold no usable certificate and key (PEM){reason}") from None
    except OSError as error:
        raise CertificateUnusable(f"cannot read {certificate} or {key}: {error.strerror}") from None
    return context


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except UnicodeDecodeError:
        raise CertificateUnusable(f"{path} is no PEM file") from None
    except OSError as error:
        raise CertificateUnusable(f"cannot read {path}: {error.strerror}") from None


def _validity(pem: str, path: Path) -> tuple[float, float]:
    """Return when the first certificate of a file, which is the server's own, becomes valid and when it expires."""
    begin, end = pem.find(ssl.PEM_HEADER), pem.find(ssl.PEM_FOOTER)
    try:
        der = ssl.PEM_cert_to_DER_cert(pem[begin : end + len(ssl.PEM_FOOTER)] if 0 <= begin < end else "")
        # Certificate and TBSCertificate are sequences. The fields before the dates are the optional version,
        # serialNumber, signature and issuer.
        fields = _value(_value(der)[1])[1]
        for _ in range(4 if fields[0] == _VERSION else 3):
            fields = _value(fields)[2]
        times = _value(fields)[1]
        return _time(times), _time(_value(times)[2])
    except (ValueError, IndexError, KeyError):
        raise CertificateUnusable(f"{path} holds no certificate (PEM)") from None


def _value(der: bytes) -> tuple[int, bytes, bytes]:
    """Split off the first DER value: return its tag, its content, and the bytes after it."""
    tag, size, at = der[0], der[1], 2
    if size & 0x80:
        at += size & 0x7F
        size = int.from_bytes(der[2:at])
    if at + size > len(der):
        raise ValueError("truncated")
    return tag, der[at : at + size], der[at + size :]


def _time(der: bytes) -> float:
    tag, text, _ = _value(der)
    at = datetime.strptime(text.decode("ascii"), _FORMATS[tag]).replace(tzinfo=UTC)
    # RFC 5280 reads two-digit years as 1950 to 2049, Python as 1969 to 2068.
    if tag == _UTC_TIME and at.year >= 2050:
        at = at.replace(year=at.year - 100)
    return at.timestamp()

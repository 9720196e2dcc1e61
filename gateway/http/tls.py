"""TLS of the public listener: the certificate in force, which is replaced when its files have changed."""

import asyncio
import logging
import os
import ssl
from pathlib import Path
from typing import Final

from gateway.config.certificate import Certificate, CertificateUnusable, date, is_exposed, load
from gateway.config.settings import TlsConfig
from gateway.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

# Between two looks at the files.
LOOK_S: Final = 60.0

# What tells that a file is another one: device, inode, size and time of its change.
Stamp = tuple[int, int, int, int] | None


class Tls:
    """The certificate that new connections get. Connections keep the one that they began with."""

    def __init__(self, config: TlsConfig, metrics: Metrics) -> None:
        """Raises `CertificateUnusable`."""
        self._certificate_path = Path(config.certificate)
        self._key_path = Path(config.key)
        self._metrics = metrics
        self._lock = asyncio.Lock()
        self._stamps = self._look()
        self._certificate = self._load()
        metrics.certificate_expiry = lambda: self._certificate.expires

    @property
    def context(self) -> ssl.SSLContext:
        """For one new connection."""
        return self._certificate.context

    async def run(self) -> None:
        """Look at the files again and again."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Put files that have changed into force. Bad ones change nothing: they are logged and counted, once."""
        async with self._lock:
            # Noted before the files are read: what changes meanwhile is seen at the next look.
            stamps = await asyncio.to_thread(self._look)
            if stamps == self._stamps:
                return
            self._stamps = stamps
            try:
                self._certificate = await asyncio.to_thread(self._load)
            except CertificateUnusable as error:
                self._metrics.certificate_loads["failed"] += 1
                log.error("TLS certificate not reloaded, the previous one stays in force: %s", error)
            else:
                self._metrics.certificate_loads["ok"] += 1
                log.info(
                    "TLS certificate reloaded for new connections, valid until %s", date(self._certificate.expires)
                )

    def _load(self) -> Certificate:
        certificate = load(self._certificate_path, self._key_path)
        if is_exposed(self._key_path):
            log.warning("TLS key is readable by every user of this machine: chmod 600 %s", self._key_path)
        return certificate

    def _look(self) -> tuple[Stamp, Stamp]:
        return _stamp(self._certificate_path), _stamp(self._key_path)


def _stamp(path: Path) -> Stamp:
    try:
        # Through links: renewing a certificate often changes only where one leads.
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns

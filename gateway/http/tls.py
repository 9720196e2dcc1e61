"""TLS of the public listener. The certificate is reloaded when its files change."""

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

CHECK_INTERVAL_S: Final = 60.0

# Device, inode, size and modification time of a file, which identify its version.
Stamp = tuple[int, int, int, int] | None


class Tls:
    """Certificate for new connections. Open connections keep the certificate with which they began."""

    def __init__(self, config: TlsConfig, metrics: Metrics) -> None:
        """Load the certificate. Raises `CertificateUnusable`."""
        self._certificate_path = Path(config.certificate)
        self._key_path = Path(config.key)
        self._metrics = metrics
        self._lock = asyncio.Lock()
        self._stamps = self._current_stamps()
        self._certificate = self._load()
        metrics.certificate_expiry = lambda: self._certificate.expires

    @property
    def context(self) -> ssl.SSLContext:
        """TLS context for one new connection."""
        return self._certificate.context

    async def run(self) -> None:
        """Check the files periodically, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Load the files if they have changed. If they are unusable, the old certificate stays, and this is logged
        once.
        """
        async with self._lock:
            # Stamps are taken before the files are read, so that the next check finds a change made in between.
            stamps = await asyncio.to_thread(self._current_stamps)
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

    def _current_stamps(self) -> tuple[Stamp, Stamp]:
        return _stamp(self._certificate_path), _stamp(self._key_path)


def _stamp(path: Path) -> Stamp:
    try:
        # Links are followed, because renewing a certificate often changes only the target of a link.
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns

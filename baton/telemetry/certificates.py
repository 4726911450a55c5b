"""When the certificates that a process shows expire, as a metric."""

from __future__ import annotations

import logging

from prometheus_client import Gauge

from baton.security.expiry import expires_at
from baton.security.tls import TlsFiles

log = logging.getLogger(__name__)


class CertificateExpiry:
    """Reads the certificates' files for each page, since processes use renewed files at once."""

    def __init__(self, gauge: Gauge, process: str, *sides: TlsFiles | None) -> None:
        """``process`` is a label. Each of ``sides`` may show a certificate; None has no TLS."""
        self._gauge = gauge
        self._process = process
        self._files = {one.certificate for one in sides if one is not None and one.certificate}

    def look(self) -> None:
        """Set the metric. A file that cannot be read leaves the last value."""
        for path in self._files:
            try:
                self._gauge.labels(self._process, path.name).set(expires_at(path))
            except (OSError, ValueError) as error:
                log.warning("cannot read when a certificate expires: %s", error)

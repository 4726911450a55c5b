"""The metric of certificates follows their files."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from baton.security.expiry import expires_at
from baton.security.tls import TlsFiles
from baton.telemetry.certificates import CertificateExpiry
from baton.telemetry.series import certificate_expiry
from deploy import certificates


def value(registry: CollectorRegistry, file: str) -> float | None:
    name = "baton_certificate_expiry_timestamp_seconds"
    return registry.get_sample_value(name, {"process": "decode-0", "file": file})


def test_a_renewed_certificate_shows_at_the_next_page(tmp_path: Path) -> None:
    certificates.init(tmp_path, cluster="blue", days=1, authority_days=9)
    registry = CollectorRegistry()
    files = TlsFiles.in_folder(tmp_path, "worker")
    assert files.certificate is not None
    expiry = CertificateExpiry(certificate_expiry(registry), "decode-0", files, None, files)
    expiry.look()
    first = value(registry, "worker.pem")
    assert first == expires_at(files.certificate)
    certificates.renew(tmp_path, ("worker",), days=3)
    expiry.look()
    renewed = value(registry, "worker.pem")
    assert renewed is not None
    assert renewed > first
    files.certificate.unlink()
    expiry.look()
    assert value(registry, "worker.pem") == renewed


def test_no_series_without_tls() -> None:
    registry = CollectorRegistry()
    CertificateExpiry(certificate_expiry(registry), "decode-0", None, TlsFiles()).look()
    assert [one for family in registry.collect() for one in family.samples] == []

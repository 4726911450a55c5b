"""When certificates end, as `cryptography` says it."""

from __future__ import annotations

import base64
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from baton.security.expiry import expires_at

EC = ec.generate_private_key(ec.SECP256R1())


def pem(
    end: datetime, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey = EC, name: str = "n"
) -> bytes:
    named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    built = (
        x509.CertificateBuilder()
        .subject_name(named)
        .issuer_name(named)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(1990, 1, 1, tzinfo=UTC))
        .not_valid_after(end)
        .sign(key, hashes.SHA256())
    )
    return built.public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    "end",
    [
        datetime(1999, 12, 31, 23, 59, 59, tzinfo=UTC),
        datetime(2027, 2, 28, 1, 2, 3, tzinfo=UTC),
        datetime(2049, 12, 31, 23, 59, 59, tzinfo=UTC),
        datetime(2050, 1, 1, tzinfo=UTC),
        datetime(2123, 4, 5, 6, 7, 8, tzinfo=UTC),
    ],
)
def test_the_end_of_a_certificate(tmp_path: Path, end: datetime) -> None:
    file = tmp_path / "a.pem"
    file.write_bytes(pem(end))
    assert expires_at(file) == end.timestamp()


def test_large_certificates(tmp_path: Path) -> None:
    end = datetime(2030, 1, 1, tzinfo=UTC)
    file = tmp_path / "a.pem"
    for name in ("n" * 60, "é" * 30):
        file.write_bytes(pem(end, rsa.generate_private_key(65537, 2048), name))
        assert expires_at(file) == end.timestamp()


def test_the_first_of_a_chain_counts(tmp_path: Path) -> None:
    end = datetime(2030, 1, 1, tzinfo=UTC)
    file = tmp_path / "chain.pem"
    file.write_bytes(b"subject=\xff\n" + pem(end) + pem(end + timedelta(9)))
    assert expires_at(file) == end.timestamp()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no certificate",
        "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\n!!\n-----END CERTIFICATE-----\n",
        "-----BEGIN CERTIFICATE-----\nMAMCAQE=\n-----END CERTIFICATE-----\n",
        "-----END CERTIFICATE----- -----BEGIN CERTIFICATE-----",
    ],
)
def test_what_is_no_certificate(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.pem"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"a\.pem has no"):
        expires_at(file)


def test_a_certificate_that_is_cut_off(tmp_path: Path) -> None:
    whole = ssl.PEM_cert_to_DER_cert(pem(datetime(2030, 1, 1, tzinfo=UTC)).decode())
    file = tmp_path / "a.pem"
    for length in range(1, 90):
        body = base64.b64encode(whole[:length]).decode()
        file.write_text(f"-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n")
        with pytest.raises(ValueError, match="no valid certificate"):
            expires_at(file)

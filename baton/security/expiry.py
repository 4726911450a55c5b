"""The end of a certificate's validity, read without a library that parses certificates.

Such a library comes with the extra ``tls`` alone, and certificates may be made elsewhere.
"""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path

_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


def expires_at(certificate: Path) -> float:
    """Return when the first certificate of a PEM file ends, in Unix seconds.

    Raises OSError if the file cannot be read, and ValueError if it has no certificate.
    """
    text = certificate.read_text(encoding="ascii", errors="replace")
    begin, end = text.find(_BEGIN), text.find(_END)
    if begin < 0 or end < begin:
        raise ValueError(f"{certificate} has no certificate in PEM")
    try:
        return _not_after(ssl.PEM_cert_to_DER_cert(text[begin : end + len(_END)]))
    except (IndexError, ValueError) as error:
        raise ValueError(f"{certificate} has no valid certificate: {error}") from error


def _not_after(der: bytes) -> float:
    """Walk to the field ``notAfter`` (RFC 5280, 4.1). Raises IndexError and ValueError."""
    _, certificate, _ = _element(der)
    _, body, _ = _element(certificate)
    tag, _, after = _element(body)
    # Serial number, algorithm and issuer precede the validity; so does a version, from v2 on.
    for _ in range(3 if tag == _VERSION else 2):
        _, _, after = _element(after)
    tag, validity, _ = _element(after)
    if tag != _SEQUENCE:
        raise ValueError("no validity where it should be")
    _, _, after = _element(validity)
    tag, value, _ = _element(after)
    text = value.decode("ascii")
    if tag == _UTC_TIME:
        # Two digits of the year: 50 and more are of the last century.
        text = f"{'19' if text[:2] >= '50' else '20'}{text}"
    elif tag != _GENERALIZED_TIME:
        raise ValueError("no time where it should be")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _element(der: bytes) -> tuple[int, bytes, bytes]:
    """Return the tag and value of the first DER element, and the bytes after it."""
    length, begin = der[1], 2
    if length & 0x80:
        begin += length & 0x7F
        length = int.from_bytes(der[2:begin])
    return der[0], der[begin : begin + length], der[begin + length :]

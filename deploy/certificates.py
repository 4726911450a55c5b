"""A cluster's own CA, and the certificates that it signs, in one folder.

    ca.pem, ca.key             the CA; its key is needed only for signing
    router.pem, router.key     the listeners' certificate, which routers also show workers;
    worker.pem, worker.key     what workers show routers and each other;
    supervisor.pem, .key       what the launcher and the supervisor show;
    redis.pem, redis.key       for a Redis or Valkey server;
    client.pem, client.key     for clients of the API, if it requires certificates
    monitor.pem, monitor.key   for Prometheus, which reads the workers' metrics

Each certificate has its role among its names, which peers check: see ``baton/security/tls.py``.
Only the owner can read the keys.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.errors import ConfigError
from baton.security.tls import AUTHORITY_FILE, ROLES, PeerRole, role_name, roles_in

CERTIFICATE_DAYS, AUTHORITY_DAYS = 365, 3650
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_AUTHORITY = "ca"
_SERVES: frozenset[PeerRole] = frozenset({"router", "worker", "supervisor", "redis"})
_CALLS: frozenset[PeerRole] = frozenset({"router", "worker", "supervisor", "client", "monitor"})
_ROLE_DOMAIN = role_name("worker").partition(".")[2]
_EARLY = timedelta(minutes=5)
"""New certificates are valid from this long before their creation, since clocks of other machines
may be slow."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class Shown:
    """A certificate's facts, as `baton certs show` displays them."""

    name: str
    """Name of the certificate's file, without .pem."""
    roles: tuple[str, ...]
    names: tuple[str, ...]
    """Hosts and addresses for which the certificate is valid."""
    expires: datetime
    has_key: bool
    fault: str = ""
    """Why the certificate is unusable; empty if it is usable."""


def init(
    folder: Path,
    hosts: Iterable[str] = (),
    *,
    cluster: str = "baton",
    days: int = CERTIFICATE_DAYS,
    authority_days: int = AUTHORITY_DAYS,
    now: datetime | None = None,
) -> None:
    """Make a CA and a certificate of each role. ``hosts`` has further host names and addresses of
    the cluster's machines, for which the certificates are valid.

    The names of the loopback interface and of this machine are always included. Raises ConfigError,
    without changes, if the folder already has a CA or a certificate.
    """
    now = now or datetime.now(UTC)
    names = _checked_hosts([*LOOPBACK_NAMES, *_own_name(), *hosts])
    if found := [path for path in _files(folder, (_AUTHORITY, *ROLES)) if path.exists()]:
        raise ConfigError(
            f"{found[0]} exists already: `baton certs renew` makes new certificates of the same "
            "CA; for another CA choose an empty folder"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject(f"{cluster} authority", cluster)
    end = now + timedelta(days=authority_days)
    usage = _key_usage(signs_certificates=True)
    certificate = (
        _builder(subject, subject, key.public_key(), now, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_pair(folder, _AUTHORITY, key, certificate)
    for role in ROLES:
        issue(folder, role, role, names if role in _SERVES else (), days=days, now=now)


def issue(
    folder: Path,
    name: str,
    role: PeerRole,
    hosts: Iterable[str] = (),
    *,
    days: int = CERTIFICATE_DAYS,
    now: datetime | None = None,
) -> Path:
    """Sign a certificate with a new key. Write it to ``name``.pem and the key to ``name``.key.
    Return the path of the certificate.

    An old certificate of that name is replaced. Raises ConfigError if the CA's key is not there.
    """
    if not _NAME.fullmatch(name) or name == _AUTHORITY:
        raise ConfigError(
            f"{name!r} is not a valid name for a certificate: use letters, digits, - and _"
        )
    now = now or datetime.now(UTC)
    authority, signer = _authority(folder)
    if authority.not_valid_after_utc <= now:
        raise ConfigError(
            f"the CA of {folder} expired on {authority.not_valid_after_utc:%Y-%m-%d}: make "
            "another with `baton certs init` in an empty folder, and give its ca.pem to all "
            "clients"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    names = [x509.DNSName(role_name(role)), *map(_general_name, _checked_hosts(hosts))]
    cluster = _common(authority.subject, NameOID.ORGANIZATION_NAME)
    # A certificate that outlives its CA would be rejected later without a clear reason.
    end = min(now + timedelta(days=days), authority.not_valid_after_utc)
    own = x509.SubjectKeyIdentifier.from_public_key(signer.public_key())
    certificate = (
        _builder(_subject(name, cluster), authority.subject, key.public_key(), now, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(_purposes(role)), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own), critical=False
        )
        .sign(signer, hashes.SHA256())
    )
    _write_pair(folder, name, key, certificate)
    return folder / f"{name}.pem"


def renew(
    folder: Path,
    names: Sequence[str] = (),
    hosts: Iterable[str] = (),
    *,
    days: int = CERTIFICATE_DAYS,
    now: datetime | None = None,
) -> list[str]:
    """Replace the certificates in ``names``, or all of them if it is empty. The new ones are valid
    for the same hosts and for ``hosts``.

    Returns the names of the certificates. Servers that run load them without a restart. Raises
    ConfigError.
    """
    _authority(folder)
    wanted = list(names) or [name for name in certificate_names(folder) if name != _AUTHORITY]
    if not wanted:
        raise ConfigError(f"{folder} has no certificates: `baton certs init {folder}` makes them")
    olds = {name: _read_certificate(folder / f"{name}.pem") for name in wanted}
    more = _checked_hosts(hosts)
    for name, old in olds.items():
        roles = sorted(roles_in(_names(old)))
        if not roles:
            raise ConfigError(
                f"{folder / name}.pem was not made by `baton certs`: it names no role"
            )
        kept = [host for host in _names(old) if not roles_in([host])]
        # A role that only calls others has no hosts.
        added = more if set(roles) & _SERVES else ()
        issue(folder, name, roles[0], dict.fromkeys([*kept, *added]), days=days, now=now)
    return wanted


def show(folder: Path, now: datetime | None = None) -> list[Shown]:
    """List the folder's certificates, the CA first. Raises ConfigError if there are none."""
    now = now or datetime.now(UTC)
    names = certificate_names(folder)
    if not names:
        raise ConfigError(f"{folder} has no certificates: `baton certs init {folder}` makes them")
    authority = _read_certificate(folder / AUTHORITY_FILE) if _AUTHORITY in names else None
    return [_shown(folder, name, authority, now) for name in names]


def certificate_names(folder: Path) -> list[str]:
    """List the names of the certificates in a folder, the CA first."""
    found = sorted(path.stem for path in folder.glob("*.pem"))
    return sorted(found, key=lambda name: (name != _AUTHORITY, name))


def _shown(folder: Path, name: str, authority: x509.Certificate | None, now: datetime) -> Shown:
    certificate = _read_certificate(folder / f"{name}.pem")
    names = _names(certificate)
    return Shown(
        name=name,
        roles=("authority",) if name == _AUTHORITY else tuple(sorted(roles_in(names))),
        names=tuple(host for host in names if not roles_in([host])),
        expires=certificate.not_valid_after_utc,
        has_key=(folder / f"{name}.key").exists(),
        fault=_fault(certificate, authority, now),
    )


def _fault(certificate: x509.Certificate, authority: x509.Certificate | None, now: datetime) -> str:
    if certificate.not_valid_after_utc <= now:
        return "expired"
    if certificate.not_valid_before_utc > now:
        return "not valid yet"
    if authority is None:
        return "there is no ca.pem"
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return "not signed by this CA"
    return ""


# Files


def _files(folder: Path, names: Iterable[str]) -> list[Path]:
    return [folder / f"{name}{end}" for name in names for end in (".pem", ".key")]


def _write_pair(
    folder: Path, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate
) -> None:
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    try:
        _write(folder / f"{name}.key", private, 0o600)
        _write(folder / f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from error


def _write(path: Path, data: bytes, mode: int) -> None:
    """Replace the contents of the file ``path``. Readers see either the old or the new contents."""
    fresh = path.with_name(f".{path.name}.new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)
        file.write(data)
    fresh.replace(path)


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    certificate = _read_certificate(folder / AUTHORITY_FILE)
    path = folder / f"{_AUTHORITY}.key"
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): certificates are signed where the CA's "
            "key is kept"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a PEM key: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} is not a key of `baton certs init`")
    return certificate, key


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); `baton certs init` makes a cluster's"
            " certificates"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a PEM certificate: {error}") from error


# Contents of certificates


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime,
    end: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(end)
    )


def _subject(common: str, cluster: str) -> x509.Name:
    try:
        return x509.Name(
            [
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, cluster),
                x509.NameAttribute(NameOID.COMMON_NAME, common),
            ]
        )
    except ValueError as error:
        raise ConfigError(f"{cluster!r} is not a valid name for a cluster: {error}") from error


def _common(name: x509.Name, kind: x509.ObjectIdentifier) -> str:
    found = name.get_attributes_for_oid(kind)
    return str(found[0].value) if found else "baton"


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _purposes(role: PeerRole) -> list[x509.ObjectIdentifier]:
    purposes = []
    if role in _SERVES:
        purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
    if role in _CALLS:
        purposes.append(ExtendedKeyUsageOID.CLIENT_AUTH)
    return purposes


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in found.value]


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _checked_hosts(hosts: Iterable[str]) -> list[str]:
    """Return the hosts without repetitions. Raises ConfigError if a host is invalid."""
    found: dict[str, None] = {}
    for host in hosts:
        try:
            found[str(ipaddress.ip_address(host.strip("[]")))] = None
            continue
        except ValueError:
            pass
        if not _HOST.fullmatch(host):
            raise ConfigError(f"{host!r} is not a host name or an address without a port")
        if host.lower().endswith(_ROLE_DOMAIN):
            raise ConfigError(f"{host}: names under {_ROLE_DOMAIN} are reserved for roles")
        found[host.lower()] = None
    return list(found)


def _own_name() -> list[str]:
    name = socket.gethostname()
    return [name] if _HOST.fullmatch(name) else []

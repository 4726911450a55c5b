"""TLS: what a side shows, whom it trusts, and the names of roles in a cluster's certificates.

Files are PEM. Servers read theirs again once they have been renewed; connections that are open stay
as they are. A client reads its own when it connects.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from baton.errors import ConfigError

log = logging.getLogger(__name__)

PeerRole = Literal["router", "worker", "supervisor", "client", "monitor", "redis"]
ROLES: tuple[PeerRole, ...] = get_args(PeerRole)
AUTHORITY_FILE = "ca.pem"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """One side's files. A certificate and its key go together."""

    certificate: Path | None = None
    """What it shows, with intermediate certificates behind it. A server must have one."""
    key: Path | None = None
    authority: Path | None = None
    """Whose certificates it trusts. Without one a client trusts what the system does, and a server
    asks its clients for none."""

    @classmethod
    def in_folder(cls, folder: Path, role: PeerRole) -> TlsFiles:
        """Those of a role, under the names that `baton certs init` gives them."""
        return cls(folder / f"{role}.pem", folder / f"{role}.key", folder / AUTHORITY_FILE)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Those that there are."""
        return tuple(path for path in (self.certificate, self.key, self.authority) if path)

    def check(self) -> None:
        """Raises ConfigError where a file cannot be read, or key and certificate do not match."""
        client_context(self)


def role_name(role: PeerRole) -> str:
    """What a certificate of the role has among its names, whatever its host is called."""
    return f"{role}.baton.internal"


def roles_in(names: Iterable[str]) -> frozenset[PeerRole]:
    """The roles among a certificate's names."""
    known = {role_name(role): role for role in ROLES}
    return frozenset(known[name] for name in names if name in known)


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """For a client's connections; the server's name is checked. Raises ConfigError."""
    with _clear_errors(files):
        context = ssl.create_default_context(cafile=files.authority)
        _show(context, files)
    return context


def pinned_context(certificate: Path, files: TlsFiles) -> ssl.SSLContext:
    """As ``client_context``, for a server on this machine whose ``certificate`` is known: that one

    is trusted, whatever host it names. Raises ConfigError.
    """
    context = client_context(replace(files, authority=certificate))
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """For a server's connections; with an authority, clients must show a certificate of it.

    Raises ConfigError.
    """
    with _clear_errors(files):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _show(context, files)
        if files.authority is not None:
            context.load_verify_locations(files.authority)
            context.verify_mode = ssl.CERT_REQUIRED
    return context


class Renewal:
    """Tells when files have been replaced. Used by one thread at a time."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._seen = self._look()

    def came(self) -> bool:
        """Whether they changed since the last time that was said, and fit together by now.

        A key and its certificate are replaced one after the other: until both are there nothing
        has happened.
        """
        now = self._look()
        if now == self._seen:
            return False
        try:
            self._files.check()
        except ConfigError as error:
            log.warning("renewed certificates are not used: %s", error.message)
            return False
        self._seen = now
        return True

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(map(_state, self._files.paths))


class LiveContext:
    """A context whose new connections have what the files hold now."""

    def __init__(self, context: ssl.SSLContext, files: TlsFiles) -> None:
        """``context`` was made of ``files``."""
        self._context = context
        self._files = files
        self._renewal = Renewal(files)

    def get(self) -> ssl.SSLContext:
        """Always the same one; looks at the files."""
        if self._renewal.came():
            try:
                _show(self._context, self._files)
                if self._files.authority is not None:
                    # Beside the old one, which is trusted until this process ends.
                    self._context.load_verify_locations(self._files.authority)
            except OSError as error:  # replaced once more, after it was looked at
                log.warning("renewed certificates are not used: %s", error)
            else:
                log.info("%s is in use", self._files.certificate)
        return self._context


def _show(context: ssl.SSLContext, files: TlsFiles) -> None:
    if files.certificate is not None:
        context.load_cert_chain(files.certificate, files.key)


def _state(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_ino, found.st_mtime_ns, found.st_size


@contextlib.contextmanager
def _clear_errors(files: TlsFiles) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # ssl.SSLError is one
        names = ", ".join(map(str, files.paths))
        raise ConfigError(f"TLS with {names}: {_why(error, files)}") from error


def _why(error: OSError, files: TlsFiles) -> str:
    for path in files.paths:
        try:
            path.read_bytes()
        except OSError as unreadable:
            return f"{path} cannot be read ({unreadable.strerror})"
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return f"{files.key} is not the key of {files.certificate}"
    return f"no PEM files as they should be ({error})"

"""TLS files of one side of a connection, and the role names in a cluster's certificates.

Files are PEM. Servers read theirs again after a renewal; open connections do not change. A client
reads its files when it connects.
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
    """The TLS files of one side. A certificate and its key go together."""

    certificate: Path | None = None
    """Path of the certificate that this side shows, followed by intermediate certificates. A server
    must have one."""
    key: Path | None = None
    authority: Path | None = None
    """CA whose certificates are trusted. Without one, a client trusts the system's CAs, and a
    server requires no client certificates."""

    @classmethod
    def in_folder(cls, folder: Path, role: PeerRole) -> TlsFiles:
        """Return the files of a role, under the names that `baton certs init` gives them."""
        return cls(folder / f"{role}.pem", folder / f"{role}.key", folder / AUTHORITY_FILE)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Return the paths of the TLS files that are set."""
        return tuple(path for path in (self.certificate, self.key, self.authority) if path)

    def check(self) -> None:
        """Check the files.

        Raises ConfigError if one cannot be read, or key and certificate do not match.
        """
        client_context(self)


def role_name(role: PeerRole) -> str:
    """Return the name of the role in certificates, which does not depend on the host."""
    return f"{role}.baton.internal"


def roles_in(names: Iterable[str]) -> frozenset[PeerRole]:
    """Return the roles among a certificate's names."""
    known = {role_name(role): role for role in ROLES}
    return frozenset(known[name] for name in names if name in known)


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context for a client's connections; the server's name is checked.

    Raises ConfigError.
    """
    with _clear_errors(files):
        context = ssl.create_default_context(cafile=files.authority)
        _show(context, files)
    return context


def pinned_context(certificate: Path, files: TlsFiles) -> ssl.SSLContext:
    """Return a client context for a server on this machine whose ``certificate`` is known.

    That certificate is trusted, whatever host it names. Raises ConfigError.
    """
    context = client_context(replace(files, authority=certificate))
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context for a server's connections. With a CA, clients must show a certificate of
    it.

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
    """Detects that TLS files have been replaced. Used by one thread at a time."""

    def __init__(self, files: TlsFiles) -> None:
        self.problem = ""
        """Why the files that are there now cannot be used; empty if they can."""
        self._files = files
        self._seen = self._look()

    def came(self) -> bool:
        """Return whether the files have changed since the last call that returned true, and match
        each other.

        A key and its certificate are replaced one after the other. No change is reported until both
        are there.
        """
        now = self._look()
        if now == self._seen:
            self.problem = ""
            return False
        try:
            self._files.check()
        except ConfigError as error:
            # The owner asks again and again.
            if error.message != self.problem:
                log.warning("cannot use renewed certificates: %s", error.message)
            self.problem = error.message
            return False
        self._seen, self.problem = now, ""
        return True

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(map(_state, self._files.paths))


class LiveContext:
    """A TLS context that uses the current contents of the files for new connections."""

    def __init__(self, context: ssl.SSLContext, files: TlsFiles) -> None:
        """Keep ``context``, which was made from ``files``, up to date with them."""
        self._context = context
        self._files = files
        self._renewal = Renewal(files)

    def get(self) -> ssl.SSLContext:
        """Read files that have changed, then return the TLS context, which is always the same
        object."""
        if self._renewal.came():
            try:
                _show(self._context, self._files)
                if self._files.authority is not None:
                    # The new CA is added to the old one, which is trusted until this process ends.
                    self._context.load_verify_locations(self._files.authority)
            except OSError as error:  # the file was replaced once more since it was checked
                log.warning("cannot use renewed certificates: %s", error)
            else:
                log.info("%s is in use now", self._files.certificate)
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
    except OSError as error:  # ssl.SSLError is a subclass
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
    return f"not valid PEM files ({error})"

"""API keys: finds callers by the hash of their key, and reloads the file of keys.

loaded ─the file changes→ reading ─it is valid→ loaded reading ─it is not→ loaded as before, logged
and counted
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import datetime
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.config.access import KeyConfig
from baton.config.choices import DEFAULT_TENANT
from baton.config.keys_file import read_keys
from baton.errors import ConfigError, InvalidRequest, Unauthenticated
from baton.request import Principal
from baton.telemetry.logs import ErrorRow
from baton.telemetry.metrics import RouterMetrics
from router.access.audit import note_keys
from router.access.visit import Visit

log = logging.getLogger(__name__)

KEY_FILE_POLL_S = 1.0
"""Seconds between two checks whether the file of API keys has changed. A revoked key works for at
most this long."""
_Mark = tuple[int, int, int, int]
_BEARER, _BASIC = "bearer ", "basic "
_CREDENTIALS = frozenset({"authorization", "x-api-key"})


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: its principal, and the configuration of its API key, if it has
    one."""

    principal: Principal
    key: KeyConfig | None = None
    visit: Visit | None = None
    """The record of the request while it counts against the limits of its API key; None if no limit
    applies."""

    @property
    def priority(self) -> int:
        """Priority of the caller's requests that set none themselves."""
        return 0 if self.key is None else self.key.priority


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class ApiKeys:
    """Finds callers by their API keys. Only a hash of each key is stored. It needs no salt, since
    keys are random."""

    def __init__(
        self,
        keys: Sequence[KeyConfig],
        *,
        required: bool,
        now: Callable[[], datetime.datetime] = _now,
    ) -> None:
        # The lookup uses a hash of the hash, keyed with a secret of this process. A client cannot
        # choose where the search goes, so its time reveals nothing about any key.
        self._secret = secrets.token_bytes(32)
        self._known = {
            self._blinded(bytes.fromhex(key.sha256)): (key.sha256, _caller(key))
            for key in keys
            if key.sha256
        }
        self._by_name = {key.name: key for key in keys}
        anonymous = Caller(Principal(tenant=DEFAULT_TENANT))
        self._unknown = next((_caller(key) for key in keys if not key.sha256), anonymous)
        self._required = required
        self._now = now

    def caller(self, authorization: str) -> Caller:
        """Return the caller of an Authorization header ("" if none was sent).

        Raises Unauthenticated if an API key is required and the header has no known key."""
        found = self._found(_shown(authorization))
        if found is None and self._required:
            raise Unauthenticated(
                "a known API key that has not expired is required: send Authorization: Bearer KEY"
            )
        return found or self._unknown

    def all(self) -> Sequence[KeyConfig]:
        """Return the configuration of every API key, even of expired ones."""
        return tuple(self._by_name.values())

    def named(self, name: str) -> KeyConfig | None:
        """Return the API key with this public name; None if no such key exists or the key has
        expired."""
        key = self._by_name.get(name)
        return None if key is None or self._has_expired(key) else key

    def _found(self, shown: str) -> Caller | None:
        digest = hashlib.sha256(shown.encode(errors="surrogatepass")).digest()
        known, caller = self._known.get(self._blinded(digest), ("", None))
        if caller is None or not hmac.compare_digest(known, digest.hex()):
            return None
        assert caller.key is not None
        return None if self._has_expired(caller.key) else caller

    def _has_expired(self, key: KeyConfig) -> bool:
        return key.expires_at is not None and self._now() >= key.expires_at

    def _blinded(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, digest_size=16, key=self._secret).digest()


def authorization_of(headers: Mapping[str, str]) -> str:
    """Return the Authorization header. If there is none, return the header ``x-api-key``, which
    Anthropic's clients send."""
    given = headers.get("authorization", "")
    if not given and (key := headers.get("x-api-key", "")):
        return f"Bearer {key}"
    return given


def check_one_credential(headers: Iterable[tuple[str, str]]) -> None:
    """Check that headers, with names in lower case, have at most one credential.

    If there were two, a proxy in front of the router might check one and the router the other.
    Raises InvalidRequest.
    """
    given = [(name, value) for name, value in headers if value and name in _CREDENTIALS]
    if len(given) < 2:
        return
    names = {name for name, _ in given}
    shown = {_shown(value) if name == "authorization" else value for name, value in given}
    if len(names) < len(given) or len(shown) > 1:
        raise InvalidRequest(
            "the request has more than one credential: send one Authorization or x-api-key header"
        )


def _shown(authorization: str) -> str:
    """Return the API key in an Authorization header. Browsers send it as the password of basic
    authentication.
    """
    scheme = authorization.lower()
    if scheme.startswith(_BEARER):
        return authorization[len(_BEARER) :].strip()
    if scheme.startswith(_BASIC):
        try:
            pair = base64.b64decode(authorization[len(_BASIC) :].strip(), validate=True)
            return pair.decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return ""
    return ""


def _caller(key: KeyConfig) -> Caller:
    return Caller(Principal(tenant=key.tenant, key_id=key.name), key)


class KeyWatch:
    """Reloads the file of API keys when it changes. Owned by the router's event loop; a thread
    reads the file."""

    def __init__(
        self,
        path: Path,
        taken: Sequence[KeyConfig],
        set_keys: Callable[[Sequence[KeyConfig]], None],
        metrics: RouterMetrics,
    ) -> None:
        """Create a watch. It calls ``set_keys`` with the API keys in the file.

        ``taken``: the API keys of the configuration. The file must not repeat their names or
        hashes."""
        self._path = path
        self._names = {key.name for key in taken}
        self._hashes = {key.sha256 for key in taken}
        self._set_keys = set_keys
        self._metrics = metrics
        self._mark: _Mark | None = None
        self._keys: tuple[KeyConfig, ...] = ()

    async def begin(self) -> None:
        """Read the API keys from the file for the first time. Raises ConfigError."""
        self._mark, keys = await asyncio.to_thread(self._read)
        self._take(keys)

    async def run(self) -> None:
        """Reload the file of API keys whenever it changes, until cancelled."""
        # An error must not stop this loop: revoked keys would stay valid.
        errors = ErrorRow(log, "the look at the file of API keys failed")
        while True:
            await asyncio.sleep(KEY_FILE_POLL_S)
            with errors.caught():
                await self.poll()

    async def poll(self) -> None:
        """Reload the file of API keys if it has changed."""
        mark = await asyncio.to_thread(_mark_of, self._path)
        if mark == self._mark:
            return
        try:
            self._mark, keys = await asyncio.to_thread(self._read)
        except ConfigError as error:
            self._mark = mark
            self._metrics.key_file_failures.inc()
            log.error(
                "the file of API keys cannot be used, the previous keys stay valid: %s",
                error.message,
            )
            return
        note_keys(str(self._path), self._keys, keys)
        self._take(keys)
        log.info("read %d API keys from %s", len(keys), self._path)

    def _take(self, keys: tuple[KeyConfig, ...]) -> None:
        self._keys = keys
        self._set_keys(keys)

    def _read(self) -> tuple[_Mark | None, tuple[KeyConfig, ...]]:
        # Take the mark first, so that a change during the read causes another read.
        mark, keys = _mark_of(self._path), read_keys(self._path)
        for key in keys:
            if key.name in self._names or key.sha256 in self._hashes:
                raise ConfigError(f"{self._path}: the configuration already has the key {key.name}")
        return mark, keys


def _mark_of(path: Path) -> _Mark | None:
    """Return values that differ whenever the file at ``path`` has changed; None if there is no
    file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode

"""Who asks: API keys as the configuration knows them, by their hash."""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from baton.config.access import KeyConfig
from baton.config.choices import DEFAULT_TENANT
from baton.errors import Unauthenticated
from baton.request import Principal

_BEARER, _BASIC = "bearer ", "basic "


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a request runs, and the entry of its key, if any applies."""

    principal: Principal
    key: KeyConfig | None = None

    @property
    def priority(self) -> int:
        """Of requests that give none."""
        return 0 if self.key is None else self.key.priority


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class ApiKeys:
    """Keys are drawn at random by whoever makes them, so that a plain hash is enough at rest."""

    def __init__(
        self,
        keys: Sequence[KeyConfig],
        *,
        required: bool,
        now: Callable[[], datetime.datetime] = _now,
    ) -> None:
        # Looked up by a hash of their hash that is this process' own secret: what a client sends
        # decides nothing about where the search goes, so that its time tells nothing of any key.
        self._secret = secrets.token_bytes(32)
        self._known = {
            self._blinded(bytes.fromhex(key.sha256)): (key.sha256, _caller(key))
            for key in keys
            if key.sha256
        }
        nobody = Caller(Principal(tenant=DEFAULT_TENANT))
        self._unknown = next((_caller(key) for key in keys if not key.sha256), nobody)
        self._required = required
        self._now = now

    def caller(self, authorization: str) -> Caller:
        """The caller by an Authorization header, "" where there is none.

        Raises Unauthenticated where a known key is required and this is none.
        """
        found = self._found(_shown(authorization))
        if found is None and self._required:
            raise Unauthenticated(
                "a known API key that has not expired is required: send Authorization: Bearer KEY"
            )
        return found or self._unknown

    def _found(self, shown: str) -> Caller | None:
        digest = hashlib.sha256(shown.encode(errors="surrogatepass")).digest()
        known, caller = self._known.get(self._blinded(digest), ("", None))
        if caller is None or not hmac.compare_digest(known, digest.hex()):
            return None
        assert caller.key is not None
        expires_at = caller.key.expires_at
        return caller if expires_at is None or self._now() < expires_at else None

    def _blinded(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, digest_size=16, key=self._secret).digest()


def authorization_of(headers: Mapping[str, str]) -> str:
    """The Authorization header, or what Anthropic's clients send in its place."""
    given = headers.get("authorization", "")
    if not given and (key := headers.get("x-api-key", "")):
        return f"Bearer {key}"
    return given


def _shown(authorization: str) -> str:
    """The key of a header. A browser that asks its user for a password sends that as the key."""
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

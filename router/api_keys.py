"""Who asks: API keys as the configuration knows them, by their hash."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from baton.config import DEFAULT_TENANT, KeyConfig
from baton.errors import Unauthenticated
from baton.request import Principal

_SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a request runs, and the entry of its key, if any applies."""

    principal: Principal
    key: KeyConfig | None = None

    @property
    def priority(self) -> int:
        """Of requests that give none."""
        return 0 if self.key is None else self.key.priority


class ApiKeys:
    """Keys are drawn at random by whoever makes them, so that a plain hash is enough at rest."""

    def __init__(self, keys: Sequence[KeyConfig], *, required: bool) -> None:
        self._hashes = [(bytes.fromhex(key.sha256), _caller(key)) for key in keys if key.sha256]
        nobody = Caller(Principal(tenant=DEFAULT_TENANT))
        self._unknown = next((_caller(key) for key in keys if not key.sha256), nobody)
        self._required = required

    def caller(self, authorization: str) -> Caller:
        """The caller by an Authorization header, "" where there is none.

        Raises Unauthenticated where a known key is required and this is none.
        """
        found = self._unknown
        if authorization[: len(_SCHEME)].lower() == _SCHEME:
            shown = hashlib.sha256(authorization[len(_SCHEME) :].strip().encode()).digest()
            # All are compared, each in constant time: how long it takes tells nothing of any.
            for known, caller in self._hashes:
                if hmac.compare_digest(known, shown):
                    found = caller
        if found is self._unknown and self._required:
            raise Unauthenticated("a known API key is required: send Authorization: Bearer KEY")
        return found


def _caller(key: KeyConfig) -> Caller:
    return Caller(Principal(tenant=key.tenant, key_id=key.name), key)

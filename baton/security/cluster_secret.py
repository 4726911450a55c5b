"""The secret of a cluster, which only its processes know.

Two values are derived from it. With the *worker token*, routers and workers prove that they belong
to the cluster if they have no certificates. The *cache salts* keep a reader of the prefix index
from testing guesses of prompts: block hashes cannot be computed without the secret.

The secret is ``cluster_secret`` of the configuration. ``deploy.store.shared_secret`` generates one
if none is set.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

_BYTES = 32


def new_secret() -> str:
    """Return a new secret with 256 random bits."""
    return secrets.token_hex(_BYTES)


def worker_token(secret: str) -> str:
    """Return the token, in hexadecimal digits, that the cluster's processes show to its workers."""
    return _derived(secret, "worker token").hex()


def cache_salt(secret: str, tenant: str) -> bytes:
    """Return the salt of a tenant's block hashes: 32 bytes, different for each tenant and
    cluster."""
    # Each use has its own key, so that neither value reveals anything about the other.
    key = _derived(secret, "block hashes")
    return hashlib.blake2b(tenant.encode(), digest_size=32, key=key).digest()


def _derived(secret: str, use: str) -> bytes:
    return hmac.digest(secret.encode(), use.encode(), "sha256")

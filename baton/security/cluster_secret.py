"""The secret of a cluster: what its processes know, and nothing else does.

Two values are derived from it. With the *worker token*, routers and workers show each other that
they belong to the cluster where they have no certificates. The *cache salts* keep a reader of the
prefix index from testing guesses of prompts: without the secret nobody can compute a block's name.

The secret is ``cluster_secret`` of the configuration; ``deploy.store.shared_secret`` draws one
where there is none.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

_BYTES = 32


def new_secret() -> str:
    """A new secret with 256 random bits."""
    return secrets.token_hex(_BYTES)


def worker_token(secret: str) -> str:
    """The token that the cluster's processes show its workers, in hexadecimal digits."""
    return _derived(secret, "worker token").hex()


def cache_salt(secret: str, tenant: str) -> bytes:
    """The salt of a tenant's block hashes: 32 bytes that no other tenant and cluster has."""
    # A key of its own for each use: neither value tells anything of the other.
    key = _derived(secret, "block hashes")
    return hashlib.blake2b(tenant.encode(), digest_size=32, key=key).digest()


def _derived(secret: str, use: str) -> bytes:
    return hmac.digest(secret.encode(), use.encode(), "sha256")

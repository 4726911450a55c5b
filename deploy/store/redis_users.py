"""Users of the store by role, and the addresses by which each role reaches it.

``redis/users.acl`` says what each may do: the least that it needs. An operator's own server takes
the same file, with the SHA-256 of passwords in the places of ``@ROUTER@`` and so on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from baton.config.cluster import Config
from baton.config.tls import TlsConfig

StoreUser = Literal["router", "worker", "supervisor"]
STORE_USERS: tuple[StoreUser, ...] = ("router", "worker", "supervisor")
USERS_FILE = Path(__file__).parents[1] / "redis" / "users.acl"


def user_rules(passwords: Mapping[StoreUser, str]) -> list[str]:
    """Lines for a server's configuration, or its ACL file; they hold hashes of the passwords."""
    text = USERS_FILE.read_text()
    for user, password in passwords.items():
        text = text.replace(f"@{user.upper()}@", hashlib.sha256(password.encode()).hexdigest())
    return text.splitlines()


def url_with_user(url: str, user: StoreUser, password: str) -> str:
    """The same server by another user."""
    parts = urlsplit(url)
    where = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{user}:{quote(password, safe='')}@{where}").geturl()


def store_url(config: Config, user: StoreUser) -> str:
    """An operator's own server, as a role reaches it; empty where there is none.

    A ``rediss`` address says itself which certificates are shown and trusted, or the cluster's are.
    """
    own = {"router": config.redis_router_url, "worker": config.redis_worker_url}.get(user)
    return url_with_certificates(own or config.redis_url, config.tls, user)


def url_with_certificates(url: str, tls: TlsConfig, user: StoreUser) -> str:
    """With the files of the cluster's certificates in its query, where it says ``rediss``."""
    parts = urlsplit(url)
    files = tls.of(user)
    if parts.scheme != "rediss":
        return url
    told = dict(parse_qsl(parts.query))
    if tls.redis_ca:
        told.setdefault("ssl_ca_certs", tls.redis_ca)
    if files is not None:
        told.setdefault("ssl_ca_certs", str(files.authority))
        if "ssl_certfile" not in told and told["ssl_ca_certs"] == str(files.authority):
            told |= {"ssl_certfile": str(files.certificate), "ssl_keyfile": str(files.key)}
    return parts._replace(query=urlencode(told)).geturl()

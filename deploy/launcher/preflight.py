"""Checks before anything starts: addresses, certificates, keys, the model's name, the folder of
files and batches, and configured servers.

Addresses beyond this machine need API keys and TLS, and Redis on another machine needs TLS.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from baton.config.cluster import Config
from baton.config.fields import split_host_port
from baton.config.keys_file import read_keys
from baton.errors import ConfigError
from baton.host.host_memory import available_bytes
from baton.telemetry.tracing import check_tracing
from deploy.launcher.kernels import computes_on_cpu
from deploy.models import model_store
from deploy.processes.data_dir import check_data_dir
from deploy.processes.ports import choose_ports
from deploy.ray.gcs_store import EMBEDDED, check_gcs_store
from deploy.store.redis_access import STORE_USERS, StoreUser, check_redis, store_url
from router.access.access import is_loopback


@dataclass(frozen=True, slots=True)
class Checked:
    """A configuration that may be started."""

    config: Config
    """The configuration with free ports in place of port 0."""
    redis_urls: dict[StoreUser, str]
    """Addresses of the operator's own store, by store user. Empty if the launcher starts an
    embedded store."""
    advice: tuple[str, ...]
    """Advice to the operator about the configured servers."""


async def preflight(config: Config) -> Checked:
    """Check the configuration, as far as that is possible before the cluster starts.

    Raises ConfigError for the first error.
    """
    check_exposure(config)
    _check_certificates(config)
    model_store.check(config.model, config.revision, config.max_model_len)
    if config.draft_model:
        model_store.check_drafter(config.drafter, config.draft_model, config.draft_revision)
    if not config.ray_address:
        _check_memory(config)
    advice = []
    if config.routers:
        config = choose_ports(config)
        advice.append(check_data_dir(config))
    if config.otlp_endpoint:
        check_tracing()
    if config.keys_file:
        read_keys(Path(config.keys_file))
    redis_urls: dict[StoreUser, str] = {}
    if config.redis_url:
        redis_urls = {user: store_url(config, user) for user in STORE_USERS}
        here = _roles_here(config)
        # The certificates of roles that run elsewhere may not be on this machine.
        tried = {
            user: store_url(config, user, user if user in here else "supervisor")
            for user in STORE_USERS
        }
        advised = {url: await check_redis(url) for url in set(tried.values())}
        advice.append(advised[tried["supervisor"]])
    check_gcs_store(config.gcs_store, config.redis_url)
    if config.gcs_store not in ("", EMBEDDED):
        advice.append(await check_redis(config.gcs_store, "--gcs-store"))
    return Checked(config, redis_urls, tuple(filter(None, advice)))


def _check_memory(config: Config) -> None:
    """Raise ConfigError if this machine has too little memory for the KV blocks of its workers.

    Those of a GPU are in the GPU's own memory, whose size only its worker learns.
    """
    on_cpu = {
        pool.name: (pool.count, pool.kv_pool_mib) for pool in config.pools if computes_on_cpu(pool)
    }
    needed = sum(count * size for count, size in on_cpu.values())
    left = available_bytes() >> 20
    if needed > left:
        listed = ", ".join(f"{name}: {count} × {size}" for name, (count, size) in on_cpu.items())
        raise ConfigError(
            f"the KV blocks of the workers need {needed} MiB ({listed}), and this machine has "
            f"{left} MiB left: lower kv_pool_mib, or start fewer workers"
        )


def check_exposure(config: Config, worker_host: str = "") -> None:
    """Raise ConfigError if an address beyond this machine lacks API keys or TLS. ``worker_host`` is
    the address of a worker's servers in this process; empty if it has none."""
    _check_listeners(config, worker_host)
    _check_redis_is_encrypted(config)


def _check_listeners(config: Config, worker_host: str) -> None:
    listeners = ("http", config.http), ("admin-http", config.admin_http), ("grpc", config.grpc)
    exposed = [
        f"--{name} {address}"
        for name, address in listeners
        if config.routers and address and not is_loopback(split_host_port(address)[0])
    ]
    missing = []
    if exposed and not (config.require_key and (config.keys or config.keys_file)):
        missing.append("API keys")
    if exposed and config.tls.fronts is None:
        missing.append("TLS")
    workers = [f"--ray-address {config.ray_address}"] if config.ray_address else []
    if worker_host and not is_loopback(worker_host):
        workers.append(f"--host {worker_host}")
    if workers and not config.tls.folder:
        exposed += workers
        missing.append("mutual TLS of the workers")
    if missing and not config.insecure_listen:
        raise ConfigError(
            f"{' and '.join(exposed)}: other machines could reach it without "
            f"{' and '.join(missing)}. Either {_remedies(missing)} "
            "(docs/explanation/security.md); or stay on 127.0.0.1; or set --insecure-listen, if "
            "only you use the network or a proxy in front has both"
        )


def _check_redis_is_encrypted(config: Config) -> None:
    for name in ("redis_url", "redis_router_url", "redis_worker_url", "gcs_store"):
        flag = f"--{name.replace('_', '-')}"
        try:
            parts = urlsplit(getattr(config, name))
        except ValueError as error:
            raise ConfigError(
                f"{flag}: {error}, as in rediss://user:password@host:6379/0"
            ) from None
        host = parts.hostname or ""
        if parts.scheme == "redis" and not is_loopback(host) and not config.insecure_redis:
            raise ConfigError(
                f"{flag} redis://{host}: passwords would travel to another machine unencrypted. "
                "Either give that server a certificate and write rediss:// "
                "(docs/explanation/security.md); or set --insecure-redis, if only you use the "
                "network between"
            )


def _remedies(missing: list[str]) -> str:
    remedies = []
    if "API keys" in missing:
        remedies.append("make a key with `baton keys create` and give its file as --keys-file")
    if missing != ["API keys"]:
        remedies.append("make certificates with `baton certs init certs` and give --certs certs")
    return ", and ".join(remedies)


def _check_certificates(config: Config) -> None:
    """Raise ConfigError if a configured certificate or key file is missing or invalid."""
    tls, here = config.tls, _roles_here(config)
    fronts = tls.fronts if "router" in here else None
    for files in (fronts, *map(tls.of, here)):
        if files is not None:
            files.check()


def _roles_here(config: Config) -> tuple[StoreUser, ...]:
    """Return the roles whose processes run on the launcher's machine."""
    roles: list[StoreUser] = ["supervisor"]
    if config.routers:
        roles.append("router")
    if config.ray_address in ("", "auto"):
        roles.append("worker")
    return tuple(roles)

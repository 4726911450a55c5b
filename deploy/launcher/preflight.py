"""Whether the fronts may listen where they are to: beyond this machine only with keys and TLS."""

from __future__ import annotations

from baton.config.cluster import Config
from baton.config.fields import split_host_port
from baton.errors import ConfigError
from router.access.access import is_loopback


def check_exposure(config: Config) -> None:
    """Raises ConfigError, with what to do, where something would be open untold."""
    fronts = ("http", config.http), ("admin-http", config.admin_http), ("grpc", config.grpc)
    exposed = [
        f"--{name} {address}"
        for name, address in fronts
        if config.routers and address and not is_loopback(split_host_port(address)[0])
    ]
    missing = []
    if exposed and not (config.require_key and (config.keys or config.keys_file)):
        missing.append("API keys")
    if exposed and config.tls.fronts is None:
        missing.append("TLS")
    if config.ray_address and not config.tls.folder:
        exposed.append(f"--ray-address {config.ray_address}")
        missing.append("mutual TLS of the workers")
    if missing and not config.insecure_listen:
        raise ConfigError(
            f"{' and '.join(exposed)}: others than this machine could reach it, without"
            f" {' and '.join(missing)}. Either {_remedies(missing)} (docs/security.md); or stay on"
            " 127.0.0.1; or say --insecure-listen, where the network is yours alone or a proxy in"
            " front has both"
        )


def _remedies(missing: list[str]) -> str:
    remedies = []
    if "API keys" in missing:
        remedies.append("make a key with `baton keys create` and give its file as --keys-file")
    if missing != ["API keys"]:
        remedies.append("make certificates with `baton certs init certs` and give --certs certs")
    return ", and ".join(remedies)

"""Whether the fronts may listen where they are to: beyond this machine only with keys and TLS."""

from __future__ import annotations

from baton.config import Config, split_host_port
from baton.errors import ConfigError
from router.access import is_loopback


def check_exposure(config: Config) -> None:
    """Raises ConfigError, with what to do, where a front would be open without being told so."""
    exposed = [
        f"--{name} {address}"
        for name, address in (
            ("http", config.http),
            ("admin-http", config.admin_http),
            ("grpc", config.grpc),
        )
        if address and not is_loopback(split_host_port(address)[0])
    ]
    missing, remedies = [], []
    if not (config.require_key and (config.keys or config.keys_file)):
        missing.append("API keys")
        remedies.append("make a key with `baton keys create` and give its file (--keys-file)")
    if config.tls.fronts is None:
        missing.append("TLS")
        remedies.append("make certificates with `baton certs init certs` and say --certs certs")
    if not exposed or not missing or config.insecure_listen:
        return
    raise ConfigError(
        f"{' and '.join(exposed)}: others than this machine could reach it, without"
        f" {' and '.join(missing)}. Either {', and '.join(remedies)} (docs/security.md); or listen"
        " on 127.0.0.1; or say --insecure-listen, where a proxy in front has both"
    )

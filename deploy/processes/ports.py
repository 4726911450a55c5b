"""Checks of ports: whether one is free, and which process uses it."""

from __future__ import annotations

import errno
import socket

import psutil

from baton.config.cluster import Config
from baton.config.fields import split_host_port
from baton.errors import ConfigError
from deploy.processes.cluster_state import running_clusters
from deploy.processes.run_directory import ClusterMark, RunDirectory

LOOPBACK = "127.0.0.1"
_ANY = {"0.0.0.0": LOOPBACK, "::": "::1"}  # noqa: S104


def free_port(host: str = LOOPBACK) -> int:
    """Return a port of ``host`` that is free now."""
    with _bound(host, 0) as probe:
        return int(probe.getsockname()[1])


def choose_ports(config: Config) -> Config:
    """Return the configuration in which free ports replace each port 0.

    Raises ConfigError when a port is in use or not allowed, or when two listeners have the same
    port.
    """
    given = {"--http": config.http, "--grpc": config.grpc, "--admin-http": config.admin_http}
    chosen: dict[str, str] = {}
    for flag, address in given.items():
        here = _choose(flag, address) if address else ""
        other = next((name for name, taken in chosen.items() if taken == here), None)
        if other is not None:
            raise ConfigError(f"{other} and {flag} are both {here}: give one of them another port")
        chosen[flag] = here
    http, grpc, admin_http = chosen.values()
    return config.model_copy(update={"http": http, "grpc": grpc, "admin_http": admin_http})


def reachable(address: str) -> str:
    """Return the address (host:port) at which clients on this machine reach a server that is bound
    to ``address``."""
    host, port = split_host_port(address)
    return join_host_port(_ANY.get(host, host), port)


def join_host_port(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address. Inverse of
    ``baton.config.cluster.split_host_port``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _choose(flag: str, address: str) -> str:
    host, port = split_host_port(address)
    try:
        with _bound(host, port) as probe:
            return join_host_port(host, int(probe.getsockname()[1]))
    except OSError as error:
        raise ConfigError(_reason(flag, address, port, error)) from error


def _bound(host: str, port: int) -> socket.socket:
    family, kind, proto, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    probe = socket.socket(family, kind, proto)
    try:
        # Servers do the same, so that a connection in TIME_WAIT does not count as use.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)
        probe.listen(1)
    except BaseException:
        probe.close()
        raise
    return probe


def _reason(flag: str, address: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{address} is in use{_by(port)}, or choose another port with {flag} HOST:PORT"
    what = error.strerror or str(error)
    return f"cannot listen on {address} ({what}): choose another with {flag} HOST:PORT"


def _by(port: int) -> str:
    """Return who listens on ``port``, and what can be done about it."""
    owner = _owner(port)
    if owner is None:
        return ": stop what listens there"
    mark = ClusterMark.of(owner)
    if mark is None:
        return f" by {owner.name()} (pid {owner.pid}): stop it"
    for state in running_clusters():
        if state.run_directory == str(mark.run_directory):
            return (
                f" by your cluster {state.cluster_id}, which serves {state.model} at {state.http}: "
                f"use that one, or stop it with `kill {state.launcher.pid}`"
            )
    return (
        f" by your cluster {mark.cluster_id}, which starts or ends (its logs are in "
        f"{RunDirectory(mark.run_directory).logs}): wait for it"
    )


def _owner(port: int) -> psutil.Process | None:
    """Return the process that listens on ``port``, if this user may see it."""
    try:
        connections = psutil.net_connections(kind="tcp")
        for connection in connections:
            listening = connection.status == psutil.CONN_LISTEN
            here = getattr(connection.laddr, "port", None) == port
            if listening and here and connection.pid:
                return psutil.Process(connection.pid)
    except (psutil.Error, OSError):
        pass
    return None

"""Selection of the cluster that a command acts on, shell completion, and confirmation of changes.

1. ``--cluster ID`` or ``--http HOST:PORT`` names the cluster.
2. Otherwise it is the only cluster that this user runs on this machine, from any terminal.
3. With several, none is chosen: the error lists them.
4. If there is none, a command that only reads queries the default address and prints a note, as do
   `chat` and `bench`. A command that changes something fails, and so does `batch`.

Completion reads the clusters' state files and uses no network. So it does not know the workers of
other machines, and it never fails.
"""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from deploy.cli.options.command_line import CONNECTION, DEFAULT_HTTP, fail, say
from deploy.cli.options.exit_codes import ExitCode

if TYPE_CHECKING:
    from deploy.processes.cluster_state import ClusterState

_LOOPBACK = {"localhost": frozenset({"localhost", "127.0.0.1", "::1"})}
_ROUTER = "router"
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would happen, and change nothing.")
]


def cluster_ids(incomplete: str) -> list[tuple[str, str]]:
    """List the ids of the clusters on this machine for shell completion, each with its model and
    address."""
    return [
        (one.cluster_id, f"{one.model} at {one.http}")
        for one in _clusters()
        if one.cluster_id.startswith(incomplete)
    ]


def worker_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """List the workers of the selected cluster, for shell completion."""
    return [
        name
        for name in _names(ctx)
        if _pool_of(name) not in ("", _ROUTER) and name.startswith(incomplete)
    ]


def worker_and_router_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """List the workers and routers of the selected cluster, for shell completion."""
    names = [name for name in _names(ctx) if _pool_of(name) or name == _ROUTER]
    return [name for name in names if name.startswith(incomplete)]


def pool_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """List the pools that have a worker on this machine, for shell completion."""
    pools = {_pool_of(name) for name in _names(ctx)} - {"", _ROUTER}
    return sorted(name for name in pools if name.startswith(incomplete))


def _names(ctx: typer.Context) -> list[str]:
    """List the names of the selected cluster's processes."""
    cluster_id, http = ctx.params.get("cluster"), ctx.params.get("http")
    return sorted(
        {
            name
            for one in _clusters()
            if cluster_id in (None, one.cluster_id)
            if http is None or any(is_same_address(http, at) for at in (one.http, one.operators))
            for name in one.processes
        }
    )


def _pool_of(name: str) -> str:
    """Return the pool of a slot such as decode-0. Empty for a process whose name has no number."""
    pool, _, number = name.rpartition("-")
    return pool if number.isdecimal() else ""


def _clusters() -> Iterator[ClusterState]:
    try:
        from deploy.processes.cluster_state import running_clusters  # noqa: PLC0415

        yield from running_clusters()
    except Exception:
        return


ClusterId = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="ID",
        help="Your cluster on this machine with this id; needed if you run several here.",
        rich_help_panel=CONNECTION,
        autocompletion=cluster_ids,
    ),
]


class NoChoice(Exception):
    """No cluster was selected; ``lines`` give the reason and what to do."""

    def __init__(self, *lines: str, code: ExitCode) -> None:
        super().__init__(*lines)
        self.lines = lines
        self.code = code


@dataclass(frozen=True, slots=True)
class Stranger:
    """A cluster's run directory that belongs to another user of this machine."""

    user: str
    directory: Path


@dataclass(frozen=True, slots=True)
class Target:
    """The cluster that a command acts on."""

    http: str | None
    """The address that the user gave, with or without a scheme; None if the user gave none. If it
    is the API's address of a cluster on this machine, this field has the address of that cluster's
    operators' endpoints instead."""
    cluster: ClusterState | None
    """The contents of the cluster's state file; None if the cluster runs elsewhere, or as another
    user."""

    @property
    def address(self) -> str:
        """Return host:port of the router's operators' endpoints."""
        if self.http is not None:
            return address_of(self.http)
        return DEFAULT_HTTP if self.cluster is None else self.cluster.operators

    def __str__(self) -> str:
        """Describe the cluster and its router for the user."""
        if self.cluster is None:
            return f"the cluster at {self.address}"
        return f"cluster {self.cluster.cluster_id} at {self.address} (model {self.cluster.model})"


def select(
    clusters: Sequence[ClusterState],
    strangers: Sequence[Stranger] = (),
    *,
    http: str | None = None,
    cluster_id: str | None = None,
    only_reads: bool = False,
) -> Target:
    """Choose a cluster by the rules in this module's docstring.

    ``clusters`` are those that this user runs here. Raises NoChoice.
    """
    if http is not None and cluster_id is not None:
        raise NoChoice("give --cluster or --http, not both", code=ExitCode.USAGE)
    if http is not None:
        return _at(http, clusters)
    if cluster_id is not None:
        return Target(None, _with_id(clusters, cluster_id))
    if len(clusters) > 1:
        raise NoChoice(
            f"{len(clusters)} of your clusters run on this machine: choose one with --cluster ID",
            *map(_line, clusters),
            code=ExitCode.USAGE,
        )
    if clusters:
        return Target(None, clusters[0])
    if only_reads:
        return Target(None, None)
    raise NoChoice(
        "none of your clusters runs on this machine: give --http HOST:PORT for one elsewhere",
        *_about(strangers),
        code=ExitCode.FAILED,
    )


def target(http: str | None, cluster_id: str | None, *, only_reads: bool = False) -> Target:
    """Choose among the clusters that run on this machine now. Ends the command if none can be
    chosen."""
    return _selected(http, cluster_id, only_reads=only_reads, default=DEFAULT_HTTP)


def cluster_of_client(
    cluster_id: str | None, http: str | None = None, *, default: str = DEFAULT_HTTP
) -> ClusterState | None:
    """Return the cluster on this machine that a client uses. None if no cluster runs here, or if
    ``http`` is the address of a cluster elsewhere.

    Ends the command if several run and neither argument names one. If none runs and there is no
    ``http``, a message says that the client uses ``default``.
    """
    return _selected(http, cluster_id, only_reads=True, default=default).cluster


def cluster_of_grpc(address: str, cluster_id: str | None) -> ClusterState | None:
    """Return the cluster on this machine with this gRPC address; None if there is none.

    Ends the command if ``cluster_id`` is given too.
    """
    from deploy.processes.cluster_state import running_clusters  # noqa: PLC0415

    if cluster_id is not None:
        fail("give --cluster or --grpc, not both", code=ExitCode.USAGE)
    return next((one for one in running_clusters() if is_same_address(address, one.grpc)), None)


def strangers(own: int | None = None) -> list[Stranger]:
    """List the run directories on this machine of users other than ``own`` (default: this user)."""
    from deploy.processes.run_directory import PREFIX, parent_directory  # noqa: PLC0415

    mine = os.getuid() if own is None else own
    found = []
    for path in sorted(parent_directory().glob(f"{PREFIX}*/")):
        try:
            owner = path.stat().st_uid
        except OSError:
            continue
        if owner != mine:
            found.append(Stranger(_user_name(owner), path))
    return found


def address_of(http: str) -> str:
    """Return host:port of an address that the user gave, which may be a URL."""
    return http.rpartition("//")[2].rstrip("/")


def is_same_address(given: str, known: str) -> bool:
    """Whether two addresses are equal: host:port, or URLs. localhost is 127.0.0.1 and ::1."""
    one, other = map(_host_and_port, (given, known))
    if one is None or other is None:
        return address_of(given) == address_of(known)
    return one[1] == other[1] and not one[0].isdisjoint(other[0])


def _host_and_port(address: str) -> tuple[frozenset[str], int | None] | None:
    """Return the host names that ``address`` means, and its port. None if the address has no host
    or an invalid port."""
    try:
        parts = urlsplit(f"//{address_of(address)}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    return None if host is None else (_LOOPBACK.get(host, frozenset({host})), port)


def _at(http: str, clusters: Sequence[ClusterState]) -> Target:
    """Return the cluster in ``clusters`` that has the address ``http``. If none has it, return a
    target for a cluster on another machine."""
    for one in clusters:
        if is_same_address(http, one.operators):
            return Target(http, one)
        if is_same_address(http, one.http):
            scheme, slashes, _ = http.rpartition("//")
            return Target(f"{scheme}{slashes}{one.operators}", one)
    return Target(http, None)


def _selected(
    http: str | None, cluster_id: str | None, *, only_reads: bool, default: str
) -> Target:
    from deploy.processes.cluster_state import running_clusters  # noqa: PLC0415

    try:
        found = select(
            running_clusters(),
            strangers(),
            http=http,
            cluster_id=cluster_id,
            only_reads=only_reads,
        )
    except NoChoice as error:
        fail(*error.lines, code=error.code)
    if found.cluster is None and found.http is None:
        say(f"none of your clusters runs on this machine: using {default}")
    return found


def _with_id(clusters: Sequence[ClusterState], cluster_id: str) -> ClusterState:
    for one in clusters:
        if one.cluster_id == cluster_id:
            return one
    if not clusters:
        raise NoChoice(
            f"none of your clusters runs on this machine, so none is {cluster_id!r}",
            code=ExitCode.FAILED,
        )
    raise NoChoice(
        f"none of your clusters on this machine is {cluster_id!r}; there are:",
        *map(_line, clusters),
        code=ExitCode.FAILED,
    )


def _line(cluster: ClusterState) -> str:
    since = _started_at(cluster.launcher.start_ticks)
    return f"  {cluster.cluster_id}  {cluster.http}  {cluster.model}  since {since:%Y-%m-%d %H:%M}"


def _started_at(ticks: int) -> datetime:
    """Convert clock ticks since the boot to a date and time; see
    ``deploy.processes.process_identity``."""
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    running_s = uptime_s - ticks / os.sysconf("SC_CLK_TCK")
    return datetime.now().astimezone() - timedelta(seconds=running_s)


def _about(strangers: Sequence[Stranger]) -> list[str]:
    if not strangers:
        return []
    users = ", ".join(sorted({one.user for one in strangers}))
    # Another user chose the name: repr escapes terminal control characters.
    folder = repr(str(strangers[0].directory))
    return [
        f"another user ({users}) runs Baton here, or did ({folder}): to act on that cluster, give"
        " --http and an API key with the scope that this needs (--api-key)"
    ]


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def confirm(question: str, *, yes: bool) -> None:
    """Ask the user to confirm, and return if the user agrees. Otherwise end the command with
    ``ExitCode.REFUSED``.

    ``question`` has no question mark. Without a terminal, the command needs ``yes``.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        fail(
            f"not confirmed: {question}",
            "there is no terminal to ask on, so nothing was changed: give --yes",
            code=ExitCode.REFUSED,
        )
    try:
        agreed = typer.confirm(f"{question}?", err=True)
    except typer.Abort:
        typer.echo(err=True)
        agreed = False
    if not agreed:
        fail("not confirmed: nothing was changed", code=ExitCode.REFUSED)

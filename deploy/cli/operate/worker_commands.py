"""`baton drain`, `baton role` and `baton scale`: changes to a running cluster.

Each command names the cluster and the router that it acts on, and asks for confirmation.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated

import typer

from baton.config.choices import Role
from deploy.cli.operate.cluster_selection import (
    ClusterId,
    DryRun,
    Target,
    Yes,
    confirm,
    pool_names,
    target,
    worker_and_router_names,
    worker_names,
)
from deploy.cli.operate.operator_client import ClusterFacts, OperatorClient, WorkerFacts
from deploy.cli.options.command_line import CONNECTION, MAX_WORKERS, Http, fail
from deploy.cli.options.exit_codes import ExitCode
from deploy.cli.options.option_group import takes
from deploy.cli.options.tls_options import TlsOptions

if TYPE_CHECKING:
    from deploy.processes.cluster_state import ClusterState
    from deploy.processes.process_identity import ProcessIdentity

_DEFAULT_DEADLINE_S = 30.0
Deadline = Annotated[
    float,
    typer.Option(
        min=0,
        max=3600,
        metavar="SECONDS",
        help="Seconds that running requests have to end; the rest then moves to other workers.",
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Act even on the last ready worker of a role or the last router."),
]
ApiKey = Annotated[
    str,
    typer.Option(
        envvar="BATON_API_KEY",
        help="API key with the admin scope, if the cluster requires one.",
        rich_help_panel=CONNECTION,
    ),
]


@takes(TlsOptions)
def drain(
    tls: TlsOptions,
    worker: Annotated[
        str,
        typer.Argument(
            help="Worker or router, such as decode-0 or router-0; `baton status` lists workers.",
            autocompletion=worker_and_router_names,
        ),
    ],
    deadline: Deadline = _DEFAULT_DEADLINE_S,
    force: Force = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    cluster: ClusterId = None,
    http: Http = None,
    api_key: ApiKey = "",
) -> None:
    """Drain a worker or a router: its requests end or move.

    It takes no new requests, and exits when it is empty. The cluster starts another one in its
    place, so a drain is a restart that loses no request. `baton scale` removes workers, and `baton
    leave` all workers of a node.

        baton drain decode-0 --dry-run
        baton drain decode-0 --yes
    """
    chosen = target(http, cluster)
    if worker.partition("-")[0] == "router":
        _drain_router(worker, chosen, force=force, dry_run=dry_run, yes=yes)
        return
    client = OperatorClient(tls, chosen, api_key)
    facts = client.look()
    found = facts.worker(worker)
    _check_last(facts, found, "draining it", force=force, dry_run=dry_run)
    _show(f"{facts}: drain {worker}", found.fate, dry_run=dry_run)
    if dry_run:
        return
    confirm(f"Drain {worker} of cluster {facts.id}", yes=yes)
    body = {"deadline_s": deadline, "force": force}
    answer = client.post(f"workers/{worker}/drain", body)
    left = "" if answer["empty"] else "; its remaining requests moved to other workers"
    typer.echo(f"{worker} of {facts} was drained{left}")


@takes(TlsOptions)
def role(
    tls: TlsOptions,
    worker: Annotated[
        str,
        typer.Argument(
            help="Worker, such as prefill-1. `baton status` lists them.",
            autocompletion=worker_names,
        ),
    ],
    to: Annotated[Role, typer.Argument(metavar="prefill|decode", help="The worker's new role.")],
    deadline: Deadline = _DEFAULT_DEADLINE_S,
    force: Force = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    cluster: ClusterId = None,
    http: Http = None,
    api_key: ApiKey = "",
) -> None:
    """Give a worker the other role, prefill or decode.

    The process stays, with its weights and its cached blocks.

        baton role prefill-1 decode
    """
    client = OperatorClient(tls, target(http, cluster), api_key)
    facts = client.look()
    found = facts.worker(worker)
    if found.role == to:
        typer.echo(f"{worker} of {facts} already is a {to} worker")
        return
    _check_last(facts, found, "changing its role", force=force, dry_run=dry_run)
    _show(f"{facts}: make {worker} a {to} worker", found.fate, dry_run=dry_run)
    if dry_run:
        return
    confirm(f"Make {worker} of cluster {facts.id} a {to} worker", yes=yes)
    body = {"role": to, "deadline_s": deadline, "force": force}
    answer = client.post(f"workers/{worker}/role", body)
    typer.echo(f"{worker} of {facts} now is a {to} worker; it took {answer['took_s']:.2f} s")


@takes(TlsOptions)
def scale(
    tls: TlsOptions,
    pool: Annotated[
        str,
        typer.Argument(
            help="Name of the pool: prefill or decode, unless the configuration names others.",
            autocompletion=pool_names,
        ),
    ],
    count: Annotated[
        int,
        typer.Argument(min=0, max=MAX_WORKERS, help="Number of workers that the pool should have."),
    ],
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Act even if some requests need a prefill worker, and none would be left.",
        ),
    ] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    cluster: ClusterId = None,
    http: Http = None,
    api_key: ApiKey = "",
) -> None:
    """Set the number of workers in a pool.

    The cluster starts new workers, or drains those with the highest numbers. The command does not
    wait until they are ready or gone: see `baton status`.

        baton scale decode 3
    """
    client = OperatorClient(tls, target(http, cluster), api_key)
    facts = client.look()
    previous = facts.pools.get(pool)
    if previous is None:
        known = ", ".join(sorted(facts.pools))
        fail(f"{facts} has no pool {pool!r}; its pools: {known}")
    if previous == count:
        typer.echo(f"pool {pool} of {facts} already has {count} workers")
        return
    action = f"scale pool {pool} from {previous} to {count} workers"
    _show(f"{facts}: {action}", _change(facts, pool, previous, count), dry_run=dry_run)
    if dry_run:
        return
    confirm(f"Scale pool {pool} of cluster {facts.id} to {count} workers", yes=yes)
    answer = client.post(f"pools/{pool}/scale", {"count": count, "force": force})
    typer.echo(f"pool {pool} of {facts} will have {count} workers; it had {answer['previous']}")


def _drain_router(name: str, chosen: Target, *, force: bool, dry_run: bool, yes: bool) -> None:
    """Drain a router by a signal to its process, which must run on this machine."""
    found = chosen.cluster
    if found is None or name not in found.processes:
        known = "" if found is None else f"; there are: {_listed(_routers(found.processes))}"
        fail(
            f"{chosen} has no {name} on this machine{known}",
            "drain a router on its own machine, or send SIGTERM to it there",
        )
    process = _process(found, name)
    is_last = len(_routers(found.processes)) == 1
    if is_last:
        text = f"{name} is the last router of {chosen}: no request is served until it is back"
        _refuse(text, force=force, dry_run=dry_run)
    fate = "its open requests end, it takes no new connections, and another one is started"
    _show(f"{chosen}: drain {name}", fate, dry_run=dry_run)
    if dry_run:
        return
    confirm(f"Drain {name} of cluster {found.cluster_id}", yes=yes)
    # The confirmation may have taken long: another process may have the name, or the pid.
    if process is None or _process_now(found.cluster_id, name) != process:
        fail(f"{name} of {chosen} has ended or was restarted: nothing was changed")
    try:
        os.kill(process.pid, signal.SIGTERM)
    except ProcessLookupError:
        fail(f"{name} of {chosen} has ended: nothing was changed")
    typer.echo(f"{name} of {chosen} drains")


def _process_now(cluster_id: str, name: str) -> ProcessIdentity | None:
    from deploy.processes.cluster_state import running_clusters  # noqa: PLC0415

    now = (one for one in running_clusters() if one.cluster_id == cluster_id)
    return next((_process(one, name) for one in now), None)


def _process(cluster: ClusterState, name: str) -> ProcessIdentity | None:
    """Return the process of the worker or router ``name``. None if the cluster has no process of
    that name, or if the process has ended."""
    from deploy.processes.process_identity import ProcessIdentity  # noqa: PLC0415

    try:
        return ProcessIdentity.of(cluster.processes[name])
    except (KeyError, OSError):
        return None


def _check_last(
    facts: ClusterFacts, worker: WorkerFacts, action: str, *, force: bool, dry_run: bool
) -> None:
    if worker.is_last:
        _refuse(
            f"{worker.slot} is the last ready {worker.role} worker of {facts}: {action}"
            " leaves a gap until another one is ready",
            force=force,
            dry_run=dry_run,
        )


def _refuse(why: str, *, force: bool, dry_run: bool) -> None:
    """End the command with the reason ``why``. With ``force`` or for a dry run, continue."""
    if not force and not dry_run:
        fail(why, "nothing was changed: give --force to override this", code=ExitCode.REFUSED)
    typer.echo(f"warning: {why}{'' if force else ' (needs --force)'}", err=True)


def _show(action: str, consequence: str, *, dry_run: bool) -> None:
    """Show the user what the command changes. For a dry run this is the only output; otherwise the
    confirmation follows."""
    for line in (action, f"  {consequence}", *(["  dry run: nothing was changed"] * dry_run)):
        typer.echo(line, err=not dry_run)


def _change(facts: ClusterFacts, pool: str, previous: int, count: int) -> str:
    if count > previous:
        return f"it starts {_listed([f'{pool}-{number}' for number in range(previous, count)])}"
    slots = [f"{pool}-{number}" for number in range(count, previous)]
    requests = sum(one.running + one.waiting for one in facts.workers if one.slot in slots)
    return f"it drains {_listed(slots)}, where {requests} requests end or move to other workers"


def _routers(names: Collection[str]) -> list[str]:
    return sorted(name for name in names if name.partition("-")[0] == "router")


def _listed(names: Collection[str]) -> str:
    return ", ".join(names) or "none"

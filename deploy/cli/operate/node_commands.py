"""`baton join`, `baton leave`, `baton router`, `baton worker`: for clusters on several machines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer

from baton.config.choices import LogFormat, LogTo
from deploy.cli.operate.cluster_selection import DryRun, Yes, confirm
from deploy.cli.options.command_line import (
    DEFAULT_GRPC,
    DEFAULT_HTTP,
    MAX_WORKERS,
    clear_errors,
    fail,
    say,
)
from deploy.cli.options.config_loading import load
from deploy.cli.options.exit_codes import ExitCode
from deploy.ray_internals import count_gpus


def join(
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="HOST:PORT",
            help="Address of the Ray cluster's head, usually port 6379. Default: $RAY_ADDRESS.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_WORKERS,
            help="Maximum number of workers on this node. Default: one per GPU, or 1 without GPUs.",
        ),
    ] = None,
    cpus: Annotated[
        int | None,
        typer.Option(min=0, help="CPUs that Ray may schedule on this node. Default: all."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=0, help="GPUs that Ray may schedule on this node. Default: all."),
    ] = None,
    resource: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=AMOUNT",
            help="Custom Ray resource that a pool may require in its `resources`, such as"
            " baton_decode=2; repeatable.",
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            show_default=False,
            help="Port of Ray's node manager. Default: any free port.",
        ),
    ] = 0,
    log_to: Annotated[
        LogTo,
        typer.Option(
            help="Where the node and Ray write their logs. Its workers follow their cluster's"
            " log_to, which should be the same."
        ),
    ] = "files",
    log_format: Annotated[
        LogFormat, typer.Option(help="Format of the node's own lines on standard output.")
    ] = "text",
) -> None:
    """Add this machine to a Ray cluster, so that it runs workers.

    It stays until Ctrl-C or SIGTERM. On SIGTERM the workers first finish or move their requests. It
    needs Ray's authentication token in ~/.ray/auth_token, or in the file that RAY_AUTH_TOKEN_PATH
    names.

        baton join 10.0.0.1:6379 --workers 2
    """
    from baton.config.fields import split_host_port  # noqa: PLC0415
    from baton.telemetry.logs import Service  # noqa: PLC0415
    from deploy.launcher.node_agent import run_node  # noqa: PLC0415
    from deploy.processes.foreground import own_progress  # noqa: PLC0415

    to = address or os.environ.get("RAY_ADDRESS", "")
    if not to:
        fail("give the address of Ray's head, HOST:PORT, or set RAY_ADDRESS", code=ExitCode.USAGE)
    try:
        split_host_port(to)
    except ValueError as error:
        fail(str(error), code=ExitCode.USAGE)
    found = count_gpus() if gpus is None else gpus
    places = workers or max(1, found)
    amounts = _amounts(resource or [])
    here = (os.cpu_count() or 1) if cpus is None else cpus
    progress = own_progress(log_to, "info", log_format, Service.NODE, "node")
    code = run_node(to, places, here, found, amounts, port, progress)
    raise typer.Exit(code)


def leave(
    deadline: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Seconds after which the remaining workers are killed. Default: the cluster's"
            " drain_deadline_s, and 20 s more.",
        ),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Drain your workers on this node before you shut it down.

    The command waits until they have exited. Ray starts no other workers on the node. If there are
    no workers, nothing happens.
    """
    from deploy.launcher.node_agent import leave as leave_node  # noqa: PLC0415
    from deploy.launcher.node_agent import node_workers, workers_by_cluster  # noqa: PLC0415

    nodes = node_workers()
    workers = workers_by_cluster(nodes)
    for cluster, slots in workers.items():
        typer.echo(f"cluster {cluster}: drain {', '.join(slots)} on this node", err=not dry_run)
    if not workers:
        say("none of your workers runs on this node")
    if dry_run:
        return
    if workers:
        count = sum(map(len, workers.values()))
        confirm(f"Drain {count} workers of {_named(workers)} on this node", yes=yes)
    if not asyncio.run(leave_node(nodes, say, deadline)):
        raise typer.Exit(ExitCode.FAILED)


def router(
    http: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help=f"HTTP address to listen on. Default: {DEFAULT_HTTP}."
        ),
    ] = None,
    grpc: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help=f"gRPC address to listen on. Default: {DEFAULT_GRPC}."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Model that the cluster's workers serve."),
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Redis or Valkey server of the cluster.")
    ] = None,
    keys_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File of API keys; see `baton keys`.")
    ] = None,
    certs: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Folder of certificates; see `baton certs`."),
    ] = None,
    insecure_listen: Annotated[
        bool | None,
        typer.Option(
            "--insecure-listen", help="Listen beyond this machine without API keys or TLS."
        ),
    ] = None,
    insecure_redis: Annotated[
        bool | None,
        typer.Option(
            "--insecure-redis", help="Allow a redis:// address of another machine, without TLS."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML configuration of the cluster."),
    ] = None,
) -> None:
    """Run one more router of a running cluster.

    It runs until Ctrl-C. It needs the cluster's Redis server, model and id. The id has no option:
    it is BATON_CLUSTER_ID, or cluster_id in the file of --config.

        export BATON_CLUSTER_ID=blue
        baton router --model Qwen/Qwen3-0.6B --redis-url rediss://10.0.0.1:6379
    """
    from deploy.cli.options.api_key_file import requiring, taken_from_environment  # noqa: PLC0415
    from deploy.launcher.router_process import serve_router  # noqa: PLC0415

    keys = taken_from_environment()
    settings = load(
        config,
        http=http,
        grpc=grpc,
        model=model,
        redis_url=redis_url,
        keys_file=None if keys_file is None else str(keys_file),
        tls=None if certs is None else {"folder": certs},
        insecure_listen=insecure_listen,
        insecure_redis=insecure_redis,
    )
    with clear_errors():
        serve_router(requiring(settings, keys))


def worker(
    role: Annotated[
        Literal["prefill", "decode"] | None,
        typer.Option(help="Role of the worker. It selects the pool if only one has this role."),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Pool of the configuration to which the worker belongs."),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="IP address at which the worker listens, and others reach it.",
        ),
    ] = "127.0.0.1",
    slot: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="Name of the worker in metrics and commands, unique in the cluster. Default: the"
            " pool and the last part of the host's name, such as decode-0.",
        ),
    ] = "",
    workers_here: Annotated[
        int,
        typer.Option(min=1, max=MAX_WORKERS, help="Workers on this machine, which share its CPUs."),
    ] = 1,
    probe_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            show_default=False,
            help="Port of /live and /ready, plain HTTP for a kubelet. Default: none.",
        ),
    ] = 0,
    group_port: Annotated[
        int,
        typer.Option(
            min=1,
            max=65535,
            help="Port at which pods of one worker find the pod of its rank 0, if the ranks are in"
            " several (LWS_GROUP_SIZE).",
        ),
    ] = 9390,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML configuration of the cluster."),
    ] = None,
) -> None:
    """Run one worker in this process, without Ray.

    Use it where Kubernetes or systemd starts, restarts and counts the workers. The worker registers
    itself, and lives until it gets SIGTERM: then it finishes or moves its requests. It needs the
    cluster's Redis server, model, id and secret, from the file or the environment (BATON_REDIS_URL,
    BATON_CLUSTER_ID, BATON_CLUSTER_SECRET).

    In a LeaderWorkerSet the ranks of a worker may be in several pods: each runs this command.

        baton worker --role decode --host 10.0.0.7 --config baton.toml
    """
    from deploy.launcher.plain_worker import pool_of, run_worker  # noqa: PLC0415

    settings = load(config)
    with clear_errors():
        run_worker(
            settings,
            pool_of(settings, role, pool),
            slot=slot,
            host=host,
            workers_here=workers_here,
            probe_port=probe_port,
            group_port=group_port,
        )


def _amounts(given: list[str]) -> dict[str, float]:
    amounts = {}
    for text in given:
        name, _, amount = text.partition("=")
        try:
            amounts[name] = float(amount)
        except ValueError:
            amounts[name] = 0.0
        if not name or amounts[name] <= 0:
            fail(
                f"--resource: expected NAME=AMOUNT such as baton_decode=2; got {text!r}",
                code=ExitCode.USAGE,
            )
    return amounts


def _named(clusters: Iterable[str]) -> str:
    names = list(clusters)
    return f"cluster{'s' if len(names) > 1 else ''} {', '.join(names)}"

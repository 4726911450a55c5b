"""`baton join`, `baton leave` and `baton router`: the parts of a cluster on several machines."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from deploy.command_line import DEFAULT_GRPC, DEFAULT_HTTP, MOST_WORKERS, clear_errors, fail, say
from deploy.config_loading import load


def join(
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="[HOST:PORT]",
            help="The control store of a Ray cluster: its head's port, 6379 unless it was told"
            " otherwise. Default: RAY_ADDRESS of the environment.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_WORKERS,
            help="How many workers have a place here. Default: one for each GPU, or 1 without.",
        ),
    ] = None,
    cpus: Annotated[
        int | None,
        typer.Option(min=0, help="What Ray may give out of them. Default: those of the machine."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=0, help="What Ray may give out of them. Default: those of the machine."),
    ] = None,
    resource: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=AMOUNT",
            help="Of Ray, which pools may ask for in their `resources`, such as baton_decode=2."
            " May be given several times.",
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="Where Ray's node manager listens. Default: any that is free."
        ),
    ] = 0,
) -> None:
    """Give the workers of a cluster places on this machine, until Ctrl-C or SIGTERM.

    The cluster's token of Ray's must be here: in ~/.ray/auth_token, or where RAY_AUTH_TOKEN_PATH
    says. SIGTERM lets workers end what they run first.
    """
    from rich.console import Console  # noqa: PLC0415

    from baton.config import split_host_port  # noqa: PLC0415
    from deploy.joiner import run_node  # noqa: PLC0415
    from deploy.progress import Progress  # noqa: PLC0415

    to = address or os.environ.get("RAY_ADDRESS", "")
    if not to:
        fail("give the address of Ray's control store, HOST:PORT, or set RAY_ADDRESS")
    try:
        split_host_port(to)
    except ValueError as error:
        fail(str(error))
    found = _gpus_here() if gpus is None else gpus
    places = workers or max(1, found)
    amounts = _amounts(resource or [])
    here = (os.cpu_count() or 1) if cpus is None else cpus
    code = run_node(to, places, here, found, amounts, port, Progress(Console()))
    raise typer.Exit(code)


def leave(
    deadline: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds after which workers that are left are ended. Default: as long as their"
            " cluster lets them.",
        ),
    ] = None,
) -> None:
    """Let the workers of this node leave, and wait until they have: before the node is ended.

    Ray places no other ones here. Nothing is done where there are none.
    """
    from deploy.node_leave import leave as leave_node  # noqa: PLC0415
    from deploy.node_leave import node_rolls  # noqa: PLC0415

    if not asyncio.run(leave_node(node_rolls(), say, deadline)):
        raise typer.Exit(1)


def router(
    http: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help=f"The HTTP front. Default: {DEFAULT_HTTP}."),
    ] = None,
    grpc: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help=f"The gRPC front. Default: {DEFAULT_GRPC}."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="As for `baton up`, whose workers have it.")
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The cluster's Redis or Valkey server.")
    ] = None,
    keys_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="API keys, as for `baton up`.")
    ] = None,
    certs: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Certificates, as for `baton up`.")
    ] = None,
    insecure_listen: Annotated[
        bool | None,
        typer.Option("--insecure-listen", help="Without keys or TLS, as for `baton up`."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The TOML file of the cluster. Default: none."),
    ] = None,
) -> None:
    """Serve as one of a cluster's routers until Ctrl-C: `baton up` runs elsewhere.

    It is configured as `baton up` is, and needs the same redis_url, cluster_id and model.
    """
    from deploy.api_key_file import requiring, taken_from_environment  # noqa: PLC0415
    from deploy.router_command import serve_router  # noqa: PLC0415

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
    )
    with clear_errors():
        serve_router(requiring(settings, keys))


def _gpus_here() -> int:
    from ray._private.accelerators import NvidiaGPUAcceleratorManager  # noqa: PLC0415

    return int(NvidiaGPUAcceleratorManager.get_current_node_num_accelerators())


def _amounts(given: list[str]) -> dict[str, float]:
    amounts = {}
    for text in given:
        name, _, amount = text.partition("=")
        try:
            amounts[name] = float(amount)
        except ValueError:
            fail(f"--resource {text}: NAME=AMOUNT, as in baton_decode=2")
        if not name or amounts[name] <= 0:
            fail(f"--resource {text}: NAME=AMOUNT, as in baton_decode=2")
    return amounts

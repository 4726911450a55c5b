"""Of `baton bench` what drives a server that runs: `serve`, `goodput` and `soak`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console

from deploy.command_line import clear_ends, fail, local_cluster, names_in, say
from deploy.load_options import LoadOptions
from deploy.option_group import takes

if TYPE_CHECKING:
    from baton.tls import TlsFiles
    from loadtest.generator.soak import WatchedCluster

_LEAKED = 3


@takes(LoadOptions)
def serve(
    load: LoadOptions,
    rate: Annotated[
        str,
        typer.Option(
            help="An open loop: requests a second, or several rates, 1,2,4, one after the other."
            " Default: that of the trace."
        ),
    ] = "",
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="A closed loop: so many requests at a time.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Most that are sent.")] = None,
) -> None:
    """Send requests to a server that runs, and show how soon their tokens came."""
    from loadtest.generator.load_bench import bench_serve  # noqa: PLC0415

    rates = _rates(rate)
    if (concurrency is not None) and rates:
        fail("give --rate for an open loop or --concurrency for a closed one, not both")
    if concurrency is None and not rates and load.trace is None:
        fail("give --rate, --concurrency or --trace")
    with clear_ends():
        settings = load.settings(concurrency=concurrency, requests=requests)
        bench_serve(settings, rates, load.outputs(), Console(), say)


@takes(LoadOptions)
def goodput(
    load: LoadOptions,
    first_rate: Annotated[
        float, typer.Option(help="Requests a second that are tried first.")
    ] = 1.0,
    most_rate: Annotated[
        float | None, typer.Option(help="No rate above it is tried. Default: no bound.")
    ] = None,
    attainment: Annotated[
        float, typer.Option(min=0, max=1, help="Share of requests that must meet every SLO.")
    ] = 0.9,
    precision: Annotated[
        float, typer.Option(min=0.001, max=1, help="How close the rate is looked for; 0.05: 5 %.")
    ] = 0.05,
) -> None:
    """Find the highest rate at which enough requests meet every SLO, by bisection.

    Each rate is offered for --seconds; longer ones make the result steadier.
    """
    from loadtest.generator.load_bench import SearchSettings, bench_goodput  # noqa: PLC0415

    if first_rate <= 0 or (most_rate is not None and most_rate <= 0):
        fail("rates are above 0")
    search = SearchSettings(
        first_rate, attainment, precision, float("inf") if most_rate is None else most_rate
    )
    with clear_ends():
        bench_goodput(load.settings(rate=first_rate), search, load.outputs(), Console(), say)


@takes(LoadOptions)
def soak(
    load: LoadOptions,
    peak: Annotated[float, typer.Option(help="The highest rate that is expected, requests/s.")],
    factor: Annotated[float, typer.Option(help="Of the peak, that is offered.")] = 2.0,
    every: Annotated[
        float, typer.Option(min=0.1, help="Seconds between looks at the cluster.")
    ] = 30.0,
) -> None:
    """Offer twice the expected peak for --seconds (hours), and see whether the cluster leaks.

    Memory and descriptors of its processes, blocks, sequences, and keys in Redis; of a cluster
    elsewhere, what its metrics say. Exit code 3 where something leaks.
    """
    from loadtest.generator.soak import bench_soak  # noqa: PLC0415

    if not 0 < peak * factor < float("inf"):
        fail("--peak and --factor are above 0")
    with clear_ends():
        settings = load.settings(rate=peak * factor)
        cluster = _watched(settings.server.url, settings.server.tls)
        report = bench_soak(settings, cluster, every, load.outputs(), Console(), say)
    if report.leaks:
        raise typer.Exit(_LEAKED)


def _watched(url: str, tls: TlsFiles | None) -> WatchedCluster:
    """What is known here of the cluster at ``url``."""
    from loadtest.generator.soak import WatchedCluster  # noqa: PLC0415

    http = urlsplit(url).netloc
    cluster = local_cluster(http)
    if cluster is None:
        return WatchedCluster(url, dict, tls=tls)

    def pids() -> dict[str, int]:
        now = local_cluster(http)
        return {} if now is None else now.processes

    prefix = f"baton:{{{cluster.cluster_id}}}:"
    return WatchedCluster(url, pids, cluster.redis_url, prefix, tls)


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(name) for name in names_in(text))
    except ValueError:
        rates = (0.0,)
    if any(not 0 < rate < float("inf") for rate in rates):
        fail(f"--rate: {text!r} is no list of rates above 0, as in 1,2,4")
    return rates

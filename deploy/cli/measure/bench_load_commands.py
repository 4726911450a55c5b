"""The commands of `baton bench` that drive a running server: `serve`, `goodput` and `soak`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console

from deploy.cli.measure.load_options import LOAD, LoadOptions
from deploy.cli.operate.cluster_selection import cluster_of_client
from deploy.cli.options.command_line import clear_ends, fail, names_in, say
from deploy.cli.options.exit_codes import ExitCode
from deploy.cli.options.option_group import takes

if TYPE_CHECKING:
    from baton.security.tls import TlsFiles
    from loadtest.generator.soak import WatchedCluster


@takes(LoadOptions)
def serve(
    load: LoadOptions,
    rate: Annotated[
        str,
        typer.Option(
            metavar="RATE,…",
            help="Open loop: requests per second, or several rates in turn, such as 1,2,4. Default:"
            " that of the trace.",
            rich_help_panel=LOAD,
        ),
    ] = "",
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="Closed loop: number of concurrent requests.", rich_help_panel=LOAD
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of requests.", rich_help_panel=LOAD)
    ] = None,
) -> None:
    """Measure latency and throughput of a running server.

    Give --rate, --concurrency or --trace. Any server with OpenAI's API can be measured.

        baton bench serve --rate 1,2,4 --input 512 --output 128
        baton bench serve --concurrency 8 --url http://127.0.0.1:9000
    """
    from loadtest.generator.load_bench import bench_serve  # noqa: PLC0415

    rates = _rates(rate)
    if (concurrency is not None) and rates:
        fail(
            "give --rate for an open loop or --concurrency for a closed loop, not both",
            code=ExitCode.USAGE,
        )
    if concurrency is None and not rates and load.trace is None:
        fail("give --rate, --concurrency or --trace", code=ExitCode.USAGE)
    with clear_ends():
        settings = load.settings(concurrency=concurrency, requests=requests)
        bench_serve(settings, rates, load.outputs(), Console(), say)


@takes(LoadOptions)
def goodput(
    load: LoadOptions,
    first_rate: Annotated[
        float, typer.Option(help="First rate to try, in requests per second.")
    ] = 1.0,
    max_rate: Annotated[
        float | None, typer.Option(help="Maximum rate to try. Default: unlimited.")
    ] = None,
    attainment: Annotated[
        float, typer.Option(min=0, max=1, help="Share of requests that must meet all SLOs.")
    ] = 0.9,
    precision: Annotated[
        float,
        typer.Option(min=0.001, max=1, help="Relative precision of the rate; 0.05 means 5 %."),
    ] = 0.05,
) -> None:
    """Find the highest request rate that meets the SLOs.

    Each rate is tried for --seconds. Longer trials give more stable results.

        baton bench goodput --slo ttft=2,tpot=100ms --input 512 --output 128
    """
    from loadtest.generator.load_bench import SearchSettings, bench_goodput  # noqa: PLC0415

    if first_rate <= 0 or (max_rate is not None and max_rate <= 0):
        fail("--first-rate and --max-rate must be above 0", code=ExitCode.USAGE)
    search = SearchSettings(
        first_rate, attainment, precision, float("inf") if max_rate is None else max_rate
    )
    with clear_ends():
        bench_goodput(load.settings(rate=first_rate), search, load.outputs(), Console(), say)


@takes(LoadOptions)
def soak(
    load: LoadOptions,
    peak: Annotated[float, typer.Option(help="Highest expected rate, in requests per second.")],
    factor: Annotated[float, typer.Option(help="Load to offer, as a multiple of --peak.")] = 2.0,
    every: Annotated[
        float,
        typer.Option(
            min=0.1, metavar="SECONDS", help="Time between two measurements of the cluster."
        ),
    ] = 30.0,
) -> None:
    """Overload a cluster for hours, and check for leaks.

    --seconds is the duration. The command watches the processes' memory and descriptors, KV blocks,
    sequences, and keys in Redis. For a cluster on another machine it watches only the metrics. Exit
    code 5: the cluster leaks.

        baton bench soak --peak 4 --seconds 14400
    """
    from loadtest.generator.soak import bench_soak  # noqa: PLC0415

    if not 0 < peak * factor < float("inf"):
        fail("--peak and --factor must be above 0", code=ExitCode.USAGE)
    with clear_ends():
        settings = load.settings(rate=peak * factor)
        cluster = _watched(settings.server.url, settings.server.tls)
        report = bench_soak(settings, cluster, every, load.outputs(), Console(), say)
    if report.leaks:
        raise typer.Exit(ExitCode.LEAK)


def _watched(url: str, tls: TlsFiles | None) -> WatchedCluster:
    """Return the cluster at ``url`` as `baton bench soak` watches it: its processes and its store
    if it runs on this machine, otherwise only its metrics."""
    from loadtest.generator.soak import WatchedCluster  # noqa: PLC0415

    http = urlsplit(url).netloc
    cluster = cluster_of_client(None, http)
    if cluster is None:
        return WatchedCluster(url, dict, tls=tls)

    def pids() -> dict[str, int]:
        now = cluster_of_client(None, http)
        return {} if now is None else now.processes

    prefix = f"baton:{{{cluster.cluster_id}}}:"
    return WatchedCluster(url, pids, cluster.redis_url, prefix, tls)


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(name) for name in names_in(text))
    except ValueError:
        rates = (0.0,)
    if any(not 0 < rate < float("inf") for rate in rates):
        fail(
            f"--rate: expected comma-separated rates above 0 such as 1,2,4; got {text!r}",
            code=ExitCode.USAGE,
        )
    return rates

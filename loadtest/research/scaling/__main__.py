"""Measures what large clusters cost: docs/explanation/scale.md has the results.

python -m loadtest.research.scaling simulated --workers 10000 --routers 50 --requests 200000
python -m loadtest.research.scaling streams --streams 300
python -m loadtest.research.scaling growth --plots docs/images
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.host.process_tuning import keep_buffers
from loadtest.research.scaling.growth import by_concurrency, by_context, by_workers, plots
from loadtest.research.scaling.large_cluster import LargeCluster, simulate_large
from loadtest.research.scaling.registry_cost import measure_registry
from loadtest.research.scaling.streams import measure_streams
from planning.common.report import this_machine

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _print(figures: dict[str, Any]) -> None:
    typer.echo(json.dumps(figures, indent=1))
    typer.echo(this_machine().line())


@app.command()
def simulated(
    workers: Annotated[int, typer.Option(min=2, help="Workers of both roles.")] = 10_000,
    routers: Annotated[int, typer.Option(min=1, help="Routers.")] = 50,
    requests: Annotated[int, typer.Option(min=1, help="Requests.")] = 200_000,
    rate: Annotated[float, typer.Option(help="Requests per second and worker.")] = 9.0,
    profile: Annotated[str, typer.Option(help="Accelerator, or a profile's file.")] = "h100",
) -> None:
    """Simulate a large cluster, and print its figures and the processor time."""
    cluster = LargeCluster(workers, routers, requests, rate, profile)
    _print(asdict(simulate_large(cluster)))


@app.command()
def streams(
    streams: Annotated[int, typer.Option(min=1, help="Streams from the router.")] = 300,
    seconds: Annotated[float, typer.Option(help="Duration of the measurement in seconds.")] = 10.0,
    heartbeat: Annotated[float, typer.Option(help="Seconds between two keepalives.")] = 1.0,
) -> None:
    """Open streams to workers, and print what they cost at both ends."""
    _print(asdict(asyncio.run(measure_streams(streams, seconds, heartbeat))))


@app.command()
def registry(
    workers: Annotated[int, typer.Option(min=4, help="Workers in the registry.")] = 10_000,
) -> None:
    """Poll a registry in which every worker changes, and print what that costs."""
    _print(asdict(asyncio.run(measure_registry(workers))))


@app.command()
def growth(
    folder: Annotated[
        Path | None, typer.Option("--plots", help="Folder for the plots (SVG).")
    ] = None,
) -> None:
    """Measure costs by workers, context and concurrency, and draw them."""
    keep_buffers()
    found = by_workers(), by_context(), by_concurrency()
    _print({"workers": found[0], "context": found[1], "concurrency": found[2]})
    if folder is not None:
        for name, drawn in plots(*found).items():
            (folder / f"{name}.svg").write_text(drawn + "\n")


if __name__ == "__main__":
    app()

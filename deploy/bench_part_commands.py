"""The benchmarks of parts: `baton bench transfer`, `policy`, `index` and `router`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.choices import Policy
from deploy.command_line import (
    DEFAULT_MODEL,
    MOST_WORKERS,
    Figures,
    clear_ends,
    counts_in,
    fail,
    names_in,
    say,
)
from deploy.exit_codes import ExitCode


def transfer(
    transport: Annotated[
        str,
        typer.Option(help="KV transports, out of shm,grpc,gloo,nixl; skips those not usable here."),
    ] = "shm,grpc,gloo,nixl",
    block_bytes: Annotated[
        int,
        typer.Option(
            min=64, help="Bytes per KV block, a multiple of 64; the demo model has 360 KiB."
        ),
    ] = 360 << 10,
    most: Annotated[
        int, typer.Option(min=1, metavar="MIB", help="Largest transfer, in MiB.")
    ] = 1024,
    repetitions: Annotated[
        int, typer.Option(min=1, help="Repetitions at the largest size; smaller sizes repeat more.")
    ] = 5,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model for the cost of an empty handoff; `none` leaves that out. Default:"
            " smollm2-135m-instruct."
        ),
    ] = None,
    certs: Annotated[
        str,
        typer.Option(
            metavar="FOLDER",
            help="Use mutual TLS for gRPC, with the certificates of this folder.",
        ),
    ] = "",
    output: Figures = None,
) -> None:
    """Measure the speed of each KV transport."""
    from deploy import model_store  # noqa: PLC0415
    from loadtest.empty_handoff import EMPTY_PER_REPETITION, EmptySettings  # noqa: PLC0415
    from loadtest.transfer_bench import TransferSettings, bench_transfers  # noqa: PLC0415

    with clear_ends():
        empty = None
        if model != "none":
            found = model_store.resolve(model or DEFAULT_MODEL, say, "auto")
            handoffs = EMPTY_PER_REPETITION * repetitions
            empty = EmptySettings(found.path, found.name, handoffs=handoffs)
        settings = TransferSettings(
            names_in(transport), block_bytes, most << 20, repetitions, certs
        )
        bench_transfers(settings, empty, say, Console(), output)


def policy(
    trace: Annotated[
        Path, typer.Option(metavar="FILE", help="Trace in Mooncake's format, plain or gzipped.")
    ],
    workers: Annotated[int, typer.Option(min=1, max=MOST_WORKERS, help="Prefill workers.")] = 4,
    scale_length: Annotated[
        float, typer.Option(help="Divide the lengths of prompts and blocks by this.")
    ] = 1.0,
    cache_blocks: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum blocks in a worker's cache. Default: unlimited."),
    ] = None,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens per block of the trace.")] = 512,
    routers: Annotated[
        int, typer.Option(min=1, max=64, help="Routers, which take requests in turn.")
    ] = 1,
    policy: Annotated[Policy, typer.Option(help="Routing policy.")] = "predictive",
    output: Figures = None,
) -> None:
    """Replay a trace through the router's policy and prefix index."""
    from loadtest.policy_bench import PolicyBenchSettings  # noqa: PLC0415
    from loadtest.policy_bench import bench_policy as bench  # noqa: PLC0415

    if not 0 < scale_length < float("inf"):
        fail(f"--scale-length must be above 0, not {scale_length}", code=ExitCode.USAGE)
    settings = PolicyBenchSettings(
        trace, workers, policy, scale_length, cache_blocks, block_tokens, routers
    )
    with clear_ends():
        bench(settings, say, Console(), output)


def index(
    workers: Annotated[int, typer.Option(min=1, max=65535, help="Workers in the index.")] = 1000,
    blocks: Annotated[
        int, typer.Option(min=1, help="Pairs of block and worker in the index.")
    ] = 10_000_000,
    rate: Annotated[float, typer.Option(min=1, help="Lookups per second.")] = 500.0,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Duration of the measurement in seconds.")
    ] = 20.0,
    output: Figures = None,
) -> None:
    """Measure lookups in a large prefix index, and its memory."""
    from loadtest.index_bench import IndexSettings  # noqa: PLC0415
    from loadtest.index_bench import bench_index as run_bench  # noqa: PLC0415

    with clear_ends():
        run_bench(IndexSettings(workers, blocks, rate, seconds), say, Console(), output)


def router(
    model: Annotated[str, typer.Option(help="Model whose tokenizer is used.")] = DEFAULT_MODEL,
    rate: Annotated[
        float, typer.Option(min=1, help="Requests per second during the latency test.")
    ] = 200.0,
    requests: Annotated[int, typer.Option(min=100, help="Requests of the latency test.")] = 2000,
    prompt_words: Annotated[int, typer.Option(min=1, help="Words per prompt.")] = 100,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 16,
    step_ms: Annotated[
        float,
        typer.Option(min=0, help="Milliseconds between an answer's tokens; 0 sends all at once."),
    ] = 10.0,
    streams: Annotated[
        int, typer.Option(min=1, help="Concurrent answers during the throughput test.")
    ] = 128,
    tokens_per_s: Annotated[
        str, typer.Option(help="Rates to try, until the router falls behind.")
    ] = "10000,15000,20000,25000,30000,40000,50000",
    peer: Annotated[
        str,
        typer.Option(
            metavar="COMMAND",
            help="Also measure another HTTP router, started by this command with {backend} (a URL)"
            " and {port} in it.",
        ),
    ] = "",
    output: Figures = None,
) -> None:
    """Measure the latency and the token rate of one router.

    The worker behind it echoes: no model runs, and the first token comes at once.
    """
    from deploy import model_store  # noqa: PLC0415
    from loadtest.router_bench import RouterBenchSettings  # noqa: PLC0415
    from loadtest.router_bench import bench_router as measure_router  # noqa: PLC0415

    with clear_ends():
        settings = RouterBenchSettings(
            model_store.resolve(model, say, "auto").path,
            rate=rate,
            requests=requests,
            prompt_words=prompt_words,
            answer_tokens=answer_tokens,
            step_s=step_ms / 1e3,
            streams=streams,
            tokens_per_s=counts_in(tokens_per_s),
            peer=peer,
        )
        measure_router(settings, say, Console(), output)

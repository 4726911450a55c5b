"""Of `baton bench` what measures parts: `transfer`, `policy`, `index` and `router`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

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


def transfer(
    transport: Annotated[
        str, typer.Option(help="Out of shm,grpc,gloo,nixl. Default: those that work here.")
    ] = "shm,grpc,gloo,nixl",
    block_bytes: Annotated[
        int,
        typer.Option(min=64, help="A multiple of 64. Default: the demo model's, 360 KiB."),
    ] = 360 << 10,
    most: Annotated[
        int, typer.Option(min=1, metavar="MIB", help="The largest size. Default: 1024.")
    ] = 1024,
    repetitions: Annotated[
        int, typer.Option(min=1, help="Of the largest sizes; smaller ones are moved oftener.")
    ] = 5,
    model: Annotated[
        str | None,
        typer.Option(
            help="For the cost of an empty handoff, as for `baton up`; `none` leaves it out."
            " Default: smollm2-135m-instruct."
        ),
    ] = None,
    certs: Annotated[
        str,
        typer.Option(
            metavar="FOLDER", help="Of `baton certs init`: gRPC by mutual TLS. Default: no TLS."
        ),
    ] = "",
    output: Figures = None,
) -> None:
    """Speed of each transport from one block to 1 GiB, against limits of the same run."""
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
        Path, typer.Option(metavar="FILE", help="In Mooncake's format, plain or gzipped.")
    ],
    workers: Annotated[
        int, typer.Option(min=1, max=MOST_WORKERS, help="Prefill workers.", show_default=True)
    ] = 4,
    scale_length: Annotated[
        float, typer.Option(help="Divides the lengths of prompts and blocks.")
    ] = 1.0,
    cache_blocks: Annotated[
        int | None, typer.Option(min=1, help="Most blocks in a worker's cache. Default: no bound.")
    ] = None,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a block of the trace.")] = 512,
    routers: Annotated[
        int, typer.Option(min=1, max=64, help="Routers that take requests in turns.")
    ] = 1,
    policy: Annotated[
        str,
        typer.Option(
            help="predictive, round_robin, least_loaded, prefix, power_of_two or session."
        ),
    ] = "predictive",
    output: Figures = None,
) -> None:
    """Replay a trace through the router's policy and prefix index, without models."""
    from typing import cast, get_args  # noqa: PLC0415

    from baton.config import PolicyName  # noqa: PLC0415
    from loadtest.policy_bench import PolicyBenchSettings  # noqa: PLC0415
    from loadtest.policy_bench import bench_policy as bench  # noqa: PLC0415

    if policy not in get_args(PolicyName):
        fail(f"--policy: {policy!r} is none of {', '.join(get_args(PolicyName))}")
    if not 0 < scale_length < float("inf"):
        fail(f"--scale-length: {scale_length} is not above 0")
    settings = PolicyBenchSettings(
        trace, workers, cast(PolicyName, policy), scale_length, cache_blocks, block_tokens, routers
    )
    with clear_ends():
        bench(settings, say, Console(), output)


def index(
    workers: Annotated[int, typer.Option(min=1, max=65535, help="Workers in the index.")] = 1000,
    blocks: Annotated[
        int, typer.Option(min=1, help="(block, worker) pairs in the index.")
    ] = 10_000_000,
    rate: Annotated[float, typer.Option(min=1, help="Lookups a second.")] = 500.0,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long they are measured.")] = 20.0,
    output: Figures = None,
) -> None:
    """Lookups of 256-block prompts in a prefix index of a given size, and its memory."""
    from loadtest.index_bench import IndexSettings  # noqa: PLC0415
    from loadtest.index_bench import bench_index as run_bench  # noqa: PLC0415

    with clear_ends():
        run_bench(IndexSettings(workers, blocks, rate, seconds), say, Console(), output)


def router(
    model: Annotated[
        str,
        typer.Option(
            help="Whose tokenizer is used, as for `baton up`. Default: smollm2-135m-instruct.",
            show_default=False,
        ),
    ] = DEFAULT_MODEL,
    rate: Annotated[
        float, typer.Option(min=1, help="Requests a second, while latencies are measured.")
    ] = 200.0,
    requests: Annotated[int, typer.Option(min=100, help="How many of them.")] = 2000,
    prompt_words: Annotated[int, typer.Option(min=1, help="Words of a prompt.")] = 100,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Tokens of their answers.")] = 16,
    step_ms: Annotated[
        float, typer.Option(min=0, help="Between an answer's tokens; 0 tells all at once.")
    ] = 10.0,
    streams: Annotated[
        int, typer.Option(min=1, help="Open answers, while tokens a second are measured.")
    ] = 128,
    tokens_per_s: Annotated[
        str, typer.Option(help="Rates that are tried, until the router falls behind.")
    ] = "10000,15000,20000,25000,30000,40000,50000",
    peer: Annotated[
        str,
        typer.Option(
            metavar="COMMAND",
            help="Measure another router too, which passes HTTP on: its command, with {backend}"
            " (a URL) and {port} in it. Default: none.",
            show_default=False,
        ),
    ] = "",
    output: Figures = None,
) -> None:
    """What a router on one core adds to a request, and how many tokens a second it passes on.

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

"""The benchmarks that start what they measure: `baton bench transfer`, `handoff` and `peers`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.cli.options.command_line import DEFAULT_MODEL, Figures, Model, clear_ends, names_in, say


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
    from deploy.models import model_store  # noqa: PLC0415
    from loadtest.handoff.empty_handoff import EMPTY_PER_REPETITION, EmptySettings  # noqa: PLC0415
    from loadtest.handoff.transfer_bench import TransferSettings, bench_transfers  # noqa: PLC0415

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


def peers(
    model: Model = DEFAULT_MODEL,
    vllm_bin: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="vLLM's command, as the load generator and as a peer. Default: `vllm` on PATH.",
        ),
    ] = None,
    llama_server: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="llama.cpp's server. Default: `llama-server` on PATH."),
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option(metavar="FILE", help="GGUF file in bf16, for llama.cpp.")
    ] = None,
    gguf_q8: Annotated[
        Path | None, typer.Option(metavar="FILE", help="GGUF file in Q8_0, for llama.cpp.")
    ] = None,
    workloads: Annotated[
        str,
        typer.Option(help="Workloads, out of a,b,c,d,e,f,g,s (see docs/lab-notes/performance.md)."),
    ] = "a,b,c,d",
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each workload.")] = 3,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Servers, out of baton, vllm, vllm-one-core, llamacpp, baton-int8, llamacpp-q8."
            " Default: all; the last two only with --gguf-q8."
        ),
    ] = None,
    alternate: Annotated[
        bool, typer.Option("--alternate", help="Restart every server for each repetition.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the first run's prompts.")] = 1,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every run to FILE as JSON.")
    ] = None,
    baton_args: Annotated[
        str, typer.Option(metavar="OPTIONS", help="More options for Baton's server.")
    ] = "",
) -> None:
    """Compare Baton with vLLM and llama.cpp.

    `vllm bench serve` drives each of them in turn.
    """
    from deploy.models import model_store  # noqa: PLC0415
    from loadtest.common.peer_servers import Programs, find_program  # noqa: PLC0415
    from loadtest.common.workload import choose_workloads  # noqa: PLC0415
    from loadtest.peers.peers import Comparison, default_peers, run_comparison  # noqa: PLC0415

    with clear_ends():
        programs = Programs(
            model=model_store.resolve(model, say).path,
            vllm=find_program(vllm_bin, "vllm"),
            llama_server=find_program(llama_server, "llama-server"),
            gguf=gguf,
            gguf_q8=gguf_q8,
            baton_arguments=baton_args,
        )
        comparison = Comparison(
            names_in(peers) if peers is not None else default_peers(programs),
            choose_workloads(names_in(workloads)),
            repetitions,
            alternate,
            seed,
        )
        run_comparison(comparison, programs, say, Console(), output)


def handoff(
    model: Model = DEFAULT_MODEL,
    transport: Annotated[
        str, typer.Option(help="KV transports, out of shm,grpc,gloo,nixl; one cluster each.")
    ] = "shm,grpc",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt length in tokens.")] = 1024,
    answer_tokens: Annotated[int, typer.Option(min=3, help="Answer length in tokens.")] = 16,
    repetitions: Annotated[int, typer.Option(min=1, help="Requests of each kind.")] = 15,
    output: Figures = None,
) -> None:
    """Measure what the KV handoff adds to a request.

    It starts its own clusters, and measures the first and the second token.
    """
    from deploy.models import model_store  # noqa: PLC0415
    from loadtest.common.peer_servers import Programs  # noqa: PLC0415
    from loadtest.handoff.handoff_bench import HandoffSettings, bench_handoffs  # noqa: PLC0415

    with clear_ends():
        programs = Programs(model=model_store.resolve(model, say, "auto").path)
        settings = HandoffSettings(names_in(transport), prompt_tokens, answer_tokens, repetitions)
        bench_handoffs(settings, programs, say, Console(), output)

"""The benchmarks that start whole clusters: `baton bench peers`, `handoff` and `overload`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.command_line import DEFAULT_MODEL, Figures, Model, clear_ends, names_in, say


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
        str, typer.Option(help="Workloads, out of a,b,c,d,e,s (see docs/performance.md).")
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
    from deploy import model_store  # noqa: PLC0415
    from loadtest.peer_servers import Programs, find_program  # noqa: PLC0415
    from loadtest.peers import Comparison, default_peers, run_comparison  # noqa: PLC0415
    from loadtest.workload import choose_workloads  # noqa: PLC0415

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
    from deploy import model_store  # noqa: PLC0415
    from loadtest.handoff_bench import HandoffSettings, bench_handoffs  # noqa: PLC0415
    from loadtest.peer_servers import Programs  # noqa: PLC0415

    with clear_ends():
        programs = Programs(model=model_store.resolve(model, say, "auto").path)
        settings = HandoffSettings(names_in(transport), prompt_tokens, answer_tokens, repetitions)
        bench_handoffs(settings, programs, say, Console(), output)


def overload(
    trace: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Trace in Azure's format: CSV, plain or .gz."),
    ],
    model: Model = DEFAULT_MODEL,
    scale_length: Annotated[
        float, typer.Option(min=1, help="Divide the trace's lengths by this.")
    ] = 8.0,
    factor: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01,
            help="Load as a multiple of the measured capacity; repeatable. Default: 0.5, 1, 3.",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds per load.")] = 60.0,
    probe_seconds: Annotated[
        float, typer.Option(min=1, help="Seconds per rate while the capacity is searched.")
    ] = 20.0,
    output: Figures = None,
) -> None:
    """Compare the admission modes below and above capacity."""
    from deploy import model_store  # noqa: PLC0415
    from loadtest.overload import OverloadSettings  # noqa: PLC0415
    from loadtest.overload import bench_overload as run_bench  # noqa: PLC0415
    from loadtest.peer_servers import Programs  # noqa: PLC0415

    with clear_ends():
        programs = Programs(model=model_store.resolve(model, say, "auto").path)
        factors = tuple(factor or (0.5, 1.0, 3.0))
        settings = OverloadSettings(trace, scale_length, factors, seconds, probe_seconds)
        run_bench(settings, programs, say, Console(), output)

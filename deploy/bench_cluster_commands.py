"""Of `baton bench` what starts whole clusters: `peers`, `handoff` and `overload`."""

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
            help="vLLM's command: the client, and a peer. Default: `vllm` on the path.",
        ),
    ] = None,
    llama_server: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="llama.cpp's server. Default: the one on the path."),
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model for llama.cpp in bf16.")
    ] = None,
    gguf_q8: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model for llama.cpp in Q8_0.")
    ] = None,
    workloads: Annotated[
        str, typer.Option(help="Out of a,b,c,d,e,s (docs/performance.md).")
    ] = "a,b,c,d",
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each workload.")] = 3,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Out of baton, vllm, vllm-one-core, llamacpp, baton-int8, llamacpp-q8."
            " Default: all, the last two if --gguf-q8 is given."
        ),
    ] = None,
    alternate: Annotated[
        bool, typer.Option("--alternate", help="Start every server afresh for each repetition.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the first run's prompts.")] = 1,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every run there, as JSON.")
    ] = None,
    baton_args: Annotated[
        str, typer.Option(metavar="OPTIONS", help="More options for `baton up`.")
    ] = "",
) -> None:
    """Start Baton and other servers in turn, drive each with `vllm bench serve`, print ratios."""
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
        str, typer.Option(help="Out of shm,grpc,gloo,nixl; a cluster for each.")
    ] = "shm,grpc",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompts.")] = 1024,
    answer_tokens: Annotated[
        int, typer.Option(min=3, help="Length of the answers that are handed off.")
    ] = 16,
    repetitions: Annotated[int, typer.Option(min=1, help="Requests of each kind.")] = 15,
    output: Figures = None,
) -> None:
    """What handing over adds to the first and the second token, in a cluster of its own."""
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
        typer.Option(metavar="FILE", help="As Azure publishes them: CSV, plain or .gz."),
    ],
    model: Model = DEFAULT_MODEL,
    scale_length: Annotated[float, typer.Option(min=1, help="Lengths are divided by it.")] = 8.0,
    factor: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01,
            help="Offered load over the measured capacity; repeatable. Default: 0.5, 1, 3.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="Seconds for which each load is offered.")
    ] = 60.0,
    probe_seconds: Annotated[
        float, typer.Option(min=1, help="How long each rate is, to find the capacity.")
    ] = 20.0,
    output: Figures = None,
) -> None:
    """Goodput and latency of each admission mode, below capacity and far beyond it."""
    from deploy import model_store  # noqa: PLC0415
    from loadtest.overload import OverloadSettings  # noqa: PLC0415
    from loadtest.overload import bench_overload as run_bench  # noqa: PLC0415
    from loadtest.peer_servers import Programs  # noqa: PLC0415

    with clear_ends():
        programs = Programs(model=model_store.resolve(model, say, "auto").path)
        factors = tuple(factor or (0.5, 1.0, 3.0))
        settings = OverloadSettings(trace, scale_length, factors, seconds, probe_seconds)
        run_bench(settings, programs, say, Console(), output)

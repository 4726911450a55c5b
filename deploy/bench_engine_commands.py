"""`baton profile`, and the benchmarks of one engine: `baton bench quality`, `speculation`, …"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.choices import DraftingMethod, KvDtype
from deploy.command_line import (
    DEFAULT_MODEL,
    Figures,
    Model,
    clear_ends,
    clear_errors,
    counts_in,
    fail,
    names_in,
    say,
)
from deploy.engine_options import DeviceOptions, EngineOptions, Quantization
from deploy.exit_codes import ExitCode
from deploy.option_group import takes


@takes(DeviceOptions)
def profile(
    options: DeviceOptions,
    quantization: Quantization = "auto",
    kv_dtype: Annotated[
        KvDtype, typer.Option(help="Data type of the KV cache; auto means that of --dtype.")
    ] = "auto",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt length in tokens.")] = 1024,
    context_tokens: Annotated[
        int, typer.Option(min=1, help="Cached tokens of each decoding sequence.")
    ] = 1024,
    batches: Annotated[str, typer.Option(help="Batch sizes of decode steps.")] = "1,8,32",
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a trace for Perfetto or chrome://tracing."),
    ] = None,
) -> None:
    """Time prefill and decode steps of one engine.

    It needs no cluster, and compares the steps with this machine's limits.
    """
    from loadtest.profile import ProfileSettings, draw, profile_engine  # noqa: PLC0415
    from loadtest.whole_table import print_whole  # noqa: PLC0415

    with clear_errors():
        engine = options.settings_on_device(quantization, kv_dtype)
        sizes = counts_in(batches)
        settings = ProfileSettings(engine, prompt_tokens, context_tokens, sizes, output)
        found = profile_engine(settings, say)
    print_whole(Console(), draw(found))


@takes(DeviceOptions)
def quality(
    options: DeviceOptions,
    text: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Text file, or a .jsonl file with `turns` in each row."),
    ],
    quantizations: Annotated[
        str,
        typer.Option(
            help="Formats to compare with the first one, out of none,int8,int4,fp8,auto, each"
            " optionally with a KV type such as none/int8."
        ),
    ] = "none,int8,int4,auto",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text to use.")] = 8192,
    window: Annotated[int, typer.Option(min=2, help="Tokens computed together.")] = 512,
    answer: Annotated[int, typer.Option(min=1, help="Tokens per compared answer.")] = 64,
) -> None:
    """Compare quantization formats by perplexity and agreement."""
    from engine.engine import Engine, build_engine  # noqa: PLC0415
    from loadtest.quality import (  # noqa: PLC0415
        Candidate,
        QualitySettings,
        draw,
        measure,
        read_tokens,
    )
    from loadtest.whole_table import print_whole  # noqa: PLC0415

    def build(name: str) -> Engine:
        quantization, _, kv_dtype = name.partition("/")
        return build_engine(options.settings_on_device(quantization, kv_dtype or "auto"))

    names = names_in(quantizations)
    if not names:
        fail("--quantizations is empty", code=ExitCode.USAGE)
    with clear_errors():
        first = names[0].partition("/")[0]
        tokenizer = options.folder(first) / "tokenizer.json"
        found = measure(
            [Candidate(name, functools.partial(build, name)) for name in names],
            read_tokens(text, tokenizer),
            QualitySettings(tokens, window, answer=answer),
            say,
        )
    print_whole(Console(), draw(found))


@takes(EngineOptions)
def speculation(
    options: EngineOptions,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of .jsonl files with `category` and `turns` (default: copying tasks).",
        ),
    ] = None,
    quantization: Quantization = "auto",
    drafter: Annotated[
        DraftingMethod, typer.Option(help="Speculative method to compare with none.")
    ] = "ngram",
    draft_model: Annotated[
        str,
        typer.Option(
            metavar="NAME|PATH",
            help="Smaller model for `draft`, or folder of the heads for `eagle` and `medusa`.",
        ),
    ] = "",
    categories: Annotated[
        str, typer.Option(help="Categories of prompts; `copy` is built in (default: all).")
    ] = "",
    concurrency: Annotated[str, typer.Option(help="Numbers of concurrent sequences.")] = "1,4,16",
    rows: Annotated[
        int,
        typer.Option(min=1, help="Prompts per category; at least twice the concurrency is used."),
    ] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per answer.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")
    ] = 0.0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs with and without drafts.")] = 2,
    output: Figures = None,
) -> None:
    """Measure the speedup of speculative decoding on the CPU."""
    from deploy.drafter_folder import drafter_folder  # noqa: PLC0415
    from loadtest.speculation import SpeculationSettings  # noqa: PLC0415
    from loadtest.speculation import bench_speculation as run_bench  # noqa: PLC0415

    with clear_ends():
        engine = replace(
            options.settings(quantization),
            drafter=drafter,
            draft_model=drafter_folder(drafter, draft_model, say) if draft_model else None,
        )
        settings = SpeculationSettings(
            engine,
            prompts,
            names_in(categories),
            counts_in(concurrency),
            rows,
            tokens,
            temperature,
            repeats,
        )
        run_bench(settings, say, Console(), output)


def grammar(
    model: Model = DEFAULT_MODEL,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each kind at each size.")] = 100,
    output: Figures = None,
) -> None:
    """Measure what structured output adds to a step."""
    from deploy import model_store  # noqa: PLC0415
    from loadtest.grammar_bench import GrammarBenchSettings  # noqa: PLC0415
    from loadtest.grammar_bench import bench_grammar as run_bench  # noqa: PLC0415

    with clear_ends():
        path = model_store.resolve(model, say, "auto").path
        run_bench(GrammarBenchSettings(path, steps=steps, output=output), say, Console())


def tiers(
    model: Model = DEFAULT_MODEL,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Prompt length in tokens.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Repeated prompts of each kind.")] = 5,
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder on the disk to measure (default: a temporary one)."
        ),
    ] = None,
    output: Figures = None,
) -> None:
    """Measure time to first token from each KV tier."""
    from deploy import model_store  # noqa: PLC0415
    from loadtest.tier_bench import TierBenchSettings  # noqa: PLC0415
    from loadtest.tier_bench import bench_tiers as run_bench  # noqa: PLC0415

    with clear_ends():
        path = model_store.resolve(model, say, "auto").path
        settings = TierBenchSettings(path, prompt_tokens, rounds, folder, output)
        run_bench(settings, say, Console())

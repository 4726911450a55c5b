"""`baton profile`, and of `baton bench` what runs one engine: `quality`, `speculation`, …"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

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
from deploy.option_group import takes


@takes(DeviceOptions)
def profile(
    options: DeviceOptions,
    quantization: Quantization = "auto",
    kv_dtype: Annotated[str, typer.Option(help="As for `baton up`: auto, int8 or fp8.")] = "auto",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt.")] = 1024,
    context_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens in the cache of each sequence that decodes.")
    ] = 1024,
    batches: Annotated[str, typer.Option(help="Sequences that decode at a time.")] = "1,8,32",
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a trace there, for chrome://tracing or Perfetto."),
    ] = None,
) -> None:
    """Prefill and decode steps of one engine, without a cluster, against the machine's limits."""
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
        typer.Option(metavar="FILE", help="A text, or a .jsonl file whose rows have `turns`."),
    ],
    quantizations: Annotated[
        str,
        typer.Option(
            help="Out of none,int8,int4,fp8,auto, each perhaps with a KV type, as in none/int8;"
            " compared with the first."
        ),
    ] = "none,int8,int4,auto",
    tokens: Annotated[int, typer.Option(min=2, help="Where the text is cut.")] = 8192,
    window: Annotated[int, typer.Option(min=2, help="Tokens that are computed together.")] = 512,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of each compared answer.")] = 64,
) -> None:
    """Perplexity and greedy agreement of a model's quantisations, without a cluster."""
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
        fail("--quantizations names none")
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
            help="Has .jsonl files of `category` and `turns`. Default: tasks of copying alone.",
        ),
    ] = None,
    quantization: Quantization = "auto",
    drafter: Annotated[str, typer.Option(help="What is compared with none.")] = "ngram",
    draft_model: Annotated[
        str,
        typer.Option(metavar="NAME|PATH", help="As for `baton up`."),
    ] = "",
    categories: Annotated[
        str, typer.Option(help="Out of those of the files, and copy. Default: all.")
    ] = "",
    concurrency: Annotated[str, typer.Option(help="Sequences at a time.")] = "1,4,16",
    rows: Annotated[
        int, typer.Option(min=1, help="Prompts of a category, or twice the concurrency.")
    ] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    repeats: Annotated[int, typer.Option(min=1, help="How often both ways are run.")] = 2,
    output: Figures = None,
) -> None:
    """Tokens a second with and without drafts, of one engine on the CPU, without a cluster."""
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
    steps: Annotated[int, typer.Option(min=2, help="Steps of each kind, at each size.")] = 100,
    output: Figures = None,
) -> None:
    """What following a JSON schema costs the steps of one engine."""
    from deploy import model_store  # noqa: PLC0415
    from loadtest.grammar_bench import GrammarBenchSettings  # noqa: PLC0415
    from loadtest.grammar_bench import bench_grammar as run_bench  # noqa: PLC0415

    with clear_ends():
        path = model_store.resolve(model, say, "auto").path
        run_bench(GrammarBenchSettings(path, steps=steps, output=output), say, Console())


def tiers(
    model: Model = DEFAULT_MODEL,
    prompt_tokens: Annotated[int, typer.Option(min=64, help="Length of a prompt.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Prompts that come back, of each kind.")] = 5,
    folder: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="On the disk to measure. Default: a temporary one."),
    ] = None,
    output: Figures = None,
) -> None:
    """How soon a prompt begins whose KV is computed, in the pool, in host memory, or on disk."""
    from deploy import model_store  # noqa: PLC0415
    from loadtest.tier_bench import TierBenchSettings  # noqa: PLC0415
    from loadtest.tier_bench import bench_tiers as run_bench  # noqa: PLC0415

    with clear_ends():
        path = model_store.resolve(model, say, "auto").path
        settings = TierBenchSettings(path, prompt_tokens, rounds, folder, output)
        run_bench(settings, say, Console())

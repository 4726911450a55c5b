"""The benchmarks of one engine: `baton profile` and `baton bench quality`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from baton.config.choices import Dtype, KvDtype
from baton.config.choices import Quantization as QuantizationName
from deploy.cli.options.command_line import (
    DEFAULT_MODEL,
    Model,
    clear_errors,
    counts_in,
    fail,
    names_in,
    say,
)
from deploy.cli.options.exit_codes import ExitCode
from deploy.cli.options.option_group import takes

if TYPE_CHECKING:
    from pathlib import Path

    from engine.engine import EngineSettings

Quantization = Annotated[
    QuantizationName,
    typer.Option(help="Weight format: auto keeps that of the files, none does not quantize."),
]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The model and its settings, as options of `baton profile` and `baton bench quality`."""

    model: Model = DEFAULT_MODEL
    dtype: Annotated[Dtype, typer.Option(help="Data type of activations.")] = "bfloat16"
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 means one per core.")] = 0
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, or auto: a GPU if there is one.")
    ] = "auto"

    def settings(self, quantization: str, kv_dtype: str) -> EngineSettings:
        """Return the engine's settings for weights and KV in these formats. Raises BatonError."""
        from engine.engine import EngineSettings  # noqa: PLC0415

        return EngineSettings(
            self.folder(quantization),
            dtype=self.dtype,
            device=self.device,
            threads=self.threads,
            quantization=quantization,
            kv_dtype=kv_dtype,
        )

    def folder(self, quantization: str) -> Path:
        """Return the model's folder, including the files for weights in the format
        ``quantization``. Raises BatonError."""
        from deploy.models import model_store  # noqa: PLC0415

        return model_store.resolve(self.model, say, quantization).path


@takes(EngineOptions)
def profile(
    options: EngineOptions,
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
    from loadtest.engine.profile import ProfileSettings, draw, profile_engine  # noqa: PLC0415
    from planning.common.report import print_whole  # noqa: PLC0415

    with clear_errors():
        engine = options.settings(quantization, kv_dtype)
        sizes = counts_in(batches)
        settings = ProfileSettings(engine, prompt_tokens, context_tokens, sizes, output)
        found = profile_engine(settings, say)
    print_whole(Console(), draw(found))


@takes(EngineOptions)
def quality(
    options: EngineOptions,
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
    from engine.build import build_engine  # noqa: PLC0415
    from engine.engine import Engine  # noqa: PLC0415
    from loadtest.engine.quality import (  # noqa: PLC0415
        Candidate,
        QualitySettings,
        draw,
        measure,
        read_tokens,
    )
    from planning.common.report import print_whole  # noqa: PLC0415

    def build(name: str) -> Engine:
        quantization, _, kv_dtype = name.partition("/")
        return build_engine(options.settings(quantization, kv_dtype or "auto"))

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

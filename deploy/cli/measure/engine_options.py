"""The options of the commands that run one engine without a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.options.choices import Dtype
from deploy.cli.options.choices import Quantization as QuantizationName
from deploy.cli.options.command_line import DEFAULT_MODEL, Model, say

if TYPE_CHECKING:
    from pathlib import Path

    from engine.engine import EngineSettings

Quantization = Annotated[
    QuantizationName,
    typer.Option(help="Weight format: auto keeps that of the files, none does not quantize."),
]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The model and how it is computed, for `baton profile` and `baton bench quality`."""

    model: Model = DEFAULT_MODEL
    dtype: Annotated[Dtype, typer.Option(help="Data type of activations.")] = "bfloat16"
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 means one per core.")] = 0
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, or auto: a GPU if there is one.")
    ] = "auto"

    def settings(self, quantization: str, kv_dtype: str) -> EngineSettings:
        """Settings of an engine with these formats. Raises BatonError."""
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
        """The model's folder, with files for such weights. Raises BatonError."""
        from deploy.models import model_store  # noqa: PLC0415

        return model_store.resolve(self.model, say, quantization).path

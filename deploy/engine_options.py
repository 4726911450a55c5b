"""The options of the commands that run one engine without a cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.choices import Dtype
from deploy.choices import Quantization as QuantizationName
from deploy.command_line import DEFAULT_MODEL, Model, say

if TYPE_CHECKING:
    from pathlib import Path

    from engine.engine import EngineSettings

Quantization = Annotated[
    QuantizationName,
    typer.Option(help="Weight format: auto keeps that of the files, none does not quantize."),
]


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The model and how it is computed, for `baton bench speculation` on the CPU."""

    model: Model = DEFAULT_MODEL
    dtype: Annotated[Dtype, typer.Option(help="Data type of activations.")] = "bfloat16"
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 means one per core.")] = 0

    def settings(self, quantization: str) -> EngineSettings:
        """Of an engine on the CPU with such weights. Raises BatonError."""
        from engine.engine import EngineSettings  # noqa: PLC0415

        return EngineSettings(
            self.folder(quantization),
            dtype=self.dtype,
            device="cpu",
            threads=self.threads,
            quantization=quantization,
        )

    def folder(self, quantization: str) -> Path:
        """The model's, with files for such weights. Raises BatonError."""
        from deploy import model_store  # noqa: PLC0415

        return model_store.resolve(self.model, say, quantization).path


@dataclass(frozen=True, slots=True)
class DeviceOptions(EngineOptions):
    """The same where it may be a GPU: `baton profile`, `baton bench quality`."""

    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, or auto: a GPU if there is one.")
    ] = "auto"

    def settings_on_device(self, quantization: str, kv_dtype: str) -> EngineSettings:
        """Of an engine on that device. Raises BatonError."""
        return replace(self.settings(quantization), device=self.device, kv_dtype=kv_dtype)

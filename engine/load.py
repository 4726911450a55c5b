"""Loads a rank's part of a model onto its device, before the KV cache is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from baton.errors import ConfigError
from engine.checkpoint.model_config import ModelConfig, load_model_config
from engine.engine import EngineSettings, device_of
from engine.model.model import DecoderModel
from engine.model.weights import bytes_per_weight, kind_of_most, load_weights
from engine.parallel.context_parallel import ContextExchange
from engine.parallel.rank_group import RankGroup
from engine.parallel.rank_model import RankModel
from engine.parallel.shard import config_of, shard_of
from engine.parallel.weight_slices import WeightSlices
from engine.quantization.weight import QuantKind
from engine.speculation.heads.loading import HEADS

if TYPE_CHECKING:
    from engine.gpu.fused_weights import GpuWeights

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The model to load, and its checked settings."""

    settings: EngineSettings
    config: ModelConfig
    """Configuration of the whole model, even if a rank loads only a part."""
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A rank's part of a model, loaded onto its device."""

    source: ModelSource
    model: DecoderModel
    weights: GpuWeights | None
    """Weights in the form for GPU kernels; None on a CPU."""
    bytes_per_weight: tuple[float, float]
    """Mean number of bytes of a weight, including scales: (in the layers' matrices, in the
    head)."""
    quantization: QuantKind | None
    """Quantized type that most values of the layers' matrices have; None if most are not
    quantized."""

    @property
    def context_ranks(self) -> int:
        """Number of ranks that divide prompts."""
        return 1 if self.model.context is None else self.model.context.group.ranks

    @property
    def model_ranks(self) -> int:
        """Number of ranks that divide the model, and so each block of KV."""
        return 1 if self.model.rank is None else self.model.rank.shard.ranks


def model_source(settings: EngineSettings, *, ranked: bool) -> ModelSource:
    """Check the settings of the model to load. ``ranked``: true if the worker has several ranks.
    Raises ConfigError.

    Also sets the number of torch's compute threads in this process.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = device_of(settings)
    if settings.dtype not in _DTYPES:
        raise ConfigError(f"dtype {settings.dtype} is unknown; known: {', '.join(_DTYPES)}")
    config = load_model_config(settings.model_path, settings.max_model_len)
    if ranked:
        _check_ranks(settings)
    return ModelSource(settings, config, device, _DTYPES[settings.dtype])


def load_model(source: ModelSource, group: RankGroup | None) -> LoadedModel:
    """Load the model, or the part of it that belongs to this rank of ``group``. Raises ConfigError.

    Only the returned object refers to the weights, so that each weight is freed once it is packed
    or fused.
    """
    settings, device = source.settings, source.device
    model, per_weight, kind = _decoder(source, group)
    if device.type == "cpu":
        return LoadedModel(source, model, None, per_weight, kind)
    # Imported here: it is slow to import, and CPUs do not need it.
    from engine.gpu.fused_weights import gpu_weights  # noqa: PLC0415

    # Removes the layers from the model.
    weights = gpu_weights(model, deterministic=settings.deterministic)
    return LoadedModel(source, model, weights, per_weight, kind)


def _decoder(
    source: ModelSource, group: RankGroup | None
) -> tuple[DecoderModel, tuple[float, float], QuantKind | None]:
    settings, config, device, dtype = source.settings, source.config, source.device, source.dtype
    path, quantization = settings.model_path, settings.quantization
    if group is None or settings.divides_context:
        weights = load_weights(path, device, dtype, quantization)
        per_weight, kind = bytes_per_weight(weights.items()), kind_of_most(weights.items())
        model = DecoderModel(config, weights, device)
        model.context = None if group is None else ContextExchange(group)
        return model, per_weight, kind
    shard = shard_of(config, group.rank, group.ranks)
    slices = WeightSlices(config, shard)
    weights = load_weights(path, device, dtype, quantization, slices)
    per_weight, kind = bytes_per_weight(weights.items()), kind_of_most(weights.items())
    own = config_of(config, shard)
    return DecoderModel(own, weights, device, RankModel(shard, group)), per_weight, kind


def _check_ranks(settings: EngineSettings) -> None:
    """Raise ConfigError for settings that several ranks do not support."""
    degree = "cp" if settings.divides_context else "tp"
    if settings.deterministic:
        raise ConfigError(
            f"deterministic needs {degree} 1: with more ranks, sums are computed in another order;"
            f" set {degree} to 1"
        )
    if settings.drafter in ("draft", *HEADS):
        raise ConfigError(
            f"drafter {settings.drafter} has KV or weights that cannot be divided among ranks: use"
            f" drafter ngram or none with {degree} above 1"
        )

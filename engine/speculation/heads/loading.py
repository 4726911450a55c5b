"""Loads heads that were trained for a target, EAGLE-3's and Medusa's, and makes their drafters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from baton.host.cache import cache_dir
from engine.checkpoint.model_config import ModelConfig
from engine.cpu.decoder import cpu_decoder
from engine.kv.kv_cache import KvCache
from engine.model.model import DecoderModel
from engine.model.weights import fingerprint, load_weights
from engine.quantization.packed_cache import PackedCache
from engine.quantization.weight import QuantizedWeight
from engine.speculation.heads.eagle_config import load_eagle_config
from engine.speculation.heads.eagle_drafter import EagleDrafter
from engine.speculation.heads.eagle_model import EagleModel, EagleTorchStep
from engine.speculation.heads.medusa import MedusaDrafter, MedusaModel, load_medusa_config
from engine.speculation.model_drafter import FilledSlots, ModelDrafter, Sampler

HEADS = ("eagle", "medusa")
"""Names in the configuration of the speculative methods that use trained heads."""


@dataclass(frozen=True, slots=True)
class EagleHead:
    """A loaded EAGLE-3 head for a target; makes the drafter."""

    model: EagleModel
    name: str
    """Fingerprint of the head's weights. It is part of the compatibility check, since the head's KV
    is in the blocks."""

    @property
    def config(self) -> ModelConfig | None:
        """Shape of the head's layer, whose KV is in the cache's group ``drafter``."""
        return self.model.config

    def drafter(self, target: DecoderModel, cache: KvCache, sampler: Sampler) -> ModelDrafter:
        """Make the drafter. It computes the head with the C++ decoder if possible, over the cache's
        group ``drafter``."""
        group = cache.drafter
        assert group is not None, "an EAGLE-3 head has a group of the cache"
        key = f"{self.name}-eagle-{_quantization(target)}"
        steps = cpu_decoder(self.model, group, PackedCache(cache_dir()), key)
        return EagleDrafter(
            self.model,
            steps or EagleTorchStep(self.model, group, group.data.device),
            FilledSlots(group),
            sampler,
        )


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """Loaded Medusa heads for a target; makes the drafter."""

    model: MedusaModel
    name: str = ""
    """Always empty: the heads have no KV, and the target's KV does not depend on them."""

    @property
    def config(self) -> ModelConfig | None:
        """None, because Medusa heads have no KV in the cache."""
        return None

    def drafter(self, target: DecoderModel, cache: KvCache, sampler: Sampler) -> ModelDrafter:
        """Make the drafter, which uses no KV."""
        return MedusaDrafter(self.model, target.config.layers, target.config.vocab_size, sampler)


def load_heads(
    drafter: str, folder: Path, target: DecoderModel, device: torch.device, dtype: str
) -> EagleHead | MedusaHeads:
    """Load the EAGLE or Medusa heads in ``folder`` for a target; ``drafter`` is one of ``HEADS``.

    Raises ConfigError if the folder has no such heads, or heads of another target.
    """
    if drafter == "medusa":
        return MedusaHeads(load_medusa(folder, target, device))
    with fingerprint(folder, dtype) as hashed:
        return EagleHead(load_eagle(folder, target, device), hashed.result())


def load_eagle(folder: Path, target: DecoderModel, device: torch.device) -> EagleModel:
    """Load the EAGLE-3 head in ``folder``. Raises ConfigError, as ``load_eagle_config`` does."""
    config = load_eagle_config(folder, target.config)
    weights = load_weights(folder, device, target.dtype, _quantization(target), heads=True)
    return EagleModel(config, weights, target, device)


def load_medusa(folder: Path, target: DecoderModel, device: torch.device) -> MedusaModel:
    """Load the Medusa heads in ``folder``. Raises ConfigError, as ``load_medusa_config`` does."""
    config = load_medusa_config(folder, target.config)
    return MedusaModel(config, load_weights(folder, device, target.dtype, heads=True), target)


def _quantization(target: DecoderModel) -> str:
    """Return the quantization to apply to heads. Published heads are not quantized.

    If the target is quantized, its heads are quantized to 8 bits: speed matters more than
    precision, since drafts do not change an answer.
    """
    quantized = any(isinstance(layer.query.weight, QuantizedWeight) for layer in target.layers)
    return "int8" if quantized else "auto"

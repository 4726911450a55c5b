"""Chooses the part of each checkpoint tensor that a rank has, by the tensor's name.

Layers with divided outputs (query, key, value, gate, up, embedding, head) are cut by rows. Layers
with divided inputs (the output of attention and of the MLP) are cut by columns. Their bias is only
on rank 0, since the ranks' results are added.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton.errors import ConfigError
from engine.checkpoint.model_config import ModelConfig
from engine.parallel.shard import ModelShard
from engine.quantization.weight import QuantizedWeight, concat_rows

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_FUSED_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
_HEADS = ("lm_head", "tied_lm_head")

ReadSpan = Callable[[int, range], torch.Tensor]
"""Reads a range of a tensor's rows (dimension 0) or columns (dimension 1)."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The ranges of a tensor, along one dimension, that a rank holds, in order. If there are no
    ranges, the rank holds the whole tensor."""

    dim: int = 0
    runs: tuple[range, ...] = ()

    def tensor(self, read: ReadSpan) -> torch.Tensor:
        """Read the rank's part of a plain tensor, contiguous, into its own memory."""
        parts = [read(self.dim, run) for run in self.runs]
        return (
            torch.cat(parts, dim=self.dim)
            if len(parts) > 1
            else parts[0].clone(memory_format=torch.contiguous_format)
        )

    def quantized(self, weight: QuantizedWeight) -> QuantizedWeight:
        """Copy the rank's part of a quantized matrix into its own memory.

        Raises ValueError if a range of inputs cuts a quantization group, unless each row of the
        matrix has only one group.
        """
        if not self.runs:
            return weight.clone()
        if self.dim == 0:
            parts = [weight.rows(slice(run.start, run.stop)) for run in self.runs]
            return concat_rows(parts) if len(parts) > 1 else parts[0].clone()
        (run,) = self.runs
        return weight.inputs(run).clone()


class WeightSlices:
    """The parts of all of a checkpoint's tensors that one rank has. Tensor names are Hugging
    Face's."""

    def __init__(self, config: ModelConfig, shard: ModelShard) -> None:
        """``config`` is the configuration of the whole model."""
        self._shard = shard
        dim, inner = config.head_dim, config.intermediate_size
        wide, narrow = config.heads * dim, config.kv_heads * dim
        query, key = _scaled(shard.query_heads, dim), _scaled(shard.kv_heads, dim)
        self._rows: dict[str, tuple[range, ...]] = {
            "q_proj": (query,),
            "k_proj": (key,),
            "v_proj": (key,),
            "qkv_proj": (query, _moved(key, wide), _moved(key, wide + narrow)),
            "gate_proj": (shard.inner,),
            "up_proj": (shard.inner,),
            "gate_up_proj": (shard.inner, _moved(shard.inner, inner)),
            "embed_tokens": (shard.vocabulary,),
            **dict.fromkeys(_HEADS, (shard.vocabulary,)),
        }
        if config.qk_norm == "full":
            self._rows |= {"q_norm": (query,), "k_norm": (key,)}
        self._columns = {"o_proj": query, "down_proj": shard.inner}

    def of(self, name: str) -> Cut | None:
        """Return the part of the tensor or matrix ``name`` that the rank has; None if the rank has
        no part of it."""
        if not name.startswith(("model.", *_HEADS)):
            return None
        if _FUSED_EXPERTS.search(name):
            return Cut(0, (self._shard.experts,))
        expert = _EXPERT.search(name)
        if expert is not None:
            return Cut() if int(expert[1]) in self._shard.experts else None
        module, _, kind = name.rpartition(".")
        layer = module.rpartition(".")[2]
        if layer in self._columns and kind == "bias":
            return Cut() if self._shard.leads else None
        if layer in self._columns:
            return Cut(1, (self._columns[layer],))
        return Cut(0, self._rows.get(layer, ()))

    def quantized(self, name: str, weight: QuantizedWeight) -> QuantizedWeight | None:
        """Copy the rank's part of the quantized matrix ``name``; None if the rank has no part of
        it. Raises ConfigError."""
        cut = self.of(name)
        try:
            return None if cut is None else cut.quantized(weight)
        except ValueError as error:
            raise ConfigError(
                f"the quantized weight {name} cannot be divided for tp {self._shard.ranks}:"
                f" {error}; use another tp, or quantization none"
            ) from error


def _scaled(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)


def _moved(run: range, by: int) -> range:
    return range(run.start + by, run.stop + by)

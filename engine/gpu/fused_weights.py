"""Converts a decoder's weights to the form for GPU kernels, in which layers with the same input are
fused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from engine.checkpoint.model_config import ModelConfig
from engine.gpu.kernels.linear.fixed import fixed_linear
from engine.gpu.kernels.linear.quantized import (
    MAX_ROWS,
    GpuWeight,
    dequantized,
    gpu_weight,
    quantized_linear,
)
from engine.model.layers import Experts, GatedMlp, Linear
from engine.model.model import DecoderModel, Layer
from engine.parallel.context_parallel import ContextExchange
from engine.parallel.rank_model import RankModel
from engine.quantization.weight import QuantizedWeight, can_concat, concat_rows, dequantize

PIECE_VALUES = 1 << 25
"""Number of weights that are dequantized at a time when a large batch needs plain weights."""


class PlainLinear:
    """A linear layer with plain weights, computed by cuBLAS, or by a kernel whose sums have a fixed
    order."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, deterministic: bool
    ) -> None:
        self._weight = weight
        self._bias = bias
        self._deterministic = deterministic

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer: [rows, out] from ``x`` [rows, in], in the type of ``x``."""
        if self._deterministic:
            return fixed_linear(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)


class QuantizedLinear:
    """A linear layer with quantized weights. A kernel computes small batches; large ones use
    dequantized weights."""

    def __init__(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, *, deterministic: bool
    ) -> None:
        """Raises ValueError if the kernel does not support the weight's group size."""
        self._weight = gpu_weight(weight.kind, weight.codes, weight.scales, weight.mins)
        self._columns = weight.columns
        self._bias = bias
        self._deterministic = deterministic

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer: [rows, out] from ``x`` [rows, in], in the type of ``x``."""
        if self._columns is not None:
            x = x[:, self._columns]
        if self._deterministic:
            parts = (
                quantized_linear(part, self._weight, self._bias, tile_rows=MAX_ROWS)
                for part in torch.split(x, MAX_ROWS)
            )
            return torch.cat(list(parts))
        if len(x) <= MAX_ROWS:
            return quantized_linear(x, self._weight, self._bias)
        return self._dense(x)

    def _dense(self, x: torch.Tensor) -> torch.Tensor:
        weight = self._weight
        out = torch.empty((len(x), weight.outputs), dtype=x.dtype, device=x.device)
        step = max(1, PIECE_VALUES // weight.inputs)
        for start in range(0, weight.outputs, step):
            rows = slice(start, start + step)
            values = dequantized(_outputs(weight, rows)).to(x.dtype)
            out[:, rows] = F.linear(x, values, None if self._bias is None else self._bias[rows])
        return out


def _outputs(weight: GpuWeight, rows: slice) -> GpuWeight:
    """Select the part of a quantized weight for the outputs ``rows``; no data is copied."""
    return replace(
        weight,
        codes=weight.codes[:, rows],
        scales=weight.scales[:, rows],
        mins=None if weight.mins is None else weight.mins[:, rows],
    )


class SeveralLinears:
    """Linear layers that have the same input and are computed one after another, because their
    weights cannot be fused."""

    def __init__(self, layers: Sequence[GpuLinear]) -> None:
        self._layers = layers

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply all layers: [rows, all outputs] from ``x`` [rows, in], in the type of ``x``."""
        return torch.cat([layer(x) for layer in self._layers], dim=1)


GpuLinear = PlainLinear | QuantizedLinear | SeveralLinears


@dataclass(frozen=True, slots=True)
class FusedMlp:
    """A gated MLP whose ``gate_up`` layer returns the gate's outputs, followed by those of
    ``up``."""

    gate_up: GpuLinear
    down: GpuLinear


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Experts with plain weights, stacked in one tensor per projection.

    ``gate_up`` is [experts, 2 * inner, hidden], ``down`` is [experts, hidden, inner].
    """

    router: Linear
    gate_up: torch.Tensor
    down: torch.Tensor
    first: int
    """Number of the first expert of this rank: with several ranks, each has a range of the
    experts."""


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """Experts that cannot be stacked, and are computed one after another."""

    router: GpuLinear
    experts: tuple[FusedMlp, ...]
    first: int
    """Number of the first expert of this rank: with several ranks, each has a range of the
    experts."""


GpuMlp = FusedMlp | StackedExperts | SeparateExperts


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """The weights of one layer for GPU kernels. They are those of ``engine.model.model.Layer``,
    with query, key and value fused, and gate and up fused."""

    attention_norm: torch.Tensor | None
    query_key_value: GpuLinear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: GpuLinear
    attention_post_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp: GpuMlp
    mlp_post_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class GpuWeights:
    """All weights of a decoder, in the form for GPU kernels."""

    config: ModelConfig
    """Configuration of this rank's shard of the model."""
    rank: RankModel | None
    context: ContextExchange | None
    dtype: torch.dtype
    deterministic: bool
    """Whether a row's result does not depend on other rows, bit for bit, because every sum has a
    fixed order."""
    embedding: torch.Tensor | QuantizedWeight
    embedding_scale: float
    layers: tuple[GpuLayer, ...]
    norm: torch.Tensor
    head: GpuLinear
    tables: tuple[torch.Tensor, ...]
    """The rotary table of each layer, fp32 [context_length, 2, rotary_dim / 2]."""

    @property
    def quantized(self) -> bool:
        """Whether any layer, or the head, has quantized weights."""
        return not isinstance(self.head, PlainLinear) or any(map(_has_codes, self.layers))

    @property
    def waits(self) -> bool:
        """Whether the host must wait for the GPU during a forward pass. Such a pass cannot be
        captured."""
        return any(isinstance(layer.mlp, SeparateExperts) for layer in self.layers)


def gpu_weights(model: DecoderModel, *, deterministic: bool = False) -> GpuWeights:
    """Convert a model's weights for the kernels. Removes the layers and the head from ``model``.

    The converted weights have other sizes than the model's, and both exist while a layer is
    converted. So the free GPU memory is known only afterwards.
    """
    config = model.config
    head = fuse((model.head,), model.dtype, deterministic=deterministic)
    del model.head
    tables = model.ropes
    if -1 in config.layer_ropes:
        # A rotation by an angle of 0.
        unrotated = torch.tensor([[1.0], [0.0]], device=model.norm.device)
        tables = (*tables, unrotated.expand(config.context_length, 2, 1).contiguous())
    return GpuWeights(
        config=config,
        rank=model.rank,
        context=model.context,
        dtype=model.dtype,
        deterministic=deterministic,
        embedding=model.embedding,
        embedding_scale=model.embedding_scale,
        layers=tuple(_take_layers(model, deterministic=deterministic)),
        norm=model.norm,
        head=head,
        tables=tuple(tables[rope].contiguous() for rope in config.layer_ropes),
    )


def _has_codes(layer: GpuLayer) -> bool:
    linears: list[GpuLinear] = [layer.query_key_value, layer.output]
    if isinstance(layer.mlp, FusedMlp):
        linears += [layer.mlp.gate_up, layer.mlp.down]
    elif isinstance(layer.mlp, SeparateExperts):
        linears += [part for mlp in layer.mlp.experts for part in (mlp.gate_up, mlp.down)]
    return any(not isinstance(linear, PlainLinear) for linear in linears)


def _take_layers(model: DecoderModel, *, deterministic: bool) -> Iterator[GpuLayer]:
    """Yield the model's layers, converted one by one. Each is removed from the model, so that no
    weight exists twice for long."""
    model.layers.reverse()
    while model.layers:
        yield _gpu_layer(model.layers.pop(), model.dtype, deterministic=deterministic)


def _gpu_layer(layer: Layer, dtype: torch.dtype, *, deterministic: bool) -> GpuLayer:
    return GpuLayer(
        attention_norm=layer.attention_norm,
        query_key_value=fuse(
            (layer.query, layer.key, layer.value), dtype, deterministic=deterministic
        ),
        query_norm=layer.query_norm,
        key_norm=layer.key_norm,
        output=fuse((layer.output,), dtype, deterministic=deterministic),
        attention_post_norm=layer.attention_post_norm,
        mlp_norm=layer.mlp_norm,
        mlp=_gpu_mlp(layer.mlp, dtype, deterministic=deterministic),
        mlp_post_norm=layer.mlp_post_norm,
    )


def _gpu_mlp(mlp: GatedMlp | Experts, dtype: torch.dtype, *, deterministic: bool) -> GpuMlp:
    if isinstance(mlp, GatedMlp):
        return _fused_mlp(mlp, dtype, deterministic=deterministic)
    if not deterministic:
        # The tiles of the grouped kernel depend on the batch.
        stacked = _stacked(mlp)
        if stacked is not None:
            return stacked
    return SeparateExperts(
        fuse((mlp.router,), dtype, deterministic=deterministic),
        tuple(_fused_mlp(one, dtype, deterministic=deterministic) for one in mlp.experts),
        mlp.first,
    )


def _fused_mlp(mlp: GatedMlp, dtype: torch.dtype, *, deterministic: bool) -> FusedMlp:
    return FusedMlp(
        fuse((mlp.gate, mlp.up), dtype, deterministic=deterministic),
        fuse((mlp.down,), dtype, deterministic=deterministic),
    )


def _stacked(experts: Experts) -> StackedExperts | None:
    """Stack the experts' weights into one tensor per projection; None if a weight is quantized or
    has a bias."""
    gate_up, down = [], []
    for expert in experts.experts:
        parts = (expert.gate, expert.up, expert.down)
        weights = [part.weight for part in parts if isinstance(part.weight, torch.Tensor)]
        if len(weights) < len(parts) or any(part.bias is not None for part in parts):
            return None
        gate_up.append(torch.cat(weights[:2]))
        down.append(weights[2])
    return StackedExperts(experts.router, torch.stack(gate_up), torch.stack(down), experts.first)


def fuse(linears: Sequence[Linear], dtype: torch.dtype, *, deterministic: bool) -> GpuLinear:
    """Fuse linear layers into one that returns the outputs of all, in order. Raises ValueError if
    their numbers of inputs differ."""
    weights = [linear.weight for linear in linears]
    bias = _bias(linears, dtype)
    plain = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if len(plain) == len(weights):
        weight = plain[0] if len(plain) == 1 else torch.cat(plain)
        return PlainLinear(weight, bias, deterministic=deterministic)
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if len(quantized) == len(weights) and can_concat(quantized):
        return _quantized(concat_rows(quantized), bias, dtype, deterministic=deterministic)
    return SeveralLinears([fuse((one,), dtype, deterministic=deterministic) for one in linears])


def _quantized(
    weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype, *, deterministic: bool
) -> GpuLinear:
    try:
        return QuantizedLinear(weight, bias, deterministic=deterministic)
    except ValueError:
        # The kernel does not support this group size.
        return PlainLinear(dequantize(weight).to(dtype), bias, deterministic=deterministic)


def _bias(linears: Sequence[Linear], dtype: torch.dtype) -> torch.Tensor | None:
    """Concatenate the biases of fused layers, in type ``dtype``, with zeros for layers without one;
    None if no layer has a bias."""
    if all(linear.bias is None for linear in linears):
        return None
    parts = [
        torch.zeros(linear.weight.shape[0], dtype=dtype, device=linear.weight.device)
        if linear.bias is None
        else linear.bias.to(dtype)
        for linear in linears
    ]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

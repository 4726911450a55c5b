"""What a dense Llama's logits are in float64: what errors of fp32 are measured against."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from engine.checkpoint.model_config import ModelConfig
from engine.model.layers import GatedMlp, Linear
from engine.model.model import DecoderModel, Layer
from engine.quantization.weight import QuantizedWeight, dequantize


@torch.inference_mode()
def float64_logits(model: DecoderModel, token_ids: list[int]) -> torch.Tensor:
    """float64 [tokens, vocab_size] of the weights that ``model`` holds, all of them."""
    config = model.config
    count = len(token_ids)
    table = model.embedding
    ids = torch.tensor(token_ids)
    rows = dequantize(table.rows(ids)) if isinstance(table, QuantizedWeight) else table[ids]
    x = rows.double()
    # The angles are rounded to fp32 in all implementations.
    cosines, sines = model.ropes[0][:count, :, None].double().unbind(1)

    def heads(y: torch.Tensor) -> torch.Tensor:
        return y.view(count, -1, config.head_dim)

    def rotated(y: torch.Tensor) -> torch.Tensor:
        one, other = heads(y).chunk(2, dim=-1)
        return torch.cat((one * cosines - other * sines, other * cosines + one * sines), dim=-1)

    for layer in model.layers:
        h = _norm(x, layer.attention_norm, config)
        query, key = (rotated(_times(h, one)) for one in (layer.query, layer.key))
        attended = _attended(query, key, heads(_times(h, layer.value)), config)
        x = x + _times(attended, layer.output)
        x = x + _mlp(_norm(x, layer.mlp_norm, config), layer)
    return _times(_norm(x, model.norm, config), model.head)


def _norm(x: torch.Tensor, weight: torch.Tensor | None, config: ModelConfig) -> torch.Tensor:
    assert weight is not None, "a Llama has norms before each sublayer"
    mean = x.square().mean(dim=-1, keepdim=True)
    return x * torch.rsqrt(mean + config.rms_norm_eps) * weight.double()


def _times(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    weight = linear.weight
    plain = dequantize(weight) if isinstance(weight, QuantizedWeight) else weight
    return x @ plain.double().T


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, config: ModelConfig
) -> torch.Tensor:
    group = config.heads // config.kv_heads
    key, value = (one.repeat_interleave(group, dim=1) for one in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * config.attention_scale
    later = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def _mlp(h: torch.Tensor, layer: Layer) -> torch.Tensor:
    mlp = layer.mlp
    assert isinstance(mlp, GatedMlp), "a dense model"
    return _times(F.silu(_times(h, mlp.gate)) * _times(h, mlp.up), mlp.down)

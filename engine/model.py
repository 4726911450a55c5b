"""The decoder: Llama's architecture (Touvron et al., 2023) over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from baton.errors import ConfigError
from engine.attention import AttentionMeta, attend
from engine.kv_cache import KvCache
from engine.linear import Linear
from engine.model_config import ModelConfig
from engine.rope import apply_rope, rope_table


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer."""

    input_norm: torch.Tensor
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    post_norm: torch.Tensor
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one step, all sequences after one another. All tensors int64 [tokens]."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    blocks: torch.Tensor
    slots: torch.Tensor
    meta: AttentionMeta


class LlamaModel:
    """Computes hidden states and logits; holds no state but its weights."""

    def __init__(
        self, config: ModelConfig, weights: dict[str, torch.Tensor], device: torch.device
    ) -> None:
        """``weights`` has Hugging Face's names.

        Raises ConfigError where one is missing or has another shape than ``config`` says.
        """
        self.config = config
        self._weights = weights
        hidden, vocab = config.hidden_size, config.vocab_size
        self.embedding = self._take("model.embed_tokens.weight", vocab, hidden)
        self.layers = [self._layer(f"model.layers.{n}") for n in range(config.layers)]
        self.norm = self._take("model.norm.weight", hidden).float()
        tied = config.tied_embeddings
        self.head = Linear(self.embedding if tied else self._take("lm_head.weight", vocab, hidden))
        self.rope = rope_table(config, device)

    def _take(self, name: str, *shape: int) -> torch.Tensor:
        weight = self._weights.get(name)
        if weight is None:
            raise ConfigError(f"the model's weights have no tensor {name}")
        if weight.shape != shape:
            raise ConfigError(
                f"the model's tensor {name} is {tuple(weight.shape)};"
                f" its config.json makes it {shape}"
            )
        return weight

    def _linear(self, name: str, outputs: int, inputs: int) -> Linear:
        biased = f"{name}.bias" in self._weights
        return Linear(
            self._take(f"{name}.weight", outputs, inputs),
            self._take(f"{name}.bias", outputs) if biased else None,
        )

    def _layer(self, prefix: str) -> Layer:
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        return Layer(
            input_norm=self._take(f"{prefix}.input_layernorm.weight", hidden).float(),
            query=self._linear(f"{prefix}.self_attn.q_proj", wide, hidden),
            key=self._linear(f"{prefix}.self_attn.k_proj", narrow, hidden),
            value=self._linear(f"{prefix}.self_attn.v_proj", narrow, hidden),
            output=self._linear(f"{prefix}.self_attn.o_proj", hidden, wide),
            post_norm=self._take(f"{prefix}.post_attention_layernorm.weight", hidden).float(),
            gate=self._linear(f"{prefix}.mlp.gate_proj", inner, hidden),
            up=self._linear(f"{prefix}.mlp.up_proj", inner, hidden),
            down=self._linear(f"{prefix}.mlp.down_proj", hidden, inner),
        )

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Normalised in fp32, then of the weights' type: what the linear layers take."""
        normed = F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)
        return normed.to(self.embedding.dtype)

    def hidden_states(self, batch: Batch, cache: KvCache) -> torch.Tensor:
        """Compute a step's tokens and store their KV. Returns fp32 [tokens, hidden_size].

        The residual stream is fp32 whatever the weights are: in bf16 its rounding would be about
        half of the logits' error, and it is too small to cost time.
        """
        x = F.embedding(batch.token_ids, self.embedding).float()
        rotation = self.rope[batch.positions]
        for index, layer in enumerate(self.layers):
            attended = self._attention(
                self._rms_norm(x, layer.input_norm), layer, index, batch, cache, rotation
            )
            x = x + attended
            h = self._rms_norm(x, layer.post_norm)
            x = x + layer.down.to_float(F.silu(layer.gate(h)) * layer.up(h))
        return x

    def _attention(
        self,
        h: torch.Tensor,
        layer: Layer,
        index: int,
        batch: Batch,
        cache: KvCache,
        rotation: torch.Tensor,
    ) -> torch.Tensor:
        tokens, dim = h.shape[0], self.config.head_dim
        query = apply_rope(layer.query(h).view(tokens, -1, dim), rotation)
        key = apply_rope(layer.key(h).view(tokens, -1, dim), rotation)
        value = layer.value(h).view(tokens, -1, dim)
        cache.write(index, key, value, batch.blocks, batch.slots)
        return layer.output.to_float(attend(query, key, value, cache, index, batch.meta))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [rows, vocab_size] of hidden states [rows, hidden_size]."""
        return self.head.to_float(self._rms_norm(hidden, self.norm))

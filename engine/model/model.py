"""The decoder over the paged KV cache: Llama's (Touvron et al., 2023) and its relatives.

Switches of ``ModelConfig`` distinguish the families; ``engine.checkpoint.families`` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from engine.checkpoint.families import FAMILIES, ExpertNames, NormPlacement
from engine.checkpoint.model_config import ExpertsConfig, ModelConfig
from engine.kv.kv_cache import KvGroup
from engine.model.attention import AttentionMeta, attend
from engine.model.layers import Experts, GatedMlp, Linear, gated_mlp, mix_experts
from engine.model.named_tensors import TIED_HEAD, Matrix, NamedTensors
from engine.model.rope import apply_rope, rope_table
from engine.parallel.context_parallel import ContextExchange
from engine.parallel.rank_model import RankModel
from engine.quantization.weight import QuantizedWeight, dequantize

_NORMS: Mapping[NormPlacement, tuple[str | None, str | None, str | None, str | None]] = {
    "pre": ("input_layernorm", None, "post_attention_layernorm", None),
    "sandwich": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "post": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
}
"""Checkpoint names of a layer's four norms by placement: before attention, after it, before the
MLP, after it; None if absent."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer. Norm weights are fp32, and include the family's offset. A norm that
    the family lacks is None."""

    attention_norm: torch.Tensor | None
    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attention_post_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp_post_norm: torch.Tensor | None
    mlp: GatedMlp | Experts
    feature_norm: torch.Tensor | None = None
    """Norm of the features that an EAGLE layer reads (engine/speculation/heads/eagle_model.py);
    None for other layers."""
    residual_normed: bool = False
    """Whether an EAGLE layer's residual stream begins with the normed features."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The input tokens of one step, one sequence after another. All tensors are int64 [tokens]."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    blocks: torch.Tensor
    slots: torch.Tensor
    meta: AttentionMeta


class DecoderModel:
    """A decoder model in plain torch: computes hidden states and logits. It holds no state except
    its weights."""

    combine: Linear | None = None
    """Layer of an EAGLE head that makes a feature from the inputs of some of the target's layers
    (engine/speculation/heads/eagle_model.py)."""
    rank: RankModel | None = None
    """Operations that this rank does together with the other ranks (engine/parallel/); None if the
    model is on one rank."""
    context: ContextExchange | None = None
    """Exchanges the KV of tokens between ranks that divide prompts; None without context
    parallelism."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Matrix],
        device: torch.device,
        rank: RankModel | None = None,
    ) -> None:
        """``weights`` maps Hugging Face's tensor names to weights.

        With several ranks (``rank`` is set), ``config`` and ``weights`` are this rank's shard of
        the model.

        Raises ConfigError if a weight is missing or its shape differs from ``config``.
        """
        self.config = config
        self.rank = rank
        tensors = NamedTensors(weights)
        hidden, vocab = config.hidden_size, _vocabulary(config, rank)
        self.embedding = tensors.matrix("model.embed_tokens.weight", vocab, hidden)
        self.dtype = tensors.take("model.norm.weight", hidden).dtype
        """Type of the weights that are not quantized, and of the inputs of linear layers."""
        self.embedding_scale = torch.tensor(config.embedding_scale).to(self.dtype).item()
        """Factor of the embeddings, rounded to the weights' type as in training."""
        self.layers = [_layer(config, tensors, n, rank) for n in range(config.layers)]
        self.norm = _norm(config, tensors, "model.norm", hidden)
        self.head = _head(config, tensors, self.embedding, vocab)
        self.ropes = tuple(rope_table(spec, config.context_length, device) for spec in config.ropes)
        """Rotary tables, each fp32 [context_length, 2, rotary_dim / 2]."""

    def hidden_states(
        self,
        batch: StepTokens,
        cache: KvGroup,
        layer_done: Callable[[int], None] | None = None,
        layer_input: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Compute a step's tokens through all layers, and store their KV. Returns the last layer's
        output, fp32 [tokens, hidden_size].

        ``layer_done`` is called for each layer once its KV is stored. ``layer_input`` is called
        with (layer number, input) for each layer, and last with (number of layers, result).
        Callbacks must not change these tensors.

        The residual stream is fp32 for all weight types. In bf16 its rounding would be about half
        of the logits' error, and it is too small to cost time.
        """
        x = self._embed(batch.token_ids)
        rotations = [table[batch.positions] for table in self.ropes]
        for index, layer in enumerate(self.layers):
            if layer_input is not None:
                layer_input(index, x)
            rope = self.config.layer_ropes[index]
            rotation = rotations[rope] if rope >= 0 else None
            h = self._before(x, layer.attention_norm)
            attended = self._attention(h, layer, index, batch, cache, rotation)
            if layer_done is not None:
                layer_done(index)
            x = x + self._after(attended, layer.attention_post_norm)
            mixed = self._mlp(self._before(x, layer.mlp_norm), layer.mlp)
            x = x + self._after(mixed, layer.mlp_post_norm)
        if layer_input is not None:
            layer_input(len(self.layers), x)
        return x

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Look up the embeddings of tokens: fp32 [tokens, hidden_size]."""
        if self.rank is not None:
            x = self.rank.embed(self.embedding, token_ids)
        elif isinstance(self.embedding, QuantizedWeight):
            x = dequantize(self.embedding, token_ids)
        else:
            x = F.embedding(token_ids, self.embedding).float()
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Apply an RMS norm to ``x``, fp32. Returns fp32."""
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def _before(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Apply the norm before a sublayer's linear layers, if the family has one. Returns the
        weights' type."""
        normed = x if weight is None else self._norm(x, weight)
        return normed.to(self.dtype)

    def _after(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Apply the norm to a sublayer's output before it is added to the residual stream, if the
        family has one. Returns fp32."""
        return x if weight is None else self._norm(x, weight)

    def _attention(
        self,
        h: torch.Tensor,
        layer: Layer,
        index: int,
        batch: StepTokens,
        cache: KvGroup,
        rotation: torch.Tensor | None,
    ) -> torch.Tensor:
        config = self.config
        query, key = layer.query(h), layer.key(h)
        query_norm, key_norm = layer.query_norm, layer.key_norm
        if self.rank is not None and config.qk_norm == "full":
            assert query_norm is not None, "qk_norm full needs a query norm"
            assert key_norm is not None, "qk_norm full needs a key norm"
            weights = query_norm, key_norm
            query, key = self.rank.norm_heads(query, key, weights, config.rms_norm_eps)
            query_norm = key_norm = None
        query = self._heads(query, query_norm, rotation)
        key = self._heads(key, key_norm, rotation)
        value = self._heads(layer.value(h), None, None)
        cache.write(index, key, value, batch.blocks, batch.slots)
        if self.context is not None:
            self.context.spread(cache, index)
        attended = attend(
            query,
            key,
            value,
            cache,
            index,
            batch.meta,
            scale=config.attention_scale,
            window=config.windows[index],
            softcap=config.attention_softcap,
        )
        return self._joined(layer.output.to_float(attended))

    def _joined(self, part: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' partial outputs of a sublayer."""
        return part if self.rank is None else self.rank.add(part)

    def _heads(
        self, x: torch.Tensor, norm: torch.Tensor | None, rotation: torch.Tensor | None
    ) -> torch.Tensor:
        """Split ``x`` [tokens, heads * head_dim] into heads; then normalize and rotate each head,
        if requested.

        Returns [tokens, heads, head_dim].
        """
        shape = (len(x), -1, self.config.head_dim)
        if norm is not None:
            by_head = x.view(shape) if self.config.qk_norm == "head" else x
            x = self._norm(by_head.float(), norm).to(x.dtype)
        x = x.view(shape)
        return x if rotation is None else apply_rope(x, rotation)

    def _mlp(self, h: torch.Tensor, mlp: GatedMlp | Experts) -> torch.Tensor:
        """Compute a layer's MLP or experts: fp32 [tokens, hidden_size]."""
        if isinstance(mlp, GatedMlp):
            return self._joined(gated_mlp(mlp, h, self.config.activation))
        assert self.config.experts is not None
        return self._joined(mix_experts(mlp, h, self.config.experts, self.config.activation))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits, fp32 [rows, vocab_size], from hidden states [rows, hidden_size].

        With several ranks, only rank 0 returns logits; the others return [0, vocab_size].
        """
        found = self._own_logits(hidden)
        return found if self.rank is None else self.rank.whole_logits(found, self.config.vocab_size)

    def best(self, hidden: torch.Tensor) -> list[int]:
        """Return the most likely token of each row of hidden states; the lowest id on a tie.

        With several ranks, only rank 0 returns tokens; the others return an empty list.
        """
        found = self._own_logits(hidden)
        if self.rank is not None:
            return self.rank.best(found)
        tokens: list[int] = found.argmax(dim=-1).tolist()
        return tokens

    def _own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits for this rank's part of the vocabulary."""
        found = self.head.to_float(self._before(hidden, self.norm))
        cap = self.config.logits_softcap
        return torch.tanh(found / cap) * cap if cap else found


def _vocabulary(config: ModelConfig, rank: RankModel | None) -> int:
    """Number of rows (vocabulary tokens) of the embedding and the head that this rank holds."""
    return config.vocab_size if rank is None else len(rank.shard.vocabulary)


def _head(config: ModelConfig, tensors: NamedTensors, embedding: Matrix, vocab: int) -> Linear:
    hidden = config.hidden_size
    if not config.tied_embeddings:
        return tensors.linear("lm_head", vocab, hidden)
    copied = TIED_HEAD in tensors
    return Linear(tensors.matrix(TIED_HEAD, vocab, hidden) if copied else embedding)


def _layer(
    config: ModelConfig, tensors: NamedTensors, number: int, rank: RankModel | None
) -> Layer:
    base = f"model.layers.{number}"
    norms = [
        None if name is None else _norm(config, tensors, f"{base}.{name}", config.hidden_size)
        for name in _NORMS[config.norm_placement]
    ]
    query, key, value = _query_key_value(config, tensors, f"{base}.self_attn")
    query_norm, key_norm = _qk_norms(config, tensors, f"{base}.self_attn")
    wide = config.heads * config.head_dim
    return Layer(
        attention_norm=norms[0],
        query=query,
        key=key,
        value=value,
        output=tensors.linear(f"{base}.self_attn.o_proj", config.hidden_size, wide),
        query_norm=query_norm,
        key_norm=key_norm,
        attention_post_norm=norms[1],
        mlp_norm=norms[2],
        mlp_post_norm=norms[3],
        mlp=_mlp(config, tensors, base, number, rank),
    )


def _norm(config: ModelConfig, tensors: NamedTensors, name: str, size: int) -> torch.Tensor:
    return tensors.take(f"{name}.weight", size).float() + config.norm_offset


def _query_key_value(
    config: ModelConfig, tensors: NamedTensors, base: str
) -> tuple[Linear, Linear, Linear]:
    wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden = config.hidden_size
    if FAMILIES[config.architecture].fused_projections:
        rows = (wide, narrow, narrow)
        query, key, value = tensors.split_linear(f"{base}.qkv_proj", rows, hidden)
        return query, key, value
    return (
        tensors.linear(f"{base}.q_proj", wide, hidden),
        tensors.linear(f"{base}.k_proj", narrow, hidden),
        tensors.linear(f"{base}.v_proj", narrow, hidden),
    )


def _qk_norms(
    config: ModelConfig, tensors: NamedTensors, base: str
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if config.qk_norm == "none":
        return None, None
    whole = config.qk_norm == "full"
    query, key = (config.heads, config.kv_heads) if whole else (1, 1)
    return (
        _norm(config, tensors, f"{base}.q_norm", query * config.head_dim),
        _norm(config, tensors, f"{base}.k_norm", key * config.head_dim),
    )


def _mlp(
    config: ModelConfig, tensors: NamedTensors, base: str, number: int, rank: RankModel | None
) -> GatedMlp | Experts:
    hidden, inner = config.hidden_size, config.intermediate_size
    family = FAMILIES[config.architecture]
    if config.experts is not None and number in config.experts.layers:
        assert family.experts is not None
        held = range(config.experts.count) if rank is None else rank.shard.experts
        return _experts(hidden, config.experts, family.experts, tensors, base, held)
    if family.fused_projections:
        gate, up = tensors.split_linear(f"{base}.mlp.gate_up_proj", (inner, inner), hidden)
    else:
        gate = tensors.linear(f"{base}.mlp.gate_proj", inner, hidden)
        up = tensors.linear(f"{base}.mlp.up_proj", inner, hidden)
    return GatedMlp(gate, up, tensors.linear(f"{base}.mlp.down_proj", hidden, inner))


def _experts(
    hidden: int,
    config: ExpertsConfig,
    names: ExpertNames,
    tensors: NamedTensors,
    base: str,
    held: range,
) -> Experts:
    """Load the experts of a layer. The checkpoint has separate tensors for each expert, or fused
    tensors as transformers 5 stores them.

    ``held`` has the numbers of the experts whose weights this rank has.
    """
    inner = config.intermediate_size
    if f"{base}.mlp.experts.gate_up_proj" in tensors:
        router = tensors.linear(f"{base}.mlp.gate", config.count, hidden)
        fused = f"{base}.mlp.experts"
        gate_up = tensors.take(f"{fused}.gate_up_proj", len(held), 2 * inner, hidden)
        down = tensors.take(f"{fused}.down_proj", len(held), hidden, inner)
        return Experts(
            router,
            tuple(
                GatedMlp(Linear(gate_up[n, :inner]), Linear(gate_up[n, inner:]), Linear(down[n]))
                for n in range(len(held))
            ),
            held.start,
        )
    block = f"{base}.{names.block}"
    return Experts(
        tensors.linear(f"{block}.gate", config.count, hidden),
        tuple(
            GatedMlp(
                tensors.linear(f"{block}.experts.{n}.{names.gate}", inner, hidden),
                tensors.linear(f"{block}.experts.{n}.{names.up}", inner, hidden),
                tensors.linear(f"{block}.experts.{n}.{names.down}", hidden, inner),
            )
            for n in held
        ),
        held.start,
    )

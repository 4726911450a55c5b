"""One forward pass of the decoder on a GPU: the computation of ``engine.model.model``, with fused
kernels.

Parts that the kernels do not cover are computed by torch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from engine.checkpoint.families import Activation
from engine.checkpoint.model_config import ExpertsConfig
from engine.gpu.fused_weights import FusedMlp, GpuLayer, GpuWeights, SeparateExperts, StackedExperts
from engine.gpu.kernels.activation import gated
from engine.gpu.kernels.attention.chunk import chunk_launch
from engine.gpu.kernels.attention.decode import SPLIT, decode_launches
from engine.gpu.kernels.attention.paged import Scoring
from engine.gpu.kernels.embedding import embed, known_tokens
from engine.gpu.kernels.kv_blocks import KvBlocks
from engine.gpu.kernels.launch import capability_of
from engine.gpu.kernels.linear.grouped import add_choices, grouped_linear, route, route_held
from engine.gpu.kernels.norm import add_norm
from engine.gpu.kernels.rope_cache import rope_cache
from engine.gpu.step_tensors import StepTensors
from engine.kv.kv_cache import KvCache
from engine.model.layers import route as choose
from engine.quantization.weight import QuantizedWeight, dequantize

_MAX_TILE_ROWS = 128
"""Maximum number of rows in a tile of ``chunk_attention``."""


class Forward:
    """Runs forward passes of a decoder, with its weights and the KV blocks that it reads and
    writes."""

    def __init__(self, weights: GpuWeights, cache: KvCache) -> None:
        """With deterministic weights, rows of a single token also use the attention kernel of
        chunks."""
        config = weights.config
        self._config = config
        self._rank = weights.rank
        self._context = weights.context
        self._cache = cache
        self._dtype = weights.dtype
        self._blocks = KvBlocks(cache.data, cache.scales)
        self._capability = capability_of(cache.data)
        self._embedding = weights.embedding
        self._embedding_scale = weights.embedding_scale
        self._head = weights.head
        self._norm = weights.norm
        self._layers = weights.layers
        self._tables = weights.tables
        self._scorings = [
            Scoring(config.attention_scale, window, config.attention_softcap)
            for window in config.windows
        ]
        group = config.heads // config.kv_heads
        self._least_longest = -(-_MAX_TILE_ROWS // group) if weights.deterministic else 1

    def logits(
        self,
        step: StepTensors,
        drawn: torch.Tensor,
        outputs: torch.Tensor | None,
        states: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute a step's tokens and store their KV. Returns logits [outputs, vocab_size].

        The logits are fp32 or of the weights' type. With several ranks, only rank 0 has logits; the
        others return [0, vocab_size].

        ``drawn``, int64, has the previous step's tokens, which the host may not know yet
        (``engine.gpu.kernels.embedding``). ``outputs`` has the indexes of the tokens whose logits
        are wanted; None: all. If ``states`` is a list, the output of the last layer is appended to
        it, fp32 [tokens, hidden_size].
        """
        residual = self._embed(step.token_ids, drawn)
        added: torch.Tensor | None = None
        post_norm: torch.Tensor | None = None
        for number, layer in enumerate(self._layers):
            h = self._enter(residual, added, post_norm, layer.attention_norm)
            added = self._joined(layer.output(self._attention(h, layer, number, step)))
            h = self._enter(residual, added, layer.attention_post_norm, layer.mlp_norm)
            added, post_norm = self._joined(self._mlp(h, layer)), layer.mlp_post_norm
        if states is not None:
            # Added to the residual stream without a norm.
            self._enter(residual, added, post_norm, None)
            added = post_norm = None
            states.append(residual)
        if outputs is not None:
            residual, added = residual[outputs], None if added is None else added[outputs]
        found = self._head(self._enter(residual, added, post_norm, self._norm))
        cap = self._config.logits_softcap
        found = torch.tanh(found.float() / cap) * cap if cap else found
        if self._rank is None:
            return found
        return self._rank.whole_logits(found, self._config.vocab_size)

    def _joined(self, part: torch.Tensor) -> torch.Tensor:
        """Sum the ranks' partial outputs of a sublayer."""
        return part if self._rank is None else self._rank.add(part)

    def _embed(self, token_ids: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        """Look up the embeddings of tokens: fp32 [tokens, hidden_size]. Placeholder ids are taken
        from ``drawn``."""
        if self._rank is not None:
            found = self._rank.embed(self._embedding, known_tokens(token_ids, drawn))
            return found * self._embedding_scale
        if isinstance(self._embedding, QuantizedWeight):
            found = dequantize(self._embedding, known_tokens(token_ids, drawn))
            return found * self._embedding_scale
        return embed(token_ids, drawn, self._embedding, self._embedding_scale)

    def _enter(
        self,
        residual: torch.Tensor,
        added: torch.Tensor | None,
        post_norm: torch.Tensor | None,
        norm: torch.Tensor | None,
    ) -> torch.Tensor:
        """Add ``added``, the output of the previous sublayer, to the residual stream, and normalize
        the sum for the next sublayer.

        Returns [tokens, hidden_size] in the weights' type.
        """
        eps = self._config.rms_norm_eps
        if norm is not None:
            return add_norm(residual, added, norm, eps, self._dtype, post_norm)
        if added is not None:
            more = added.float()
            if post_norm is not None:
                more = F.rms_norm(more, post_norm.shape, post_norm, eps)
            residual += more
        return residual.to(self._dtype)

    def _attention(
        self, h: torch.Tensor, layer: GpuLayer, number: int, step: StepTensors
    ) -> torch.Tensor:
        """Compute a layer's attention without its output projection: [tokens, heads * head_dim]."""
        query, key, value = self._heads(layer.query_key_value(h), layer)
        by_head = self._config.qk_norm == "head"
        queries = rope_cache(
            query,
            key,
            value,
            self._blocks,
            number,
            self._tables[number],
            step.positions,
            step.slots,
            query_weight=layer.query_norm if by_head else None,
            key_weight=layer.key_norm if by_head else None,
            eps=self._config.rms_norm_eps,
        )
        if self._context is not None:
            self._context.spread(self._cache, number)
        # Chunks of padding have no tokens, so nothing is written for them.
        out = torch.zeros_like(queries) if step.shape.chunks else torch.empty_like(queries)
        self._attend_singles(out, queries, number, step)
        self._attend_chunks(out, queries, number, step)
        return out.view(len(h), -1)

    def _heads(
        self, projected: torch.Tensor, layer: GpuLayer
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split the fused projection into queries, keys and values [tokens, heads, head_dim]. They
        are normalized here if the norm covers all heads."""
        config = self._config
        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        query, key, value = torch.split(projected, [wide, narrow, narrow], dim=1)
        if config.qk_norm == "full":
            query, key = self._full_norms(query, key, layer)
        shape = (len(projected), -1, config.head_dim)
        return query.view(shape), key.view(shape), value.view(shape)

    def _full_norms(
        self, query: torch.Tensor, key: torch.Tensor, layer: GpuLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._rank is None:
            return (
                self._full_norm(query, layer.query_norm),
                self._full_norm(key, layer.key_norm),
            )
        assert layer.query_norm is not None, "qk_norm full needs a query norm"
        assert layer.key_norm is not None, "qk_norm full needs a key norm"
        weights = layer.query_norm, layer.key_norm
        return self._rank.norm_heads(query, key, weights, self._config.rms_norm_eps)

    def _full_norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        assert weight is not None, "qk_norm full needs a norm"
        normed = F.rms_norm(x.float(), weight.shape, weight, self._config.rms_norm_eps)
        return normed.to(x.dtype)

    def _attend_singles(
        self, out: torch.Tensor, queries: torch.Tensor, number: int, step: StepTensors
    ) -> None:
        count = step.shape.singles
        if not count:
            return
        for launch in decode_launches(
            out[:count],
            queries[:count],
            self._blocks,
            number,
            step.tables[:count],
            step.lengths,
            self._scorings[number],
            step.shape.longest_single,
            None,
            SPLIT,
            self._capability,
        ):
            launch.run()

    def _attend_chunks(
        self, out: torch.Tensor, queries: torch.Tensor, number: int, step: StepTensors
    ) -> None:
        count = step.shape.singles
        if not step.shape.chunks:
            return
        chunk_launch(
            out[count:],
            queries[count:],
            self._blocks,
            number,
            step.tables[count:],
            step.query_starts,
            step.contexts,
            self._scorings[number],
            # Tile sizes follow the longest chunk. The lower bound fills a tile: constant sizes.
            max(step.shape.longest_chunk, self._least_longest),
            self._capability,
        ).run()

    def _mlp(self, h: torch.Tensor, layer: GpuLayer) -> torch.Tensor:
        """Compute a layer's MLP or experts: [tokens, hidden_size]."""
        activation, experts = self._config.activation, self._config.experts
        if isinstance(layer.mlp, FusedMlp):
            return fused_mlp(layer.mlp, h, activation)
        assert experts is not None, "a model with experts has their config"
        if isinstance(layer.mlp, SeparateExperts):
            return mix_separate(layer.mlp, h, experts, activation)
        return mix_stacked(layer.mlp, h, experts, activation)


def fused_mlp(mlp: FusedMlp, x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Compute a gated MLP: [rows, hidden] from ``x`` [rows, hidden], in the type of ``x``."""
    return mlp.down(_gated(mlp.gate_up(x), activation))


def _gated(both: torch.Tensor, activation: Activation) -> torch.Tensor:
    gate, up = both.chunk(2, dim=1)
    return gated(gate, up, activation)


def mix_stacked(
    experts: StackedExperts, x: torch.Tensor, config: ExpertsConfig, activation: Activation
) -> torch.Tensor:
    """Compute a mixture of experts without waiting for the GPU: fp32 [rows, hidden] from ``x``
    [rows, hidden]."""
    factors, chosen = choose(experts.router, x, config)
    first, count = experts.first, len(experts.gate_up)
    routing = (
        route(chosen, count)
        if count == config.count
        else route_held(chosen, range(first, first + count))
    )
    both = grouped_linear(x, experts.gate_up, routing, gathers=True)
    rows = grouped_linear(_gated(both, activation), experts.down, routing, gathers=False)
    return add_choices(rows, routing, factors)


def mix_separate(
    experts: SeparateExperts, x: torch.Tensor, config: ExpertsConfig, activation: Activation
) -> torch.Tensor:
    """Compute a mixture of experts, one expert after another: fp32 [rows, hidden] from ``x`` [rows,
    hidden]. The host waits for the router's choice.

    Tokens are sorted by expert, so that each expert with tokens runs once. The results of a token's
    experts are added in the order in which the router chose them.
    """
    probabilities = experts.router(x).float().softmax(dim=-1)
    factors, chosen = probabilities.topk(config.per_token, dim=-1)
    if config.normalized:
        factors = factors / factors.sum(dim=-1, keepdim=True)
    held = range(experts.first, experts.first + len(experts.experts))
    routing = route_held(chosen, held)
    rows = x[routing.order.long() // config.per_token]
    counts = routing.offsets.diff().tolist()
    others = len(rows) - sum(counts)
    parts = torch.split(rows, [*counts, others])
    found = [
        fused_mlp(expert, part, activation)
        for expert, part in zip(experts.experts, parts[:-1], strict=True)
        if len(part)
    ]
    return add_choices(torch.cat([*found, parts[-1]]), routing, factors)

"""Models at their real sizes, except for the number of layers, with weights without contents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.model_config import ModelConfig, load_model_config
from engine.model.model import DecoderModel
from engine.model.named_tensors import TIED_HEAD, Matrix
from engine.parallel.rank_model import RankModel
from engine.parallel.shard import ModelShard, config_of, shard_of
from engine.quantization.weight import QuantizedWeight, QuantKind, fitting_group
from tests.kernels.gpu.fake.device import CUDA

WeightType = Literal["bf16", "int8", "int4", "fp8"]
WEIGHT_TYPES: tuple[WeightType, ...] = ("bf16", "int8", "int4", "fp8")
LAYERS = 2


def _sizes(
    architecture: str, hidden: int, inner: int, heads: int, kv: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "num_hidden_layers": LAYERS,
    } | more


_GEMMA3 = _sizes(
    "Gemma3ForCausalLM", 5376, 21504, 32, 16, 262208, head_dim=128, sliding_window_pattern=2
)
MODELS: dict[str, dict[str, Any]] = {
    "Llama 3.1 8B": _sizes("LlamaForCausalLM", 4096, 14336, 32, 8, 128256),
    "Llama 3.1 70B": _sizes("LlamaForCausalLM", 8192, 28672, 64, 8, 128256),
    "Mistral 7B": _sizes("MistralForCausalLM", 4096, 14336, 32, 8, 32000),
    "Qwen2.5 7B": _sizes("Qwen2ForCausalLM", 3584, 18944, 28, 4, 152064),
    "Qwen3 8B": _sizes("Qwen3ForCausalLM", 4096, 12288, 32, 8, 151936, head_dim=128),
    # The second layer has no rotary embedding.
    "SmolLM3 3B": _sizes("SmolLM3ForCausalLM", 2048, 11008, 16, 4, 128256, no_rope_layers=[1, 0]),
    "Phi-3 mini": _sizes(
        "Phi3ForCausalLM", 3072, 8192, 32, 32, 32064, sliding_window=2047, pad_token_id=0
    ),
    "Gemma 2 9B": _sizes("Gemma2ForCausalLM", 3584, 14336, 16, 8, 256000, head_dim=256),
    "Gemma 3 27B": _GEMMA3,
    "Gemma 3 27B with images": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": _GEMMA3,
    },
    "OLMo 2 7B": _sizes("Olmo2ForCausalLM", 4096, 11008, 32, 32, 100352),
    "Mixtral 8x7B": _sizes("MixtralForCausalLM", 4096, 14336, 32, 8, 32000, sliding_window=None),
    "Qwen3 30B-A3B": _sizes(
        "Qwen3MoeForCausalLM",
        2048,
        6144,
        32,
        4,
        151936,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
}
"""The fields of config.json, as published."""


@cache
def real_config(name: str, context: int) -> ModelConfig:
    """A model's config with a context of this many tokens."""
    fields = MODELS[name]
    longer = {"max_position_embeddings": context, "original_max_position_embeddings": context}
    if "text_config" in fields:
        fields = fields | {"text_config": fields["text_config"] | longer}
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields | longer))
        return load_model_config(Path(folder))


class Ranks:
    """In place of ``RankGroup``: shapes as other ranks' parts would make them."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def add(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return part.new_empty((self.ranks, *part.shape))

    def broadcast(self, drawn: torch.Tensor) -> None:
        pass


def model_of(config: ModelConfig, kind: WeightType, ranks: int = 1) -> DecoderModel:
    """Within ``fake_gpu``: a model on the GPU, as ``load_weights`` gives it; of several ``ranks``

    the shard of rank 0.
    """
    shard = shard_of(config, 0, ranks)
    if ranks == 1:
        return DecoderModel(config, dict(_weights(config, kind, shard)), CUDA)
    own = config_of(config, shard)
    group: Any = Ranks(ranks)
    weights = dict(_weights(own, kind, shard))
    return DecoderModel(own, weights, CUDA, RankModel(shard, group))


def _weights(
    config: ModelConfig, kind: WeightType, shard: ModelShard
) -> Iterator[tuple[str, Matrix]]:
    hidden, vocab = config.hidden_size, len(shard.vocabulary)
    yield "model.embed_tokens.weight", _plain(vocab, hidden)
    yield "model.norm.weight", _plain(hidden)
    if not config.tied_embeddings:
        yield "lm_head.weight", _matrix(kind, vocab, hidden)
    elif kind != "bf16":
        yield TIED_HEAD, _matrix("int8", vocab, hidden)
    for number in range(config.layers):
        yield from _layer(config, f"model.layers.{number}", kind, number, shard.experts)


def _layer(
    config: ModelConfig, base: str, kind: WeightType, number: int, held: range
) -> Iterator[tuple[str, Matrix]]:
    hidden, dim = config.hidden_size, config.head_dim
    family = FAMILIES[config.architecture]
    wide, narrow = config.heads * dim, config.kv_heads * dim
    for norm in (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ):
        yield f"{base}.{norm}.weight", _plain(hidden)
    attention = f"{base}.self_attn"
    if config.qk_norm != "none":
        whole = config.qk_norm == "full"
        yield f"{attention}.q_norm.weight", _plain(wide if whole else dim)
        yield f"{attention}.k_norm.weight", _plain(narrow if whole else dim)
    if family.fused_projections:
        yield f"{attention}.qkv_proj.weight", _matrix(kind, wide + 2 * narrow, hidden)
    else:
        for name, size in (("q", wide), ("k", narrow), ("v", narrow)):
            yield f"{attention}.{name}_proj.weight", _matrix(kind, size, hidden)
            if config.architecture == "Qwen2ForCausalLM":
                yield f"{attention}.{name}_proj.bias", _plain(size)
    yield f"{attention}.o_proj.weight", _matrix(kind, hidden, wide)
    experts, names = config.experts, family.experts
    if experts is None or names is None or number not in experts.layers:
        fused = family.fused_projections
        yield from _mlp(f"{base}.mlp", kind, hidden, config.intermediate_size, fused)
        return
    yield f"{base}.{names.block}.gate.weight", _plain(experts.count, hidden)
    inner = experts.intermediate_size
    for expert in held:
        one = f"{base}.{names.block}.experts.{expert}"
        yield f"{one}.{names.gate}.weight", _matrix(kind, inner, hidden)
        yield f"{one}.{names.up}.weight", _matrix(kind, inner, hidden)
        yield f"{one}.{names.down}.weight", _matrix(kind, hidden, inner)


def _mlp(
    base: str, kind: WeightType, hidden: int, inner: int, fused: bool
) -> Iterator[tuple[str, Matrix]]:
    if fused:
        yield f"{base}.gate_up_proj.weight", _matrix(kind, 2 * inner, hidden)
    else:
        yield f"{base}.gate_proj.weight", _matrix(kind, inner, hidden)
        yield f"{base}.up_proj.weight", _matrix(kind, inner, hidden)
    yield f"{base}.down_proj.weight", _matrix(kind, hidden, inner)


def _plain(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=CUDA)


def _matrix(kind: WeightType, outputs: int, inputs: int) -> Matrix:
    """As ``engine.quantization.weight.quantize`` makes it of usual weights."""
    return _plain(outputs, inputs) if kind == "bf16" else _quantized(kind, outputs, inputs)


def _quantized(kind: QuantKind, outputs: int, inputs: int) -> QuantizedWeight:
    group = inputs if kind == "fp8" else fitting_group(inputs)
    width = inputs // 2 if kind == "int4" else inputs
    scales = torch.empty(
        (outputs, inputs // group),
        dtype=torch.float32 if kind == "fp8" else torch.float16,
        device=CUDA,
    )
    return QuantizedWeight(
        torch.empty((outputs, width), dtype=torch.uint8, device=CUDA),
        kind,
        scales,
        torch.empty_like(scales) if kind == "int4" else None,
        group,
    )

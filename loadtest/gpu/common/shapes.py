"""Defines shapes of served models: whole, of few layers, and small enough for an interpreter."""

from __future__ import annotations

from dataclasses import replace

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.model_config import ExpertsConfig, ModelConfig
from engine.checkpoint.rope_spec import RopeSpec


def _shape(
    architecture: str,
    *,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    context: int,
) -> ModelConfig:
    """Return a decoder of these sizes, whose other properties are those of Llama."""
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context,
        rms_norm_eps=1e-5,
        tied_embeddings=False,
        eos_ids=(),
        activation="silu",
        norm_offset=0.0,
        norm_placement=FAMILIES[architecture].norm_placement,
        qk_norm=FAMILIES[architecture].qk_norm,
        embedding_scale=1.0,
        attention_scale=head_dim**-0.5,
        attention_softcap=0.0,
        logits_softcap=0.0,
        windows=(0,) * layers,
        ropes=(RopeSpec(500000.0, head_dim, None),),
        layer_ropes=(0,) * layers,
        experts=None,
    )


def llama_8b(context: int = 131072) -> ModelConfig:
    """Return the shape of Llama 3.1 8B (Dubey et al., 2024, table 3)."""
    return _shape(
        "LlamaForCausalLM",
        hidden=4096,
        inner=14336,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab=128256,
        context=context,
    )


def llama_1b(context: int = 131072) -> ModelConfig:
    """Return the shape of Llama 3.2 1B (its config.json), but with a separate output head."""
    return _shape(
        "LlamaForCausalLM",
        hidden=2048,
        inner=8192,
        layers=16,
        heads=32,
        kv_heads=8,
        head_dim=64,
        vocab=128256,
        context=context,
    )


def llama_70b(context: int = 131072) -> ModelConfig:
    """Return the shape of Llama 3.1 70B (Dubey et al., 2024, table 3)."""
    return replace(
        llama_8b(context),
        hidden_size=8192,
        intermediate_size=28672,
        layers=80,
        heads=64,
        windows=(0,) * 80,
        layer_ropes=(0,) * 80,
    )


def qwen3_8b(context: int = 40960) -> ModelConfig:
    """Return the shape of Qwen3 8B (its config.json), which has norms of queries and keys."""
    return _shape(
        "Qwen3ForCausalLM",
        hidden=4096,
        inner=12288,
        layers=36,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab=151936,
        context=context,
    )


def gemma3_27b(context: int = 131072) -> ModelConfig:
    """Return the shape of Gemma 3 27B (its config.json), which has norms around each part, and five
    sliding windows per full layer."""
    layers = 62
    windows = tuple(0 if (n + 1) % 6 == 0 else 1024 for n in range(layers))
    plain = _shape(
        "Gemma3ForCausalLM",
        hidden=5376,
        inner=21504,
        layers=layers,
        heads=32,
        kv_heads=16,
        head_dim=128,
        vocab=262208,
        context=context,
    )
    return replace(
        plain,
        activation="gelu_tanh",
        norm_offset=1.0,
        embedding_scale=5376**0.5,
        attention_scale=168**-0.5,
        windows=windows,
        ropes=(RopeSpec(1e6, 128, None), RopeSpec(1e4, 128, None)),
        layer_ropes=tuple(1 if window else 0 for window in windows),
    )


def gemma2_9b(context: int = 8192) -> ModelConfig:
    """Return the shape of Gemma 2 9B (its config.json), which has heads of 256, and capped scores
    and logits.
    """
    layers = 42
    windows = tuple(4096 if n % 2 == 0 else 0 for n in range(layers))
    plain = _shape(
        "Gemma2ForCausalLM",
        hidden=3584,
        inner=14336,
        layers=layers,
        heads=16,
        kv_heads=8,
        head_dim=256,
        vocab=256000,
        context=context,
    )
    return replace(
        plain,
        activation="gelu_tanh",
        norm_offset=1.0,
        embedding_scale=3584**0.5,
        attention_softcap=50.0,
        logits_softcap=30.0,
        windows=windows,
    )


def smollm3_3b(context: int = 65536) -> ModelConfig:
    """Return the shape of SmolLM3 3B (its config.json), in which every fourth layer is not
    rotated."""
    plain = _shape(
        "SmolLM3ForCausalLM",
        hidden=2048,
        inner=11008,
        layers=36,
        heads=16,
        kv_heads=4,
        head_dim=128,
        vocab=128256,
        context=context,
    )
    return replace(plain, layer_ropes=tuple(-1 if (n + 1) % 4 == 0 else 0 for n in range(36)))


def qwen3_30b_a3b(context: int = 40960) -> ModelConfig:
    """Return the shape of Qwen3 30B-A3B (its config.json), in which each token uses 8 of 128
    experts.
    """
    layers = 48
    plain = _shape(
        "Qwen3MoeForCausalLM",
        hidden=2048,
        inner=6144,
        layers=layers,
        heads=32,
        kv_heads=4,
        head_dim=128,
        vocab=151936,
        context=context,
    )
    experts = ExpertsConfig(128, 8, 768, normalized=True, layers=frozenset(range(layers)))
    return replace(plain, experts=experts)


def mixtral_8x7b(context: int = 32768) -> ModelConfig:
    """Return the shape of Mixtral 8x7B (Jiang et al., 2024, table 1), in which each token uses 2 of
    8 experts.
    """
    layers = 32
    plain = _shape(
        "MixtralForCausalLM",
        hidden=4096,
        inner=14336,
        layers=layers,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab=32000,
        context=context,
    )
    experts = ExpertsConfig(8, 2, 14336, normalized=True, layers=frozenset(range(layers)))
    return replace(plain, experts=experts)


SHAPES = {
    "Llama 8B": llama_8b(),
    "Llama 70B": llama_70b(),
    "Qwen3 8B": qwen3_8b(),
    "Gemma 3 27B": gemma3_27b(),
    "Gemma 2 9B": gemma2_9b(),
    "SmolLM3 3B": smollm3_3b(),
    "Qwen3 30B-A3B": qwen3_30b_a3b(),
    "Mixtral 8x7B": mixtral_8x7b(),
}
"""Model shapes for the checks of whole steps. Every property for which kernels have separate code
occurs in one of them."""


def with_layers(config: ModelConfig, count: int) -> ModelConfig:
    """Return the model reduced to ``count`` layers that differ most: one of each kind, then any."""
    kinds = list(zip(config.windows, config.layer_ropes, strict=True))
    first = sorted({kind: kinds.index(kind) for kind in reversed(kinds)}.values())
    rest = [n for n in range(config.layers) if n not in first]
    chosen = sorted((first + rest)[:count])
    experts = config.experts
    if experts is not None:
        experts = replace(
            experts, layers=frozenset(k for k, n in enumerate(chosen) if n in experts.layers)
        )
    return replace(
        config,
        layers=len(chosen),
        windows=tuple(config.windows[n] for n in chosen),
        layer_ropes=tuple(config.layer_ropes[n] for n in chosen),
        experts=experts,
    )


def miniature(config: ModelConfig) -> ModelConfig:
    """Return a model of the same kind, small enough for an interpreter, with a layer of each
    kind."""
    kv_heads = 2
    heads = kv_heads * min(4, config.heads // config.kv_heads)
    experts = config.experts
    if experts is not None:
        experts = replace(experts, count=8, per_token=2, intermediate_size=64)
    small = replace(
        config,
        hidden_size=128,
        intermediate_size=192,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=32,
        vocab_size=300,
        context_length=256,
        embedding_scale=1.0 if config.embedding_scale == 1.0 else 128**0.5,
        attention_scale=32**-0.5,
        windows=tuple(min(window, 24) for window in config.windows),
        ropes=tuple(replace(rope, rotary_dim=32) for rope in config.ropes),
        experts=experts,
    )
    kinds = set(zip(config.windows, config.layer_ropes, strict=True))
    return with_layers(small, len(kinds))

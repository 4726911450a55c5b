"""The supported model families: how each differs from Llama.

A dense family is one entry of ``FAMILIES``, under its name in config.json's ``architectures``.
Definitions and defaults are those of Hugging Face's ``transformers``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from baton.config_fields import ConfigFields
from baton.errors import ConfigError

Activation = Literal["silu", "gelu_tanh"]
NormPlacement = Literal["pre", "sandwich", "post"]
QkNorm = Literal["none", "head", "full"]

ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Activations by their name in config.json's ``hidden_act``."""

_LAYER_TYPES = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names that a mixture-of-experts family uses: for the tensors of experts in a checkpoint,
    and for fields in config.json that describe experts."""

    block: str
    """The part of tensor names that stands for the module with the router and the experts. In a
    dense model, this part is ``mlp``."""
    gate: str
    up: str
    down: str
    intermediate_size: str
    """Name of the config.json field with the intermediate size of an expert."""
    always_normalized: bool
    """Whether the weights of a token's experts always sum to 1. Otherwise they do only if
    config.json's ``norm_topk_prob`` is true."""


def _no_layer(_: ConfigFields) -> frozenset[int]:
    return frozenset()


@dataclass(frozen=True, slots=True)
class Family:
    """How the decoder of a model family differs from Llama's."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of fields that a config.json may lack, if they differ from Llama's."""
    norm_placement: NormPlacement = "pre"
    norm_offset: float = 0.0
    qk_norm: QkNorm = "none"
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the square root of the hidden size."""
    sliding_layers: Callable[[ConfigFields], frozenset[int]] = _no_layer
    """Returns the numbers of the layers with sliding-window attention."""
    unrotated_layers: Callable[[ConfigFields], frozenset[int]] = _no_layer
    """Returns the numbers of the layers without rotary embedding."""
    fused_projections: bool = False
    """Whether the checkpoint has query, key and value in one tensor, and gate and up in another."""
    experts: ExpertNames | None = None
    text_config: bool = False
    """Whether config.json has the decoder's fields in a nested object, next to an encoder's."""


def family_of(fields: ConfigFields) -> tuple[str, Family]:
    """Return the name of the architecture in config.json, and the entry of ``FAMILIES`` for it.
    Raises ConfigError if the architecture is not supported."""
    named = fields.get("architectures", [])
    architecture = named[0] if isinstance(named, list) and named else "?"
    family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        known = ", ".join(FAMILIES)
        raise ConfigError(
            f"{fields.path}: architecture {architecture} is not supported; known: {known}"
        )
    return architecture, family


def sliding_or_full(fields: ConfigFields, default: Callable[[int], bool]) -> frozenset[int]:
    """Return the numbers of the layers that ``layer_types`` marks as sliding. If that field is
    absent, ``default`` decides for each layer number."""
    layers = range(fields.size("num_hidden_layers"))
    kinds = fields.list("layer_types", len(layers))
    for kind in kinds:
        if kind not in _LAYER_TYPES:
            known = ", ".join(_LAYER_TYPES)
            raise ConfigError(f"{fields.path}: layer type {kind} is not supported; known: {known}")
    if kinds:
        return frozenset(n for n in layers if _LAYER_TYPES[kinds[n]])
    return frozenset(n for n in layers if default(n))


def _every_layer(fields: ConfigFields) -> frozenset[int]:
    return frozenset(range(fields.size("num_hidden_layers")))


def _every_layer_if_asked(fields: ConfigFields) -> frozenset[int]:
    return _every_layer(fields) if fields.flag("use_sliding_window") else frozenset()


def _qwen_sliding(fields: ConfigFields) -> frozenset[int]:
    if not fields.flag("use_sliding_window"):
        return frozenset()
    first = fields.get("max_window_layers", 28)
    return sliding_or_full(fields, lambda layer: layer >= first)


def _gemma_sliding(fields: ConfigFields) -> frozenset[int]:
    pattern = fields.size("sliding_window_pattern")
    return sliding_or_full(fields, lambda layer: (layer + 1) % pattern != 0)


def _smollm3_unrotated(fields: ConfigFields) -> frozenset[int]:
    layers = range(fields.size("num_hidden_layers"))
    rotated = fields.list("no_rope_layers", len(layers))
    if rotated:
        # Despite its name, the list has a 1 for each layer that is rotated.
        return frozenset(n for n in layers if not rotated[n])
    interval = fields.size("no_rope_layer_interval", 4)
    return frozenset(n for n in layers if (n + 1) % interval == 0)


def _smollm3_sliding(fields: ConfigFields) -> frozenset[int]:
    if not fields.flag("use_sliding_window"):
        return frozenset()
    unrotated = _smollm3_unrotated(fields)
    return sliding_or_full(fields, lambda layer: layer in unrotated)


_GEMMA2: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GEMMA3 = _GEMMA2 | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}

FAMILIES: Mapping[str, Family] = {
    # Llama 2 and 3 (Touvron et al., 2023; Dubey et al., 2024), SmolLM2.
    "LlamaForCausalLM": Family(),
    # Jiang et al., Mistral 7B, 2023.
    "MistralForCausalLM": Family(
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        sliding_layers=_every_layer,
    ),
    # Qwen2 and Qwen2.5 (2024). Their checkpoints have biases for query, key and value.
    "Qwen2ForCausalLM": Family(
        defaults={
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
        },
        sliding_layers=_qwen_sliding,
    ),
    # Qwen3 (2025).
    "Qwen3ForCausalLM": Family(
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
        },
        qk_norm="head",
        sliding_layers=_qwen_sliding,
    ),
    # SmolLM3 (2025).
    "SmolLM3ForCausalLM": Family(
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        sliding_layers=_smollm3_sliding,
        unrotated_layers=_smollm3_unrotated,
    ),
    # Abdin et al., Phi-3, 2024; Phi-4 has the same architecture.
    "Phi3ForCausalLM": Family(
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        sliding_layers=_every_layer,
        fused_projections=True,
    ),
    # Gemma 2 (2024).
    "Gemma2ForCausalLM": Family(
        defaults=_GEMMA2,
        norm_placement="sandwich",
        norm_offset=1.0,
        scaled_embedding=True,
        sliding_layers=_gemma_sliding,
    ),
    # Gemma 3 (2025): the text model, and the text part of the one that also takes images.
    "Gemma3ForCausalLM": Family(
        defaults=_GEMMA3,
        norm_placement="sandwich",
        norm_offset=1.0,
        qk_norm="head",
        scaled_embedding=True,
        sliding_layers=_gemma_sliding,
    ),
    "Gemma3ForConditionalGeneration": Family(
        defaults=_GEMMA3,
        norm_placement="sandwich",
        norm_offset=1.0,
        qk_norm="head",
        scaled_embedding=True,
        sliding_layers=_gemma_sliding,
        text_config=True,
    ),
    # OLMo 2 (2024).
    "Olmo2ForCausalLM": Family(
        defaults={"rms_norm_eps": 1e-5}, norm_placement="post", qk_norm="full"
    ),
    # Jiang et al., Mixtral of Experts, 2024.
    "MixtralForCausalLM": Family(
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        sliding_layers=_every_layer,
        experts=ExpertNames("block_sparse_moe", "w1", "w3", "w2", "intermediate_size", True),
    ),
    # Qwen3 (2025), mixture of experts.
    "Qwen3MoeForCausalLM": Family(
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        qk_norm="head",
        sliding_layers=_every_layer_if_asked,
        experts=ExpertNames(
            "mlp", "gate_proj", "up_proj", "down_proj", "moe_intermediate_size", False
        ),
    ),
}

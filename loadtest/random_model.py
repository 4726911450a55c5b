"""Llama-shaped models with random weights: to measure a speed needs no checkpoint."""

from __future__ import annotations

import torch

from engine.model import DecoderModel
from engine.model_config import ModelConfig
from engine.named_tensors import Matrix
from engine.quantization.weight import DEFAULT_GROUP, QuantizedWeight, QuantKind
from engine.rope_spec import RopeSpec


def llama_config(
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
    """A Llama of these sizes."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
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
        norm_placement="pre",
        qk_norm="none",
        embedding_scale=1.0,
        attention_scale=head_dim**-0.5,
        attention_softcap=0.0,
        logits_softcap=0.0,
        windows=(0,) * layers,
        ropes=(RopeSpec(500000.0, head_dim, None),),
        layer_ropes=(0,) * layers,
        experts=None,
    )


def llama_8b(context: int) -> ModelConfig:
    """The shape of Llama 3.1 8B (Dubey et al., 2024, table 3)."""
    return llama_config(
        hidden=4096,
        inner=14336,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab=128256,
        context=context,
    )


def tiny_llama() -> ModelConfig:
    """Small enough for an interpreter."""
    return llama_config(
        hidden=128,
        inner=192,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=32,
        vocab=300,
        context=256,
    )


def random_model(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    kind: QuantKind | None = None,
    *,
    rounded: torch.dtype | None = None,
) -> DecoderModel:
    """A model whose logits spread, the same for the same arguments.

    With ``kind`` its layers' matrices are quantised. With ``rounded`` it has the values that it has
    in that type.
    """
    generator = torch.Generator(device).manual_seed(0)
    wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {
        "self_attn.q_proj": (wide, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, wide),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }

    def plain(*shape: int) -> torch.Tensor:
        weight = torch.empty(shape, dtype=rounded or dtype, device=device)
        return weight.normal_(0.0, shape[-1] ** -0.5, generator=generator).to(dtype)

    weights: dict[str, Matrix] = {
        "model.embed_tokens.weight": plain(config.vocab_size, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=dtype, device=device),
        "lm_head.weight": plain(config.vocab_size, hidden),
    }
    for number in range(config.layers):
        base = f"model.layers.{number}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{base}.{norm}.weight"] = torch.ones(hidden, dtype=dtype, device=device)
        for name, shape in shapes.items():
            weights[f"{base}.{name}.weight"] = (
                plain(*shape) if kind is None else _random_codes(shape, kind, device, generator)
            )
    return DecoderModel(config, weights, device)


def _random_codes(
    shape: tuple[int, int], kind: QuantKind, device: torch.device, generator: torch.Generator
) -> QuantizedWeight:
    """Codes of any value, and scales that make weights of a usual size of them."""
    outputs, inputs = shape
    width = inputs // 2 if kind == "int4" else inputs
    group = inputs if kind == "fp8" else DEFAULT_GROUP
    codes = torch.randint(
        0, 256, (outputs, width), dtype=torch.uint8, device=device, generator=generator
    )
    if kind == "fp8":
        # Without the codes of NaN.
        codes &= 0xF7
    deviation = {"int8": 74.0, "int4": 4.6, "fp8": 67.0}[kind]
    scale = inputs**-0.5 / deviation
    scales = torch.full((outputs, inputs // group), scale, dtype=torch.float32, device=device)
    mins = scales * -7.5 if kind == "int4" else None
    return QuantizedWeight(codes, kind, scales, mins, group)

"""Makes models of any shape with random weights, in memory or as a folder: no checkpoint needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.model_config import ModelConfig
from engine.model.model import DecoderModel
from engine.model.named_tensors import Matrix
from engine.quantization.weight import DEFAULT_GROUP, QuantizedWeight, QuantKind


def random_model(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    kind: QuantKind | None = None,
    *,
    rounded: torch.dtype | None = None,
) -> DecoderModel:
    """Return a model with random weights and spread-out logits, the same for the same arguments.

    If ``kind`` is given, the matrices of the layers are quantized. If ``rounded`` is given, the
    values are rounded to that type.
    """
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)

    def plain(*shape: int) -> torch.Tensor:
        weight = torch.empty(shape, dtype=rounded or dtype, device=device)
        return weight.normal_(0.0, shape[-1] ** -0.5, generator=generator).to(dtype)

    weights: dict[str, Matrix] = {}
    for name, shape in tensor_shapes(config):
        if len(shape) == 1:
            # The mean is one, after any offset that the family adds.
            weights[name] = (0.1 * plain(*shape).abs() + 1.0 - config.norm_offset).to(dtype)
        elif kind is None or ".layers." not in name or name.endswith(".gate.weight"):
            weights[name] = plain(*shape)
        else:
            weights[name] = random_codes(shape, kind, device, generator)
    if config.embedding_scale != 1.0:
        table = weights["model.embed_tokens.weight"]
        assert isinstance(table, torch.Tensor), "embeddings are not quantized"
        weights["model.embed_tokens.weight"] = table / config.embedding_scale
    return DecoderModel(config, weights, device)


def tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a model's weights as in a checkpoint, with separate matrices."""
    hidden, inner = config.hidden_size, config.intermediate_size
    wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not config.tied_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)
    for number in range(config.layers):
        base = f"model.layers.{number}"
        for norm in _NORMS[config.norm_placement]:
            yield f"{base}.{norm}.weight", (hidden,)
        if config.qk_norm != "none":
            whole = config.qk_norm == "full"
            yield f"{base}.self_attn.q_norm.weight", (wide if whole else config.head_dim,)
            yield f"{base}.self_attn.k_norm.weight", (narrow if whole else config.head_dim,)
        yield f"{base}.self_attn.q_proj.weight", (wide, hidden)
        yield f"{base}.self_attn.k_proj.weight", (narrow, hidden)
        yield f"{base}.self_attn.v_proj.weight", (narrow, hidden)
        yield f"{base}.self_attn.o_proj.weight", (hidden, wide)
        experts, names = config.experts, FAMILIES[config.architecture].experts
        if experts is None or names is None or number not in experts.layers:
            yield f"{base}.mlp.gate_proj.weight", (inner, hidden)
            yield f"{base}.mlp.up_proj.weight", (inner, hidden)
            yield f"{base}.mlp.down_proj.weight", (hidden, inner)
            continue
        yield f"{base}.{names.block}.gate.weight", (experts.count, hidden)
        size = experts.intermediate_size
        for expert in range(experts.count):
            own = f"{base}.{names.block}.experts.{expert}"
            yield f"{own}.{names.gate}.weight", (size, hidden)
            yield f"{own}.{names.up}.weight", (size, hidden)
            yield f"{own}.{names.down}.weight", (hidden, size)


_SHARPER = 2.0
"""Factor by which queries and keys of a written model are scaled. Attention then prefers some
tokens, so that an answer depends on the KV of its whole prompt."""


def write_folder(config: ModelConfig, folder: Path, device: torch.device) -> Path:
    """Write a checkpoint of a Llama with random bf16 weights to ``folder``, and return the folder.

    Its tokenizer.json is empty, since an engine reads no text. The config is written last, so a
    folder that has one is complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(0)
    weights = {}
    for name, shape in tensor_shapes(config):
        weight = torch.empty(shape, dtype=torch.bfloat16, device=device)
        if len(shape) == 1:
            weights[name] = weight.fill_(1.0).cpu()
            continue
        size = 1.0 if "embed_tokens" in name else shape[-1] ** -0.5
        size *= _SHARPER if "q_proj" in name or "k_proj" in name else 1.0
        weights[name] = weight.normal_(0.0, size, generator=generator).cpu()
    save_file(weights, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    fields = {
        "architectures": [config.architecture],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.ropes[0].theta,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": config.vocab_size - 2,
        "eos_token_id": config.vocab_size - 1,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


_NORMS = {
    "pre": ("input_layernorm", "post_attention_layernorm"),
    "sandwich": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "post": ("post_attention_layernorm", "post_feedforward_layernorm"),
}


def random_codes(
    shape: tuple[int, ...],
    kind: QuantKind,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> QuantizedWeight:
    """Return random quantized weights, with scales that give them a usual size."""
    outputs, inputs = shape
    width = inputs // 2 if kind == "int4" else inputs
    group = inputs if kind == "fp8" else DEFAULT_GROUP
    codes = torch.randint(
        0, 256, (outputs, width), dtype=torch.uint8, device=device, generator=generator
    )
    if kind == "fp8":
        # This removes the codes of NaN.
        codes &= 0xF7
    deviation = {"int8": 74.0, "int4": 4.6, "fp8": 67.0}[kind]
    scale = inputs**-0.5 / deviation
    scales = torch.full((outputs, inputs // group), scale, dtype=torch.float32, device=device)
    mins = scales * -7.5 if kind == "int4" else None
    return QuantizedWeight(codes, kind, scales, mins, group)

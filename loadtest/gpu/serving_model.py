"""The model that the serving phase serves: a Llama of random weights, as a Hugging Face folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from loadtest.timed.model_folder import write_tokenizer

_SHARPER = 2.0
"""Queries and keys are larger by this than they are in a trained model's first step, so that
attention prefers some tokens: then an answer depends on the KV of its prompt."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a Llama."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int


TINY = ModelShape(64, 96, 2, 4, 2, 16, 320, 4096)
BILLION = ModelShape(2048, 8192, 16, 32, 8, 64, 32768, 8192)
"""The layers of Llama 3.2 1B, with a smaller vocabulary."""


def write_model(folder: Path, shape: ModelShape, device: str) -> None:
    """Write config, tokenizer and weights in bf16, which are drawn on ``device``.

    The config comes last: a folder that has one is complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_weights(shape, torch.device(device)), folder / "model.safetensors")
    write_tokenizer(folder, shape.vocabulary)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": False,
        "bos_token_id": shape.vocabulary - 2,
        "eos_token_id": shape.vocabulary - 1,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


def _weights(shape: ModelShape, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def drawn(outputs: int, inputs: int, deviation: float) -> torch.Tensor:
        weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device=device)
        return weight.normal_(0.0, deviation, generator=generator).cpu()

    def ones() -> torch.Tensor:
        return torch.ones(shape.hidden, dtype=torch.bfloat16)

    hidden, inner = shape.hidden, shape.inner
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    usual = hidden**-0.5
    weights = {
        "model.embed_tokens.weight": drawn(shape.vocabulary, hidden, 1.0),
        "model.norm.weight": ones(),
        "lm_head.weight": drawn(shape.vocabulary, hidden, usual),
    }
    for number in range(shape.layers):
        layer = f"model.layers.{number}"
        weights |= {
            f"{layer}.input_layernorm.weight": ones(),
            f"{layer}.post_attention_layernorm.weight": ones(),
            f"{layer}.self_attn.q_proj.weight": drawn(wide, hidden, _SHARPER * usual),
            f"{layer}.self_attn.k_proj.weight": drawn(narrow, hidden, _SHARPER * usual),
            f"{layer}.self_attn.v_proj.weight": drawn(narrow, hidden, usual),
            f"{layer}.self_attn.o_proj.weight": drawn(hidden, wide, wide**-0.5),
            f"{layer}.mlp.gate_proj.weight": drawn(inner, hidden, usual),
            f"{layer}.mlp.up_proj.weight": drawn(inner, hidden, usual),
            f"{layer}.mlp.down_proj.weight": drawn(hidden, inner, inner**-0.5),
        }
    return weights

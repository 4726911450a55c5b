"""Heads for tests: of random numbers, and such as must be right, for a target that counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.model_config import load_model_config
from tests.support.models import make_tiny_model


def make_counting_model(folder: Path, **shape: Any) -> Path:
    """A tiny model whose likeliest next token is the next number, whatever came before."""
    make_tiny_model(folder, **shape)
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = torch.zeros_like(weights[name])
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding.roll(1, dims=0).contiguous()
    save_file(weights, path)
    return folder


def make_eagle_head(
    folder: Path, target: Path, *, draft_vocab: int = 64, seed: int = 1, **changes: Any
) -> Path:
    """An EAGLE-3 head of random weights, as published ones are, for a tiny target.

    ``changes`` are made to its config.json.
    """
    config = load_model_config(target)
    hidden, inner, heads, kv_heads, dim = 48, 64, 4, 2, config.head_dim
    _write_config(
        folder,
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": dim,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "vocab_size": config.vocab_size,
            "draft_vocab_size": draft_vocab,
            "tie_word_embeddings": False,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, config.layers - 1]},
        }
        | changes,
    )
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).div(shape[-1] ** 0.5)

    chosen = torch.randperm(config.vocab_size, generator=generator)[:draft_vocab].sort().values
    known = torch.zeros(config.vocab_size, dtype=torch.bool)
    known[chosen] = True
    layer = "midlayer"
    weights = {
        "d2t": chosen - torch.arange(draft_vocab),
        "t2d": known,
        "fc.weight": random(hidden, 3 * config.hidden_size),
        "norm.weight": 1 + 0.1 * random(hidden),
        "lm_head.weight": 4 * random(draft_vocab, hidden),
        f"{layer}.input_layernorm.weight": 1 + 0.1 * random(hidden),
        f"{layer}.hidden_norm.weight": 1 + 0.1 * random(hidden),
        f"{layer}.post_attention_layernorm.weight": 1 + 0.1 * random(hidden),
        f"{layer}.self_attn.q_proj.weight": 2 * random(heads * dim, 2 * hidden),
        f"{layer}.self_attn.k_proj.weight": 2 * random(kv_heads * dim, 2 * hidden),
        f"{layer}.self_attn.v_proj.weight": random(kv_heads * dim, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": random(hidden, heads * dim),
        f"{layer}.mlp.gate_proj.weight": random(inner, hidden),
        f"{layer}.mlp.up_proj.weight": random(inner, hidden),
        f"{layer}.mlp.down_proj.weight": random(hidden, inner),
    }
    save_file(weights, folder / "model.safetensors")
    return folder


def make_counting_eagle(folder: Path, target: Path) -> Path:
    """A head that is right about a counting target's next token but one, and wrong behind that.

    Its feature is the embedding of the token before, and nothing changes it.
    """
    vocab = load_model_config(target).vocab_size
    make_eagle_head(folder, target, draft_vocab=vocab)
    path = folder / "model.safetensors"
    weights = load_file(path)
    hidden = weights["norm.weight"].shape[0]
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        weights[name] = torch.zeros_like(weights[name])
    weights["fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, 2 * hidden)), dim=1)
    weights["norm.weight"] = torch.ones(hidden)
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding.roll(2, dims=0).contiguous()
    del weights["d2t"], weights["t2d"]
    save_file(weights, path)
    return folder


def make_counting_medusa(folder: Path, target: Path, heads: int = 3) -> Path:
    """Heads that are all right about a counting target."""
    config = load_model_config(target)
    hidden = config.hidden_size
    _write_config(
        folder,
        {"medusa_num_heads": heads, "medusa_num_layers": 1, "base_model_name_or_path": "counting"},
    )
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    weights = {}
    for head in range(heads):
        weights[f"{head}.0.linear.weight"] = torch.zeros(hidden, hidden)
        weights[f"{head}.0.linear.bias"] = torch.zeros(hidden)
        weights[f"{head}.1.weight"] = embedding.roll(2 + head, dims=0).contiguous()
    save_file(weights, folder / "medusa_lm_head.safetensors")
    return folder


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))

"""Models for tests: a tiny one made of random numbers, and the real one where it can be had."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton.errors import BatonError
from deploy.models import model_store
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.rope_spec import RopeSpec

VOCAB = 320
EOS = 319


def plain_config(**changes: Any) -> ModelConfig:
    """A Llama's config with ``changes``; what depends on them follows."""
    fields: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 8,
        "hidden_size": 16,
        "intermediate_size": 8,
        "layers": 1,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 8,
        "context_length": 4096,
        "rms_norm_eps": 1e-5,
        "tied_embeddings": True,
        "eos_ids": (),
        "activation": "silu",
        "norm_offset": 0.0,
        "norm_placement": "pre",
        "qk_norm": "none",
        "embedding_scale": 1.0,
        "attention_softcap": 0.0,
        "logits_softcap": 0.0,
        "experts": None,
    } | changes
    layers, dim = fields["layers"], fields["head_dim"]
    following: dict[str, Any] = {
        "attention_scale": dim**-0.5,
        "windows": (0,) * layers,
        "ropes": (RopeSpec(10000.0, dim, None),),
        "layer_ropes": (0,) * layers,
    }
    return ModelConfig(**(following | fields))


def make_tiny_model(
    folder: Path, *, layers: int = 2, context: int = 512, seed: int = 0, head_dim: int = 8
) -> Path:
    """A Llama of random weights with a byte-level tokenizer, as a Hugging Face folder.

    The weights are large enough that the likeliest token stands out. The CPU's own kernels take it
    in bfloat16 with a ``head_dim`` that is a multiple of 16.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hidden, heads, kv_heads, dim, inner = 48, 6, 2, head_dim, 96
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
        "bos_token_id": EOS - 1,
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).div(shape[-1] ** 0.5)

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCAB, hidden, generator=generator),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": 4 * random(VOCAB, hidden),
    }
    for n in range(layers):
        prefix = f"model.layers.{n}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(hidden),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}.self_attn.q_proj.weight": 2 * random(heads * dim, hidden),
            f"{prefix}.self_attn.k_proj.weight": 2 * random(kv_heads * dim, hidden),
            f"{prefix}.self_attn.v_proj.weight": random(kv_heads * dim, hidden),
            f"{prefix}.self_attn.o_proj.weight": random(hidden, heads * dim),
            f"{prefix}.mlp.gate_proj.weight": random(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": random(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": random(hidden, inner),
        }
    save_file(weights, folder / "model.safetensors")
    _make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder


def make_tiny_fp8(folder: Path, *, scale_per_row: bool = True, seed: int = 0) -> Path:
    """The same with fp8 weights that have a scale per row or per tensor (compressed-tensors)."""
    make_tiny_model(folder, seed=seed)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "symmetric": True,
                    "strategy": "channel" if scale_per_row else "tensor",
                },
            }
        },
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weight = weights.pop(name)
        most = weight.abs().amax(dim=1, keepdim=True) if scale_per_row else weight.abs().max()
        scale = (most / 448.0).reshape(-1, 1) if scale_per_row else (most / 448.0).reshape(1)
        weights[name] = (weight / scale).to(torch.float8_e4m3fn)
        weights[f"{name}_scale"] = scale
    save_file(weights, folder / "model.safetensors")
    return folder


def make_tiny_moe(folder: Path, *, experts: int = 5, seed: int = 0) -> Path:
    """The same with a mixture of experts in each layer, as Mixtral has it."""
    make_tiny_model(folder, seed=seed)
    config = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if ".mlp." in name]:
        weight = weights.pop(name)
        base, _, layer = name.removesuffix("_proj.weight").partition(".mlp.")
        part = {"gate": "w1", "up": "w3", "down": "w2"}[layer]
        moe = f"{base}.block_sparse_moe"
        for n in range(experts):
            noise = torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5
            weights[f"{moe}.experts.{n}.{part}.weight"] = noise
        router = torch.randn(experts, config["hidden_size"], generator=generator)
        weights[f"{moe}.gate.weight"] = router
    save_file(weights, folder / "model.safetensors")
    return folder


def make_tiny_olmo(folder: Path, *, seed: int = 0) -> Path:
    """The same as OLMo 2 has it: norms behind sublayers, and over all queries, and all keys."""
    make_tiny_model(folder, seed=seed)
    config = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(folder / "model.safetensors")
    for base in [name.removesuffix(".input_layernorm.weight") for name in weights]:
        before = weights.pop(f"{base}.input_layernorm.weight", None)
        if before is None:
            continue
        weights[f"{base}.post_feedforward_layernorm.weight"] = before
        for kind in "qk":
            (size, _) = weights[f"{base}.self_attn.{kind}_proj.weight"].shape
            noise = 0.5 + torch.rand(size, generator=generator)
            weights[f"{base}.self_attn.{kind}_norm.weight"] = noise
    save_file(weights, folder / "model.safetensors")
    return folder


def make_padded_model(folder: Path, *, layers: int, **options: Any) -> Path:
    """The tiny model of one layer as one of many: those behind the first change nothing.

    So the small one guesses every token of it, for a part of the time.
    """
    make_tiny_model(folder, layers=layers, **options)
    first = make_tiny_model(folder / "first", layers=1, **options)
    weights = load_file(folder / "model.safetensors") | load_file(first / "model.safetensors")
    shutil.rmtree(first)
    for n in range(1, layers):
        weights[f"model.layers.{n}.self_attn.o_proj.weight"].zero_()
        weights[f"model.layers.{n}.mlp.down_proj.weight"].zero_()
    save_file(weights, folder / "model.safetensors")
    return folder


def _make_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(alphabet)}
    for number in range(len(vocab), EOS - 1):
        vocab[f"<extra_{number}>"] = number
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    return tokenizer


def real_model() -> Path:
    """The demo model's folder, in bfloat16; skips the test where it cannot be had."""
    try:
        return model_store.resolve("smollm2-135m-instruct", lambda _: None).path
    except BatonError as error:
        pytest.skip(f"the demo model cannot be had: {error.message}")

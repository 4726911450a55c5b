"""Writes GGUF files of tiny models, the way llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

F32 = GGMLQuantizationType.F32
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
CONTEXT = 128
SPECIALS = ["<unk>", "<s>", "</s>", "<|turn|>"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

Array = npt.NDArray[np.float32]
Tensors = dict[str, Array]


def byte_level_model(pre_tokenizer: pre_tokenizers.PreTokenizer | None = None) -> dict[str, Any]:
    """``vocab`` and ``merges`` of a small byte-level BPE that starts with SPECIALS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = "the baton is passed from the prefill to the decode 2024 2024 2025 it's we'll IT'S"
    tokenizer.train_from_iterator([text] * 8, trainer)
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model


def tokenizer_metadata(pre: str = "gpt-2") -> dict[str, Any]:
    model = byte_level_model()
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [3 if token in SPECIALS else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def model_metadata() -> dict[str, Any]:
    return {
        "llama.block_count": LAYERS,
        "llama.context_length": CONTEXT,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INTERMEDIATE,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.rope.freq_base": 50000.0,
    } | tokenizer_metadata()


def random_tensors(*, tied: bool = True, seed: int = 0) -> Tensors:
    """Tensors under their Hugging Face names, in plain order; bfloat16 can hold every value."""
    rng = np.random.default_rng(seed)
    vocab_size = len(model_metadata()["tokenizer.ggml.tokens"])
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, HIDDEN)}
    for layer in range(LAYERS):
        block = {
            "input_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    shapes["model.norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["lm_head.weight"] = (vocab_size, HIDDEN)
    return {name: bfloat16_values(rng, shape) for name, shape in shapes.items()}


def bfloat16_values(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    values = rng.normal(scale=0.3, size=shape).astype(np.float32)
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def to_llama_cpp(tensors: Tensors) -> Tensors:
    """Under llama.cpp's names, Q and K in llama.cpp's order."""
    renamed = {}
    for name, values in tensors.items():
        heads = HEADS if ".q_proj" in name else KV_HEADS if ".k_proj" in name else 0
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)  # noqa: PLW2901
        renamed[name] = _permute(values, heads) if heads else values
    return renamed


def _permute(values: Array, heads: int) -> Array:
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def write_gguf(
    path: Path,
    tensors: Tensors | None = None,
    metadata: Mapping[str, Any] | None = None,
    kind: GGMLQuantizationType = F32,
    architecture: str = "llama",
) -> Path:
    """``tensors`` under llama.cpp's names; matrices are stored as ``kind``, the rest as F32.

    A metadata value of None leaves the key out.
    """
    writer = GGUFWriter(path, architecture)
    for key, value in (model_metadata() | dict(metadata or {})).items():
        _add(writer, key, value)
    for name, values in (tensors or to_llama_cpp(random_tensors())).items():
        stored = kind if values.ndim > 1 else F32
        writer.add_tensor(name, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)

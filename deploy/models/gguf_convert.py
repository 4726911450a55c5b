"""Converts a GGUF file of Llama architecture to a Hugging Face folder. The weights become bfloat16,
or keep their quantized values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from baton.config.errors import plain_faults
from baton.errors import ConfigError
from baton.extras import needs_extra
from deploy.models.gguf_tokenizer import TokenizerMetadata, build_tokenizer, tokenizer_config

with needs_extra("gguf", "a .gguf file"):
    from gguf import GGUFReader, ReaderTensor
    from gguf.quants import dequantize

_WITH_CODES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
_SUPPORTED = ("F32", "F16", "BF16", *_WITH_CODES)
_PIECE_VALUES = 1 << 22
"""Maximum number of values that are dequantized at once. It makes memory use independent of the
model's size."""

_MAX_LAYERS = 4096
"""Maximum number of layers of a model. It bounds the list of weight names, which is made from the
metadata before the tensors in the file are checked."""

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"

# Constants of the RoPE scaling of Llama 3.1 and later. A GGUF file only has their result.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class LlamaMetadata(BaseModel):
    """The keys of a GGUF file that describe the model."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    layers: int = Field(alias="llama.block_count", ge=1, le=_MAX_LAYERS)
    context_length: int = Field(alias="llama.context_length", ge=1)
    hidden: int = Field(alias="llama.embedding_length", ge=1)
    intermediate: int = Field(alias="llama.feed_forward_length", ge=1)
    heads: int = Field(alias="llama.attention.head_count", ge=1)
    kv_heads: int | None = Field(default=None, alias="llama.attention.head_count_kv", ge=1)
    key_length: int | None = Field(default=None, alias="llama.attention.key_length", ge=1)
    eps: float = Field(alias="llama.attention.layer_norm_rms_epsilon", gt=0)
    rope_dimensions: int | None = Field(default=None, alias="llama.rope.dimension_count")
    rope_theta: float = Field(default=10000.0, alias="llama.rope.freq_base", gt=0)
    rope_scaling: Literal["none", "linear", "yarn"] = Field(
        default="none", alias="llama.rope.scaling.type"
    )
    rope_factor: float = Field(default=1.0, alias="llama.rope.scaling.factor", gt=0)
    rope_original_context: int | None = Field(
        default=None, alias="llama.rope.scaling.original_context_length", ge=1
    )
    parts: int = Field(default=1, alias="split.count")

    @property
    def head_dim(self) -> int:
        return self.key_length or self.hidden // self.heads


@dataclass(frozen=True, slots=True)
class _Weight:
    """A tensor that the conversion writes, and where its rows are in the GGUF file."""

    name: str
    shape: tuple[int, ...]
    tensor: ReaderTensor
    heads: int = 0
    """Number of heads whose rows are in llama.cpp's RoPE order; 0 if the rows are in plain
    order."""

    @property
    def n_bytes(self) -> int:
        """Return the tensor's size in bfloat16, in bytes."""
        return 2 * math.prod(self.shape)

    @property
    def has_codes(self) -> bool:
        return self.tensor.tensor_type.name in _WITH_CODES and len(self.shape) == 2


class _BoundedReader(GGUFReader):
    """A GGUF reader that raises an error for data beyond the end of the file.

    The library reads empty data beyond the end, and so would read an array of 2^60 entries.
    """

    def _get(
        self,
        offset: int,
        dtype: npt.DTypeLike,
        count: int = 1,
        override_order: Literal["I", "S", "<"] | None = None,
    ) -> npt.NDArray[Any]:
        if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise EOFError("it ends too early")
        return super()._get(offset, dtype, count, override_order)


def convert(gguf: Path, folder: Path, *, keep_codes: bool = False, weights: bool = True) -> None:
    """Write the model in ``gguf`` into ``folder``, which exists and is empty.

    If ``weights`` is false, only the tokenizer and the configuration are written.

    With ``keep_codes``, quantized matrices (the embedding included) keep their quantized values, in
    Baton's own layout: see ``engine.quantization.formats``. All other tensors become bfloat16.
    Raises ConfigError when the file is damaged or holds anything that a plain Llama decoder cannot
    express.
    """
    try:
        reader = _BoundedReader(gguf)
        raw = {name: field.contents() for name, field in reader.fields.items()}
    except (
        *(ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError),
        EOFError,
    ) as error:
        raise ConfigError(f"{gguf} is not a readable GGUF file: {error}") from error
    try:
        _check_supported(reader, raw)
        model, vocabulary = _parse(LlamaMetadata, raw), _parse(TokenizerMetadata, raw)
        tensors = _weights(reader, model)
        config = _config(model, vocabulary, tensors, _rope(model, reader))
        _write_tokenizer(folder, vocabulary, model.context_length, config["vocab_size"])
    except ConfigError as error:
        raise ConfigError(f"{gguf} cannot be converted: {error.message}") from error
    path = folder / "model.safetensors"
    if weights and keep_codes and any(tensor.has_codes for tensor in tensors):
        config["quantization_config"] = _write_codes(path, tensors)
    elif weights:
        _write_safetensors(path, tensors)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(config))


Metadata = TypeVar("Metadata", bound=BaseModel)


def _parse(kind: type[Metadata], raw: dict[str, Any]) -> Metadata:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("; ".join(plain_faults(error, kind))) from error


def _check_supported(reader: GGUFReader, raw: dict[str, Any]) -> None:
    architecture = raw.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"architecture {architecture!r} is not supported; llama is")
    if reader.byte_order != "I":
        raise ConfigError("it is stored in the other byte order")
    for tensor in reader.tensors:
        if tensor.tensor_type.name not in _SUPPORTED:
            raise ConfigError(
                f"tensor {tensor.name} has type {tensor.tensor_type.name}; "
                f"supported are {', '.join(_SUPPORTED)}"
            )


def _weights(reader: GGUFReader, model: LlamaMetadata) -> list[_Weight]:
    """Return every tensor under its Hugging Face name, in the file's order. Raises ConfigError if a
    tensor is missing or does not fit the model."""
    if model.parts != 1:
        raise ConfigError("it is one part of several; join the parts first")
    if model.hidden % model.heads or model.head_dim % 2:
        raise ConfigError(f"hidden size {model.hidden} and {model.heads} heads do not match")
    weights = [
        _Weight(
            name=_hugging_face_name(tensor.name),
            shape=tuple(int(size) for size in reversed(tensor.shape)),
            tensor=tensor,
            heads=_permuted_heads(tensor.name, model),
        )
        for tensor in reader.tensors
        if tensor.name != _ROPE_FACTORS
    ]
    _check_shapes({weight.name: weight.shape for weight in weights}, model)
    return weights


def _hugging_face_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _BLOCK_NAMES:
        raise ConfigError(f"tensor {name} does not belong to a Llama decoder")
    return f"model.layers.{match[1]}.{_BLOCK_NAMES[match[2]]}.{match[3]}"


def _permuted_heads(name: str, model: LlamaMetadata) -> int:
    if ".attn_q." in name:
        return model.heads
    if ".attn_k." in name:
        return model.kv_heads or model.heads
    return 0


def _check_shapes(found: dict[str, tuple[int, ...]], model: LlamaMetadata) -> None:
    vocab_size = found.get("model.embed_tokens.weight", (0,))[0]
    expected = _expected_shapes(model, vocab_size)
    for part in (".self_attn.", ".mlp."):
        if any(part in name and name.endswith(".bias") for name in found):
            expected |= {
                name.replace(".weight", ".bias"): shape[:1]
                for name, shape in expected.items()
                if part in name
            }
    missing = expected.keys() - found.keys() - {"lm_head.weight"}
    if missing:
        raise ConfigError(f"tensors are missing, such as {min(missing)}")
    for name, shape in found.items():
        if shape != expected.get(name):
            raise ConfigError(
                f"tensor {name} has shape {shape}; the metadata say {expected.get(name, 'none')}"
            )


def _expected_shapes(model: LlamaMetadata, vocab_size: int) -> dict[str, tuple[int, ...]]:
    hidden, wide = model.hidden, model.intermediate
    queries = model.heads * model.head_dim
    keys = (model.kv_heads or model.heads) * model.head_dim
    block = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab_size, hidden),
    }
    for layer in range(model.layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    return shapes


def _config(
    model: LlamaMetadata,
    vocabulary: TokenizerMetadata,
    weights: list[_Weight],
    rope: dict[str, Any],
) -> dict[str, Any]:
    shapes = {weight.name: weight.shape for weight in weights}
    ends = vocabulary.end_ids()
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
        "attention_dropout": 0.0,
        "bos_token_id": vocabulary.bos,
        "dtype": "bfloat16",
        "eos_token_id": ends if len(ends) > 1 else vocabulary.eos,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "initializer_range": 0.02,
        "intermediate_size": model.intermediate,
        "max_position_embeddings": model.context_length,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in shapes,
        "model_type": "llama",
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.kv_heads or model.heads,
        "pad_token_id": vocabulary.pad,
        # The file holds fp32: 9.99999974e-06 means 1e-05.
        "rms_norm_eps": float(f"{model.eps:.3g}"),
        "rope_parameters": rope,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "use_cache": True,
        "vocab_size": shapes["model.embed_tokens.weight"][0],
    }
    if rope["rope_type"] != "default":
        config["rope_scaling"] = rope
    return config


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _rope(model: LlamaMetadata, reader: GGUFReader) -> dict[str, Any]:
    if model.rope_dimensions not in (None, model.head_dim):
        raise ConfigError(
            f"RoPE applies to {model.rope_dimensions} of {model.head_dim} dimensions; only all "
            "dimensions are supported"
        )
    rope: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_type": "default"}
    factors = next((t for t in reader.tensors if t.name == _ROPE_FACTORS), None)
    if factors is not None:
        values = dequantize(factors.data, factors.tensor_type)
        return rope | _llama3_rope(model, np.asarray(values, dtype=np.float64))
    if model.rope_scaling == "none":
        return rope
    rope |= {"rope_type": model.rope_scaling, "factor": model.rope_factor}
    if model.rope_scaling == "yarn":
        rope["original_max_position_embeddings"] = (
            model.rope_original_context or model.context_length
        )
    return rope


def _llama3_rope(model: LlamaMetadata, factors: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Return a RoPE scaling configuration that reproduces ``factors``, by which the file divides
    the RoPE frequencies."""
    factor = float(factors.max())
    if factors.size != model.head_dim // 2:
        raise ConfigError(f"{_ROPE_FACTORS} has {factors.size} entries, not {model.head_dim // 2}")
    exponents = np.arange(0, model.head_dim, 2) / model.head_dim
    wavelengths = 2 * math.pi * model.rope_theta**exponents
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    turns = _LLAMA3_ROPE["original_max_position_embeddings"] / wavelengths
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    if not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise ConfigError(f"{_ROPE_FACTORS} is not the RoPE scaling of Llama 3")
    return {"rope_type": "llama3", "factor": float(f"{factor:.6g}"), **_LLAMA3_ROPE}


def _write_tokenizer(
    folder: Path, vocabulary: TokenizerMetadata, max_length: int, vocab_size: int
) -> None:
    if len(vocabulary.tokens) > vocab_size:
        raise ConfigError(
            f"there are {len(vocabulary.tokens)} tokens, but {vocab_size} rows of embeddings"
        )
    build_tokenizer(vocabulary).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(vocabulary, max_length))
    if vocabulary.chat_template is not None:
        (folder / "chat_template.jinja").write_text(vocabulary.chat_template, encoding="utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_codes(path: Path, weights: list[_Weight]) -> dict[str, Any]:
    """Write quantized matrices with the quantized values of the GGUF file, and all other tensors in
    bfloat16. Returns the ``quantization_config``."""
    # Imported here, since the launcher does not need torch otherwise, and the import takes a
    # second.
    import torch  # noqa: PLC0415

    from engine.quantization.formats import NATIVE_CONFIG, native_tensors  # noqa: PLC0415
    from engine.quantization.gguf_blocks import read_blocks  # noqa: PLC0415
    from engine.quantization.tensor_file import write_tensors  # noqa: PLC0415

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for weight in weights:
            if weight.has_codes:
                raw = torch.from_numpy(_rows(weight, slice(None)).copy())
                read = read_blocks(raw, weight.tensor.tensor_type.name)
                yield from native_tensors(weight.name, read)
            else:
                bits = np.concatenate([piece.reshape(-1) for piece in _bfloat16_pieces(weight)])
                yield weight.name, torch.from_numpy(bits).view(torch.bfloat16).view(weight.shape)

    write_tensors(path, tensors(), {"format": "pt"})
    return NATIVE_CONFIG


def _write_safetensors(path: Path, weights: list[_Weight]) -> None:
    """Write a safetensors file piece by piece. The library's own writer needs all tensors in memory
    at once."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        begin, end = end, end + weight.n_bytes
        shape = list(weight.shape)
        header[weight.name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    blob = json.dumps(header, separators=(",", ":")).encode()
    blob += b" " * (-len(blob) % 8)
    with path.open("xb") as file:
        file.write(len(blob).to_bytes(8, "little"))
        file.write(blob)
        for weight in weights:
            for piece in _bfloat16_pieces(weight):
                file.write(piece.data)


def _bfloat16_pieces(weight: _Weight) -> Iterator[npt.NDArray[np.uint16]]:
    rows = _row_count(weight)
    step = max(1, _PIECE_VALUES * rows // math.prod(weight.shape))
    for start in range(0, rows, step):
        raw = _rows(weight, slice(start, start + step))
        yield _to_bfloat16(dequantize(raw, weight.tensor.tensor_type))


def _row_count(weight: _Weight) -> int:
    return weight.shape[0] if weight.heads or len(weight.shape) > 1 else 1


def _rows(weight: _Weight, part: slice) -> npt.NDArray[Any]:
    """Return the rows ``part`` of a tensor, in the file's encoding and in Hugging Face's row order.

    Each row is quantized separately, so rows can be reordered before they are dequantized.
    """
    rows = _row_count(weight)
    data: npt.NDArray[Any] = weight.tensor.data.reshape(rows, -1)
    return data[_plain_order(rows, weight.heads)[part]] if weight.heads else data[part]


def _plain_order(rows: int, heads: int) -> npt.NDArray[np.intp]:
    """Return an array ``order``: row i of the Hugging Face tensor is row ``order[i]`` of the GGUF
    tensor.

    llama.cpp rotates neighbors (2i, 2i+1) of a head, Hugging Face (i, i + head_dim/2).
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Convert fp32 to bfloat16: the upper 16 bits, rounded to nearest, ties to even. NaN stays
    NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    quiet = (bits >> 16) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)

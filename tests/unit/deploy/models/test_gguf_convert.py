from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from baton.errors import ConfigError
from deploy.models import gguf_convert
from deploy.models.gguf_convert import convert
from engine.model.weights import load_weights
from engine.quantization.gguf_blocks import BLOCK_FORMATS
from engine.quantization.weight import QuantizedWeight
from engine.quantization.weight import dequantize as dequantize_weight
from tests.support.deploy import tiny_gguf
from tests.support.deploy.tiny_gguf import (
    HEAD_DIM,
    HIDDEN,
    LAYERS,
    bfloat16_values,
    random_tensors,
    to_llama_cpp,
    write_gguf,
)

KINDS = [
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
]
K_QUANTS = [GGMLQuantizationType[name] for name in ("Q4_K", "Q5_K", "Q6_K")]
CPU = torch.device("cpu")


def converted(tmp_path: Path, *, keep_codes: bool = False, **options: Any) -> Path:
    folder = tmp_path / ("codes" if keep_codes else "folder")
    folder.mkdir()
    convert(write_gguf(tmp_path / "tiny.gguf", **options), folder, keep_codes=keep_codes)
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def stored(values: tiny_gguf.Array, kind: GGMLQuantizationType) -> torch.Tensor:
    """What is left of a tensor in plain order after quantization and bfloat16."""
    if values.ndim > 1:
        values = dequantize(quantize(values, kind), kind)
    return torch.from_numpy(values.copy()).to(torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("piece_values", [1 << 22, 300])
def test_every_type_gives_the_values_that_it_holds(
    tmp_path: Path,
    kind: GGMLQuantizationType,
    piece_values: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gguf_convert, "_PIECE_VALUES", piece_values)
    rng = np.random.default_rng(1)
    originals = {
        name: rng.normal(size=values.shape).astype(np.float32)
        for name, values in random_tensors(tied=False).items()
    }
    folder = converted(tmp_path, tensors=to_llama_cpp(originals), kind=kind)
    found = load_file(folder / "model.safetensors")
    assert found.keys() == originals.keys()
    for name, values in originals.items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], stored(values, kind)), name


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name[0] == "Q"])
@pytest.mark.parametrize("tied", [True, False])
def test_codes_are_kept(tmp_path: Path, kind: GGMLQuantizationType, tied: bool) -> None:
    """In fp32 they are the very values that the file holds, Q's and K's rows in plain order."""
    rng = np.random.default_rng(1)
    originals = {
        name: rng.normal(size=values.shape).astype(np.float32)
        for name, values in random_tensors(tied=tied).items()
    }
    folder = converted(tmp_path, tensors=to_llama_cpp(originals), kind=kind, keep_codes=True)
    found = load_weights(folder, CPU, torch.bfloat16)
    assert found.keys() == originals.keys()
    for name, values in originals.items():
        weight = found[name]
        if values.ndim == 1:
            assert isinstance(weight, torch.Tensor)
            assert torch.equal(weight, stored(values, kind))
            continue
        assert isinstance(weight, QuantizedWeight)
        assert weight.codes.data_ptr() % 64 == 0
        expected = torch.from_numpy(dequantize(quantize(values, kind), kind).copy())
        assert torch.equal(dequantize_weight(weight), expected), name


def random_blocks(values: tiny_gguf.Array, kind: GGMLQuantizationType) -> npt.NDArray[Any]:
    """Blocks of a K-quant, which the gguf package cannot make: any bits with scales of 1/64."""
    if kind not in K_QUANTS:
        return quantize(values, kind)
    rng = np.random.default_rng(values.size)
    width = BLOCK_FORMATS[kind.name].size
    raw = rng.integers(0, 256, (values.shape[0], values.shape[1] // 256, width), dtype=np.uint8)
    scale = np.array([2.0**-6], dtype=np.float16).view(np.uint8)
    for start in (208,) if kind.name == "Q6_K" else (0, 2):
        raw[:, :, start : start + 2] = scale
    return raw.reshape(values.shape[0], -1)


@pytest.mark.parametrize("kind", K_QUANTS)
def test_k_quants_are_kept_and_converted(
    tmp_path: Path, kind: GGMLQuantizationType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("HIDDEN", 256), ("INTERMEDIATE", 256), ("HEAD_DIM", 64), ("LAYERS", 1)):
        monkeypatch.setattr(tiny_gguf, name, size)
    monkeypatch.setattr(tiny_gguf, "quantize", random_blocks)
    tensors = to_llama_cpp(random_tensors())
    plain = load_file(converted(tmp_path, tensors=tensors, kind=kind) / "model.safetensors")
    (tmp_path / "tiny.gguf").unlink()
    folder = converted(tmp_path, tensors=tensors, kind=kind, keep_codes=True)
    for name, weight in load_weights(folder, CPU, torch.bfloat16).items():
        values = dequantize_weight(weight) if isinstance(weight, QuantizedWeight) else weight
        assert torch.equal(values.bfloat16(), plain[name]), name
        assert isinstance(weight, QuantizedWeight) == (values.dim() == 2)


def test_a_file_without_codes_is_converted_plainly(tmp_path: Path) -> None:
    folder = converted(tmp_path, keep_codes=True)
    assert "quantization_config" not in config_of(folder)
    assert load_file(folder / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_computes_the_original_logits(tmp_path: Path, tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    originals = random_tensors(tied=tied)
    folder = converted(tmp_path, tensors=to_llama_cpp(originals))
    reference = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=originals["model.embed_tokens.weight"].shape[0],
            hidden_size=HIDDEN,
            intermediate_size=tiny_gguf.INTERMEDIATE,
            num_hidden_layers=LAYERS,
            num_attention_heads=tiny_gguf.HEADS,
            num_key_value_heads=tiny_gguf.KV_HEADS,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
            tie_word_embeddings=tied,
        )
    )
    state = {name: torch.from_numpy(values) for name, values in originals.items()}
    reference.load_state_dict(state, strict=not tied)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(5, 45).reshape(2, 20)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, reference(ids).logits)


def test_transformers_reads_the_same_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415

    folder = converted(tmp_path, metadata={"tokenizer.ggml.add_bos_token": True})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode("the baton 2024<|turn|>")
    assert ids[0] == tokenizer.bos_token_id == 1
    assert ids[-1] == 3
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the baton 2024"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("</s>", "</s>")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "hi"


def test_config_says_what_the_file_says(tmp_path: Path) -> None:
    folder = converted(tmp_path, metadata={"tokenizer.ggml.eot_token_id": 3})
    config = config_of(folder)
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "dtype": "bfloat16",
        "eos_token_id": [2, 3],
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "num_key_value_heads": 2,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"},
        "rope_theta": 50000.0,
        "tie_word_embeddings": True,
    }
    assert {name: config[name] for name in expected} == expected
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 2}
    assert (folder / "chat_template.jinja").read_text() == tiny_gguf.TEMPLATE


def test_biases_are_kept(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    originals = random_tensors()
    for name, values in list(originals.items()):
        if ".self_attn." in name:
            bias = bfloat16_values(rng, values.shape[:1])
            originals[name.replace(".weight", ".bias")] = bias
    folder = converted(tmp_path, tensors=to_llama_cpp(originals))
    found = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.bias"
    assert torch.equal(found[name].float(), torch.from_numpy(originals[name]))
    config = config_of(folder)
    assert (config["attention_bias"], config["mlp_bias"]) == (True, False)


def test_rope_factors_of_llama_3_become_its_scaling(tmp_path: Path) -> None:
    from transformers import LlamaConfig  # noqa: PLC0415
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 50000.0,
    }
    config = LlamaConfig(head_dim=HEAD_DIM, rope_parameters=scaling)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 50000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    tensors = to_llama_cpp(random_tensors())
    tensors["rope_freqs.weight"] = (plain / frequencies).numpy()
    folder = converted(tmp_path, tensors=tensors)
    assert config_of(folder)["rope_parameters"] == scaling
    assert config_of(folder)["rope_scaling"] == scaling


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    tensors = to_llama_cpp(random_tensors())
    tensors["rope_freqs.weight"] = np.linspace(1, 9, HEAD_DIM // 2, dtype=np.float32)
    with pytest.raises(ConfigError, match="not the RoPE scaling of Llama 3"):
        converted(tmp_path, tensors=tensors)


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    keys = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
    }
    folder = converted(tmp_path, metadata=keys)
    assert config_of(folder)["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }


def without(name: str) -> tiny_gguf.Tensors:
    tensors = to_llama_cpp(random_tensors())
    del tensors[name]
    return tensors


def with_extra(name: str, shape: tuple[int, ...]) -> tiny_gguf.Tensors:
    return to_llama_cpp(random_tensors()) | {name: np.zeros(shape, np.float32)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": GGMLQuantizationType.MXFP4}, "has type MXFP4; supported are F32, F16"),
        ({"architecture": "qwen2"}, "architecture 'qwen2' is not supported"),
        ({"tensors": without("blk.1.ffn_up.weight")}, "such as model.layers.1.mlp.up_proj.weight"),
        ({"tensors": without("token_embd.weight")}, "such as model.embed_tokens.weight"),
        ({"tensors": with_extra("blk.0.ffn_gate_inp.weight", (4, HIDDEN))}, "does not belong"),
        ({"tensors": with_extra("blk.7.attn_norm.weight", (HIDDEN,))}, "metadata say none"),
        ({"tensors": with_extra("blk.0.attn_q.bias", (HIDDEN,))}, "are missing, such as "),
        ({"metadata": {"llama.feed_forward_length": 97}}, "has shape"),
        ({"metadata": {"llama.block_count": None}}, "`llama.block_count` is missing"),
        (
            {"metadata": {"llama.attention.head_count_kv": [2, 2]}},
            "head_count_kv. must be a whole number, not a list",
        ),
        ({"metadata": {"llama.attention.key_length": 7}}, "do not match"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "RoPE applies to 8 of 16"),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "none, linear or yarn"),
        ({"metadata": {"split.count": 2}}, "one part of several"),
        ({"metadata": {"tokenizer.ggml.model": "bert"}}, "'bert' is not supported"),
    ],
)
def test_what_cannot_be_converted_is_said(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        converted(tmp_path, **options)
    assert "tiny.gguf" in str(caught.value)


@pytest.mark.parametrize("kept", [0, 3, 100, 5000, -100])
def test_damaged_files_are_refused(tmp_path: Path, kept: int) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:kept])
    with pytest.raises(ConfigError, match=r"cut\.gguf is not a readable GGUF file"):
        convert(tmp_path / "cut.gguf", tmp_path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_bytes(b"no model at all" * 100)
    with pytest.raises(ConfigError, match="not a readable GGUF file"):
        convert(tmp_path / "text.gguf", tmp_path)

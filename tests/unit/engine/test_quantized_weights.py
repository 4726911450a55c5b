"""Loading weights quantized, or quantizing them while they are loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import ConfigError
from engine.checkpoint.model_config import load_model_config
from engine.model.model import DecoderModel
from engine.model.named_tensors import TIED_HEAD
from engine.model.weights import iterate_weights, kind_of_most, load_weights
from engine.quantization.weight import KINDS, QuantizedWeight, QuantKind, dequantize, quantize
from tests.support.engine import checkpoints
from tests.support.engine.weights import name_of
from tests.support.models import make_tiny_model

CPU = torch.device("cpu")
GPTQ = {"quant_method": "gptq", "bits": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_are_quantized(model: Path, kind: QuantKind) -> None:
    plain = load_weights(model, CPU, torch.float32)
    found = load_weights(model, CPU, torch.bfloat16, kind)
    assert found.keys() == plain.keys()
    assert kind_of_most(found.items()) == kind
    for name, weight in found.items():
        source = plain[name]
        assert isinstance(source, torch.Tensor)
        if "proj" in name or name == "lm_head.weight":
            assert isinstance(weight, QuantizedWeight)
            assert weight.kind == kind
            error = (dequantize(weight) - source).norm() / source.norm()
            assert error < {"int8": 0.01, "int4": 0.09, "fp8": 0.04}[kind]
        else:
            assert isinstance(weight, torch.Tensor)
            assert weight.dtype == torch.bfloat16


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_a_plain_checkpoint_stays_plain(model: Path, quantization: str) -> None:
    found = load_weights(model, CPU, torch.float32, quantization)
    assert all(isinstance(weight, torch.Tensor) for weight in found.values())
    assert kind_of_most(found.items()) is None


def test_the_kind_of_most_values_counts() -> None:
    """That of a mixed file, as GGUF's are; embeddings, heads and norms do not count."""
    small, large = torch.randn(32, 32), torch.randn(32, 96)
    weights: dict[str, torch.Tensor | QuantizedWeight] = {
        "model.embed_tokens.weight": torch.randn(500, 32),
        "model.layers.0.self_attn.q_proj.weight": quantize(small, "int8"),
        "model.layers.0.mlp.up_proj.weight": quantize(large, "int4"),
        "model.layers.0.input_layernorm.weight": torch.randn(32),
    }
    assert kind_of_most(weights.items()) == "int4"
    assert kind_of_most([]) is None


def test_routers_and_experts(tmp_path: Path) -> None:
    names = ("mlp.gate", "mlp.experts.0.up_proj", "block_sparse_moe.gate", "mlp.gate_proj")
    tensors = {f"model.layers.0.{name}.weight": torch.randn(8, 32) for name in names}
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.randn(8)
    save_file(tensors, tmp_path / "model.safetensors")
    found = load_weights(tmp_path, CPU, torch.float32, "int8")
    quantized = {name for name, weight in found.items() if isinstance(weight, QuantizedWeight)}
    assert quantized == {
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_tied_head_is_a_quantized_copy(tmp_path: Path, kind: QuantKind) -> None:
    embedding = torch.randn(40, 32)
    save_file({"model.embed_tokens.weight": embedding}, tmp_path / "model.safetensors")
    found = load_weights(tmp_path, CPU, torch.float32, kind)
    assert set(found) == {"model.embed_tokens.weight", TIED_HEAD}
    plain, head = found["model.embed_tokens.weight"], found[TIED_HEAD]
    assert isinstance(plain, torch.Tensor)
    assert torch.equal(plain, embedding)
    assert isinstance(head, QuantizedWeight)
    assert head.kind == "int8"
    assert (dequantize(head) - embedding).norm() < 0.01 * embedding.norm()
    for plainly in ("auto", "none"):
        assert len(load_weights(tmp_path, CPU, torch.float32, plainly)) == 1


def test_a_model_multiplies_by_the_copy(tmp_path: Path) -> None:
    """Its hidden states are looked up in the embedding itself."""
    make_tied_model(tmp_path)
    config = load_model_config(tmp_path)
    model = DecoderModel(config, load_weights(tmp_path, CPU, torch.float32, "int8"), CPU)
    assert isinstance(model.embedding, torch.Tensor)
    assert isinstance(model.head.weight, QuantizedWeight)
    plain = DecoderModel(config, load_weights(tmp_path, CPU, torch.float32), CPU)
    assert plain.head.weight is plain.embedding


def make_tied_model(folder: Path) -> None:
    make_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")


def test_an_embedding_of_its_own_stays_plain(model: Path) -> None:
    found = load_weights(model, CPU, torch.bfloat16, "int8")
    assert isinstance(found["model.embed_tokens.weight"], torch.Tensor)


def test_none_makes_a_quantized_checkpoint_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.weights._PIECE_VALUES", 5 * 64)
    parts, expected = checkpoints.gptq(act_order=True)
    checkpoints.write(tmp_path, GPTQ, ("a", parts))
    found = load_weights(tmp_path, CPU, torch.bfloat16, "none")["a.weight"]
    assert isinstance(found, torch.Tensor)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected.bfloat16())


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    checkpoints.write(tmp_path, GPTQ, ("a", checkpoints.gptq()[0]))
    with pytest.raises(ConfigError, match=r"already \(gptq\).*auto"):
        load_weights(tmp_path, CPU, torch.bfloat16, "int8")


def test_an_unknown_quantization(model: Path) -> None:
    with pytest.raises(ConfigError, match="known: auto, none, int8, int4, fp8"):
        load_weights(model, CPU, torch.bfloat16, "int3")


def test_weights_come_one_by_one(model: Path) -> None:
    weights = iterate_weights(model, CPU, torch.float32)
    assert next(weights)[0] in load_weights(model, CPU, torch.float32)
    weights.close()  # type: ignore[attr-defined]


def test_the_quantization_changes_the_fingerprint(model: Path) -> None:
    kinds = ("auto", "none", *KINDS)
    assert len({name_of(model, "bfloat16", kind) for kind in kinds}) == len(kinds)

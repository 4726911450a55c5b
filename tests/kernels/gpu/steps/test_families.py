"""Steps with the GPU's kernels against plain torch, in fp32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.layers import Experts, Linear
from engine.model.model import DecoderModel
from engine.quantization.weight import QuantKind, quantize
from engine.scheduling.plan import PlanRow
from tests.kernels.gpu.steps.pairs import check_equal, gpu, load, reference, save
from tests.support.engine.families import CASES

pytestmark = pytest.mark.timeout(400)
"""Interpreted, a step takes seconds."""


def check(folder: Path, **options: Any) -> None:
    model = load(folder)
    vocab = model.config.vocab_size
    check_equal(gpu(load(folder), **options), reference(model), vocab)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_steps_of_every_family(tmp_path: Path, name: str) -> None:
    check(save(tmp_path, name))


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma2", "olmo2", "phi3, partly rotated", "mixtral"])
def test_steps_of_fixed_order(tmp_path: Path, name: str) -> None:
    check(save(tmp_path, name), deterministic=True)


def exchange(linear: Linear, kind: QuantKind, group: int | None) -> None:
    assert isinstance(linear.weight, torch.Tensor)
    weight = quantize(linear.weight.float(), kind, group)
    inputs = weight.shape[1]
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    linear.__init__(replace(weight, columns=order), linear.bias)  # type: ignore[misc]


def quantized(model: DecoderModel, kind: QuantKind, group: int | None) -> DecoderModel:
    """Every matrix of its layers exchanged in place, one value in another kind."""
    for layer in model.layers:
        linears = [layer.query, layer.key, layer.output]
        mlps = layer.mlp.experts if isinstance(layer.mlp, Experts) else (layer.mlp,)
        for mlp in mlps:
            linears += [mlp.gate, mlp.up, mlp.down]
        for linear in linears:
            exchange(linear, kind, group)
        exchange(layer.value, "fp8" if layer is model.layers[0] else kind, None)
    return model


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kind", "group", "deterministic"),
    [
        ("qwen2", "int8", 32, False),
        ("qwen2", "int8", 8, False),
        ("qwen2", "int4", 16, False),
        ("qwen2", "int4", 32, True),
        ("qwen2", "fp8", None, False),
        ("mixtral", "int4", 32, False),
        ("mixtral", "int8", 16, True),
    ],
)
def test_steps_with_quantized_weights(
    tmp_path: Path, name: str, kind: QuantKind, group: int | None, deterministic: bool
) -> None:
    """Biases, weights of unlike kinds that are one layer, groups that the kernel does not have."""
    folder = save(tmp_path, name, intermediate_size=96, num_hidden_layers=2)
    model = quantized(load(folder), kind, group)
    vocab = model.config.vocab_size
    other = gpu(quantized(load(folder), kind, group), deterministic=deterministic)
    check_equal(other, reference(model), vocab)


@pytest.mark.long
def test_more_rows_than_the_kernel_for_quantized_weights_takes(tmp_path: Path) -> None:
    """They are dequantized for a prompt of 80 tokens."""
    folder = save(tmp_path, "llama", intermediate_size=96, num_hidden_layers=1)
    model = quantized(load(folder), "int8", 32)
    tokens = list(range(80))
    row = (tokens, PlanRow(0, 0, 80, (4, 3, 2, 1, 0), True))
    found = gpu(quantized(load(folder), "int8", 32)).logits([row])[0]
    torch.testing.assert_close(found, reference(model).logits([row])[0], atol=1e-4, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("kv", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_steps_over_a_quantized_cache(tmp_path: Path, name: str, kv: torch.dtype) -> None:
    folder = save(tmp_path, name)
    model = load(folder)
    # A key on the border of two codes may fall either way.
    check_equal(gpu(load(folder), kv), reference(model, kv), model.config.vocab_size, 5e-2)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_quantized_embeddings(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, name, tie_word_embeddings=True, num_hidden_layers=1)

    def tied() -> DecoderModel:
        model = load(folder)
        assert isinstance(model.embedding, torch.Tensor)
        model.embedding = quantize(model.embedding, "int8", 32)
        model.head = Linear(model.embedding)
        return model

    model = tied()
    check_equal(gpu(tied()), reference(model), model.config.vocab_size)

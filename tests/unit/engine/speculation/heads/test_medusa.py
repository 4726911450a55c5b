"""Medusa heads: what their config may be, what they compute, and the names of their tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from safetensors.torch import load_file, save_file

from baton.errors import ConfigError
from engine.checkpoint.model_config import load_model_config
from engine.model.model import DecoderModel
from engine.model.weights import load_weights
from engine.speculation.heads.loading import load_medusa
from engine.speculation.heads.medusa import MedusaModel
from tests.support.drafter_heads import make_counting_medusa
from tests.support.models import VOCAB, make_tiny_model

CPU = torch.device("cpu")
HIDDEN = 48


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def load(folder: Path, target: Path) -> MedusaModel:
    config = load_model_config(target)
    model = DecoderModel(config, load_weights(target, CPU, torch.float32), CPU)
    return load_medusa(folder, model, CPU)


def write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def random_heads(count: int, blocks: int, vocab: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = {}
    for head in range(count):
        for block in range(blocks):
            weights[f"{head}.{block}.linear.weight"] = random(HIDDEN, HIDDEN)
            weights[f"{head}.{block}.linear.bias"] = random(HIDDEN)
        weights[f"{head}.{blocks}.weight"] = random(vocab, HIDDEN)
    return weights


def expected(weights: dict[str, torch.Tensor], count: int, blocks: int) -> torch.Tensor:
    """Of ``hidden``; the tiny model's last norm has weights of 1."""
    found = []
    for head in range(count):
        x = F.rms_norm(hidden(), (HIDDEN,), eps=1e-5)
        for block in range(blocks):
            name = f"{head}.{block}.linear"
            x = x + F.silu(F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"]))
        found.append(x @ weights[f"{head}.{blocks}.weight"].T)
    return torch.stack(found)


def hidden() -> torch.Tensor:
    return torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("blocks", [1, 2])
def test_what_heads_compute(target: Path, tmp_path: Path, blocks: int) -> None:
    weights = random_heads(3, blocks, VOCAB)
    config = {"medusa_num_heads": 3, "medusa_num_layers": blocks}
    model = load(write(tmp_path, config, weights), target)
    assert model.heads == 3
    assert model.token_ids.tolist() == list(range(VOCAB))
    wanted = expected(weights, 3, blocks)
    torch.testing.assert_close(model.logits(hidden(), 3), wanted, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(model.logits(hidden(), 2), wanted[:2], atol=1e-3, rtol=1e-4)


def test_the_other_way_of_naming(target: Path, tmp_path: Path) -> None:
    """vLLM's, with fewer tokens and one head's matrix for all."""
    plain = random_heads(2, 1, 40)
    chosen = torch.arange(0, 160, 4)
    weights = {
        "token_map": chosen,
        "blocks.0.layers.0.weight": plain["0.0.linear.weight"],
        "blocks.0.layers.0.bias": plain["0.0.linear.bias"],
        "blocks.1.layers.0.weight": plain["1.0.linear.weight"],
        "blocks.1.layers.0.bias": plain["1.0.linear.bias"],
        "lm_heads.0.weight": plain["0.1.weight"],
    }
    config = {
        "model_type": "medusa",
        "num_heads": 2,
        "num_hidden_layers": 1,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "truncated_vocab_size": 40,
    }
    model = load(write(tmp_path, config, weights), target)
    assert model.token_ids.tolist() == chosen.tolist()
    wanted = expected(plain | {"1.1.weight": plain["0.1.weight"]}, 2, 1)
    torch.testing.assert_close(model.logits(hidden(), 2), wanted, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"medusa_num_heads": None}, "not Medusa heads"),
        ({"medusa_num_heads": 0}, "medusa_num_heads"),
        ({"hidden_size": 64}, "hidden_size is 64"),
        ({"vocab_size": 99}, "vocab_size is 99"),
        ({"truncated_vocab_size": VOCAB + 1}, "truncated_vocab_size"),
        ({"truncated_vocab_size": 10}, "no token_map"),
        ({"medusa_num_layers": 2}, "no tensor"),
    ],
)
def test_heads_that_are_refused(
    target: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = make_counting_medusa(tmp_path, target)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        load(folder, target)


def test_a_token_map_of_others(target: Path, tmp_path: Path) -> None:
    folder = make_counting_medusa(tmp_path, target)
    path = folder / "medusa_lm_head.safetensors"
    save_file(load_file(path) | {"token_map": torch.full((VOCAB,), VOCAB)}, path)
    with pytest.raises(ConfigError, match="does not have"):
        load(folder, target)

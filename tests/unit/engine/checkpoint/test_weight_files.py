"""Which files of a folder are the model, and what savers call its tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import ConfigError
from engine.checkpoint.model_config import load_model_config
from engine.checkpoint.weight_files import plain_names, weight_files
from engine.model.model import DecoderModel
from engine.model.weights import load_weights
from engine.parallel.shard import shard_of
from engine.parallel.weight_slices import WeightSlices
from tests.support.models import make_tiny_model

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"
SAVED = {
    "a bare decoder": ("", "lm_head."),
    "a wrapper of images": ("language_model.model.", "language_model.lm_head."),
    "a newer wrapper of images": ("model.language_model.", "lm_head."),
    "a wrapper of data parallelism": ("module.model.", "module.lm_head."),
    "a compiled model": ("_orig_mod.model.", "_orig_mod.lm_head."),
}


def renamed(folder: Path, decoder: str, head: str) -> dict[str, torch.Tensor]:
    """Save the model of a folder under other names, next to an encoder of images. Returns its
    plain weights."""
    plain = load_file(folder / WEIGHTS)
    saved = {
        name.replace("lm_head.", head) if name.startswith("lm_head.") else decoder + name[6:]: one
        for name, one in plain.items()
    }
    vision = {"vision_tower.layers.0.mlp.fc1.weight": torch.ones(2, 2)}
    save_file(saved | vision, folder / WEIGHTS)
    return plain


@pytest.mark.parametrize("saver", SAVED)
def test_a_decoder_is_found_by_its_embedding(saver: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    plain = renamed(folder, *SAVED[saver])
    found = load_weights(folder, CPU, torch.float32)
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)  # type: ignore[arg-type]
    DecoderModel(load_model_config(folder), found, CPU)


@pytest.mark.parametrize("saver", SAVED)
def test_a_rank_finds_its_part_under_any_name(saver: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    config = load_model_config(folder)
    slices = WeightSlices(config, shard_of(config, 1, 2))
    plain = load_weights(folder, CPU, torch.float32, slices=slices)
    renamed(folder, *SAVED[saver])
    found = load_weights(folder, CPU, torch.float32, slices=slices)
    assert found.keys() == plain.keys()
    for name, weight in found.items():
        assert torch.equal(weight, plain[name])  # type: ignore[arg-type]


def test_the_embedding_of_an_extra_layer_is_not_the_decoder() -> None:
    names = ["model.embed_tokens.weight", "model.layers.0.a", "model.layers.9.embed_tokens.weight"]
    assert plain_names(names) == {name: name for name in names}


def test_names_without_an_embedding_are_kept() -> None:
    """A drafter's heads may lack one."""
    assert plain_names(["fc.weight", "layers.0.a"]) == {
        "fc.weight": "fc.weight",
        "layers.0.a": "layers.0.a",
    }


OTHERS = (
    *("adapter_model.safetensors", "consolidated.safetensors", "optimizer.safetensors"),
    *("consolidated-00001-of-00002.safetensors", "training_state.safetensors"),
)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("a.safetensors", *OTHERS), ["a.safetensors"]),
        ((WEIGHTS, "model-00001-of-00002.safetensors", *OTHERS), [WEIGHTS]),
        (
            ("model-00001-of-00001.safetensors", "ema-00001-of-00002.safetensors", *OTHERS),
            ["model-00001-of-00001.safetensors"],
        ),
        (OTHERS, []),
    ],
)
def test_files_that_are_not_the_model_are_left_alone(
    names: tuple[str, ...], found: list[str]
) -> None:
    assert weight_files(names) == found


def test_files_that_are_not_the_model_are_not_read(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    plain = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).rename(folder / "weights.safetensors")
    for name in OTHERS:
        save_file({"model.norm.weight": torch.zeros(1)}, folder / name)
    (folder / "original").mkdir()
    save_file({"tok_embeddings.weight": torch.zeros(1)}, folder / "original" / WEIGHTS)
    found = load_weights(folder, CPU, torch.float32)
    assert found.keys() == plain.keys()
    assert torch.equal(found["model.norm.weight"], plain["model.norm.weight"])  # type: ignore[arg-type]


def test_a_lost_shard_without_an_index_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(ConfigError, match=r"imply: model-00002-of-00002\.safetensors"):
        load_weights(tmp_path, CPU, torch.float32)


def test_an_adapter_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"an adapter .* Merge it into its base model"):
        load_weights(tmp_path, CPU, torch.float32)

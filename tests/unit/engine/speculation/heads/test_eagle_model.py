"""EAGLE-3 heads: what their config may be, and what they compute, in torch and in C++."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from safetensors.torch import load_file, save_file

from baton.errors import ConfigError
from engine.checkpoint.model_config import load_model_config
from engine.cpu.decoder import cpu_decoder
from engine.kv.kv_cache import KvCache
from engine.model.model import DecoderModel
from engine.model.weights import load_weights
from engine.sampling.step import StepInput, StepModel
from engine.scheduling.plan import PlanRow
from engine.speculation.heads.eagle_config import load_eagle_config
from engine.speculation.heads.eagle_model import EagleModel, EagleTorchStep
from engine.speculation.heads.loading import load_eagle
from loadtest.research.training.eagle_trainee import EagleTrainee
from tests.support.drafter_heads import make_eagle_head
from tests.support.models import VOCAB, make_tiny_model

CPU = torch.device("cpu")
LENGTH = 20
TABLE = (3, 1, 2)

cpu_kernels = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), layers=3, head_dim=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return make_eagle_head(tmp_path_factory.mktemp("head"), target)


def load_target(folder: Path, dtype: torch.dtype) -> DecoderModel:
    config = load_model_config(folder)
    return DecoderModel(config, load_weights(folder, CPU, dtype), CPU)


def load(folder: Path, target: Path, dtype: torch.dtype = torch.float32) -> EagleModel:
    return load_eagle(folder, load_target(target, dtype), CPU)


def new_cache(model: EagleModel, dtype: torch.dtype) -> KvCache:
    cache = KvCache(model.config, 4, 16, dtype, CPU)
    cache.data.fill_(50.0)
    return cache


def steps_of(model: EagleModel, kind: str) -> StepModel:
    if kind == "torch":
        return EagleTorchStep(model, new_cache(model, model.dtype), CPU)
    found = cpu_decoder(model, new_cache(model, torch.bfloat16))
    assert found is not None
    return found


def inputs(model: EagleModel) -> tuple[list[int], torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (LENGTH,), generator=generator).tolist()
    hidden = 4 * torch.randn(LENGTH, 3, model.config.hidden_size, generator=generator)
    hidden[0] = 0
    return tokens, hidden


def chain(
    model: EagleModel, steps: StepModel, pieces: tuple[int, ...], drafted: int
) -> list[torch.Tensor]:
    """Logits behind a prefix that comes in pieces, and behind some tokens drafted from there."""
    tokens, hidden = inputs(model)
    start = 0
    for count in pieces[:-1]:
        row = PlanRow(0, start, count, TABLE, True)
        part = hidden[start : start + count]
        steps.run(StepInput((row,), tokens[start : start + count], [], True, states=part))
        start += count
    found = []
    features = None
    for length in range(drafted + 1):
        count = pieces[-1] if not length else 1
        step = StepInput(
            (PlanRow(0, start, count, TABLE, True),),
            tokens[start : start + count],
            [count - 1],
            False,
            (1,),
            features,
            hidden[start : start + count] if not length else None,
        )
        output = steps.run(step)
        assert output.logits is not None
        assert output.hidden is not None
        found.append(output.logits[0].clone())
        features = output.hidden[-1].clone()
        start += count
    return found


@torch.inference_mode()
def expected(folder: Path, model: EagleModel, at: int, drafted: int) -> list[torch.Tensor]:
    """Of the head as it is trained: an implementation of its own, without a cache."""
    weights = {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}
    trainee = EagleTrainee(model.config, len(weights["lm_head.weight"]))
    missing, unexpected = trainee.load_state_dict(weights, strict=False)
    assert not missing
    assert set(unexpected) <= {"d2t", "t2d"}
    tokens, hidden = inputs(model)
    assert isinstance(model.embedding, torch.Tensor)
    embedded = F.embedding(torch.tensor(tokens), model.embedding.float())
    found = trainee(embedded[None], hidden.flatten(1)[None], drafted + 1)
    return [found[n][0, at + n] for n in range(drafted + 1)]


@pytest.mark.parametrize("pieces", [(9,), (4, 5), (1, 1, 1, 6), (17,), (16, 1)])
def test_a_head_computes_what_is_trained(
    folder: Path, target: Path, pieces: tuple[int, ...]
) -> None:
    model = load(folder, target)
    found = chain(model, steps_of(model, "torch"), pieces, 2)
    wanted = expected(folder, model, sum(pieces) - 1, 2)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@cpu_kernels
@pytest.mark.parametrize("pieces", [(9,), (4, 5), (17,), (16, 1)])
def test_in_c_plus_plus_too(folder: Path, target: Path, pieces: tuple[int, ...]) -> None:
    model = load(folder, target, torch.bfloat16)
    found = chain(model, steps_of(model, "cpu"), pieces, 2)
    wanted = chain(model, steps_of(model, "torch"), pieces, 2)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=0.15, rtol=0.02)
        assert F.cosine_similarity(one, other, dim=0) > 0.999


@cpu_kernels
def test_the_norm_before_the_residual(folder: Path, target: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"norm_before_residual": True}))
    other = load(folder, target, torch.bfloat16)
    model = load(tmp_path / "head", target, torch.bfloat16)
    (found,) = chain(model, steps_of(model, "cpu"), (9,), 0)
    (wanted,) = chain(model, steps_of(model, "torch"), (9,), 0)
    assert F.cosine_similarity(found, wanted, dim=0) > 0.999
    (without,) = chain(other, steps_of(other, "torch"), (9,), 0)
    assert F.cosine_similarity(found, without, dim=0) < 0.99


def test_the_best_are_those_of_the_logits(folder: Path, target: Path) -> None:
    model = load(folder, target)
    tokens, hidden = inputs(model)
    features = model.features(hidden)
    row = PlanRow(0, 0, LENGTH, TABLE, True)
    step = StepInput((row,), tokens, [2, 7], True, features=features)
    best = steps_of(model, "torch").run(step)
    logits = steps_of(model, "torch").run(replace(step, greedy=False)).logits
    assert logits is not None
    assert best.best == logits.argmax(dim=-1).tolist()
    assert best.hidden is None


def test_its_tokens_are_the_targets(folder: Path, target: Path) -> None:
    model = load(folder, target)
    known = load_file(folder / "model.safetensors")["t2d"].nonzero()[:, 0]
    assert model.token_ids.tolist() == known.tolist()
    assert model.feature_layers == (1, 1, 3)


def test_default_layers(target: Path, tmp_path: Path) -> None:
    head = make_eagle_head(tmp_path / "head", target, eagle_config=None)
    config = replace(load_model_config(target), layers=30)
    assert load_eagle_config(head, config).feature_layers == (2, 15, 27)


def test_an_embedding_of_its_own(folder: Path, target: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "head")
    path = tmp_path / "head" / "model.safetensors"
    own = torch.randn(VOCAB, 48)
    save_file(load_file(path) | {"embed_tokens.weight": own}, path)
    model = load(tmp_path / "head", target)
    assert isinstance(model.embedding, torch.Tensor)
    assert torch.equal(model.embedding, own)


def test_other_names_of_the_layer(folder: Path, target: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "head")
    path = tmp_path / "head" / "model.safetensors"
    renamed = {n.replace("midlayer", "layers.0"): t for n, t in load_file(path).items()}
    save_file(renamed, path)
    model, other = load(tmp_path / "head", target), load(folder, target)
    one, same = model.layers[0].query.weight, other.layers[0].query.weight
    assert isinstance(one, torch.Tensor)
    assert isinstance(same, torch.Tensor)
    assert torch.equal(one, same)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "not an EAGLE-3 head"),
        ({"vocab_size": 99}, "vocab_size is 99"),
        ({"draft_vocab_size": VOCAB + 1}, "draft_vocab_size"),
        ({"num_hidden_layers": 2}, "one layer"),
        ({"target_hidden_size": 64}, "hidden states of 64"),
        ({"num_key_value_heads": 3}, "does not divide"),
        ({"hidden_act": "gelu"}, "silu"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, "layers 0 to 2"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, "2 entries"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "only the last layer"),
        ({"intermediate_size": 96}, "gate_proj"),
    ],
)
def test_heads_that_are_refused(
    target: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    head = make_eagle_head(tmp_path / "head", target)
    path = head / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        load(head, target)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("d2t", None, "has no d2t"),
        ("d2t", torch.zeros(64), "integers"),
        ("d2t", torch.full((64,), VOCAB), "does not have"),
        ("fc.weight", None, "no tensor fc.weight"),
        ("midlayer.hidden_norm.weight", None, "hidden_norm"),
    ],
)
def test_tensors_that_are_refused(
    folder: Path,
    target: Path,
    tmp_path: Path,
    name: str,
    tensor: torch.Tensor | None,
    message: str,
) -> None:
    shutil.copytree(folder, tmp_path / "head")
    path = tmp_path / "head" / "model.safetensors"
    weights = {n: t for n, t in load_file(path).items() if n != name}
    save_file(weights if tensor is None else weights | {name: tensor}, path)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "head", target)


def test_no_head_at_all(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load(tmp_path, target)

"""The served model's facts, from its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.errors import ConfigError
from router.core.served_model import ServedModel


@pytest.mark.parametrize(
    ("config", "bound", "context"),
    [
        ({"hidden_size": 8, "max_position_embeddings": 2048}, 0, 2048),
        ({"hidden_size": 8, "max_position_embeddings": 2048}, 512, 512),
        ({"hidden_size": 8, "max_position_embeddings": 2048}, 4096, 2048),
        ({"text_config": {"hidden_size": 8, "max_position_embeddings": 64}}, 0, 64),
        ({"text_config": {"hidden_size": 8}}, 512, 512),
        (
            {
                "hidden_size": 8,
                "max_position_embeddings": 4096,
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            0,
            16384,
        ),
    ],
)
def test_the_context_is_the_models_own_or_its_bound(
    tmp_path: Path, config: dict[str, Any], bound: int, context: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ServedModel.of("tiny", tmp_path, bound, "1234abcd")
    assert (model.id, model.context_length, model.embedding_size) == ("tiny", context, 8)
    assert model.revision == "1234abcd"


GENERATION = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0,
    "repetition_penalty": 1.05,
    "max_new_tokens": 2048,
    "do_sample": False,
    "eos_token_id": 5,
    "typical_p": None,
}


def served(folder: Path, generation: Any, **options: Any) -> ServedModel:
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return ServedModel.of("tiny", folder, **options)


def test_sampling_parameters_are_those_of_the_model(tmp_path: Path) -> None:
    found = dict(served(tmp_path, GENERATION, sampling={"temperature": 0.1, "seed": 3}).sampling)
    assert found == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0,
        "repetition_penalty": 1.05,
        "max_tokens": 2048,
        "seed": 3,
    }
    none = served(tmp_path, GENERATION, generation_config="none", sampling={"temperature": 0.1})
    assert none.sampling == {}
    assert served(tmp_path, {"temperature": None}).sampling == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in ("1", True, [1])),
        *(("max_new_tokens", value) for value in (0, 1.5, "x")),
        ("top_k", 1.5),
    ],
)
def test_a_malformed_sampling_parameter_is_named(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {name} must be"):
        served(tmp_path, {name: value})


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({}, "hidden_size"),
        ({"hidden_size": "x"}, "hidden_size"),
        ({"hidden_size": 8, "max_position_embeddings": [1]}, "max_position_embeddings"),
        ({"hidden_size": 8, "text_config": 5}, "text_config"),
        ([], "JSON object"),
    ],
)
def test_a_malformed_config_is_named(tmp_path: Path, config: Any, field: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"config\.json.*{field}"):
        ServedModel.of("tiny", tmp_path)

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

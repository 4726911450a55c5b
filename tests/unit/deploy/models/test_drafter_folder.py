"""Where a drafter's model lies: heads are a folder of their own, without a tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.config.cluster import Config
from baton.errors import ConfigError
from deploy.models.drafter_folder import resolve_drafter
from tests.support.models import make_tiny_model


@pytest.mark.parametrize("drafter", ["eagle", "medusa"])
def test_heads_are_a_folder(tmp_path: Path, drafter: str) -> None:
    assert resolve_drafter(drafter, str(tmp_path), print).path == tmp_path
    with pytest.raises(ConfigError, match=f"the heads of drafter {drafter} are a folder"):
        resolve_drafter(drafter, str(tmp_path / "none"), print)


def test_a_smaller_model_is_found_as_models_are(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    assert resolve_drafter("draft", str(folder), print).path == folder
    with pytest.raises(ConfigError, match="not a Hugging Face model"):
        resolve_drafter("draft", str(tmp_path), print)


@pytest.mark.parametrize("drafter", ["draft", "eagle", "medusa"])
def test_the_configuration_must_name_it(drafter: str) -> None:
    with pytest.raises(ValueError, match=f"{drafter} needs a draft_model"):
        Config.model_validate({"drafter": drafter})
    assert Config.model_validate({"drafter": drafter, "draft_model": "head"}).drafter == drafter

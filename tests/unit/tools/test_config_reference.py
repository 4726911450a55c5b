"""docs/configuration.md says what baton/config/cluster.py says."""

from __future__ import annotations

from pathlib import Path

from tools.config_reference import reference

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_page_is_what_the_code_says() -> None:
    hint = "run: python -m tools.config_reference > docs/configuration.md"
    assert PAGE.read_text() == reference(), hint

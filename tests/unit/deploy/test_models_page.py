"""docs/how-to/models/own-model.md lists the architectures that the engine serves."""

from __future__ import annotations

import re
from pathlib import Path

from engine.checkpoint.families import FAMILIES

PAGE = Path(__file__).parents[3] / "docs/how-to/models/own-model.md"


def test_the_page_lists_every_architecture() -> None:
    listed = re.findall(r"^\| `(\w+For\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(FAMILIES)

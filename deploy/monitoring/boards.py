"""Baton's Grafana dashboards. This module writes them:

python -m deploy.monitoring.boards
"""

from __future__ import annotations

import json
from pathlib import Path

from deploy.monitoring.cache_board import CACHE
from deploy.monitoring.dashboard import Dashboard
from deploy.monitoring.handoff_board import HANDOFF
from deploy.monitoring.overview_board import OVERVIEW
from deploy.monitoring.pools_board import POOLS
from deploy.monitoring.slo_board import SLO

FOLDER = Path(__file__).parent / "dashboards"
BOARDS = {"overview": OVERVIEW, "pools": POOLS, "handoff": HANDOFF, "cache": CACHE, "slo": SLO}
"""By their files' names."""


def text_of(board: Dashboard) -> str:
    """The file's text."""
    return json.dumps(board.to_json(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name, board in BOARDS.items():
        (FOLDER / f"{name}.json").write_text(text_of(board), encoding="utf-8")

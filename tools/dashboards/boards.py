"""Writes Baton's Grafana dashboards:

python -m tools.dashboards.boards
"""

from __future__ import annotations

import json
from pathlib import Path

from tools.dashboards.cache_board import CACHE
from tools.dashboards.costs_board import COSTS
from tools.dashboards.dashboard import Dashboard
from tools.dashboards.handoff_board import HANDOFF
from tools.dashboards.overview_board import OVERVIEW
from tools.dashboards.pools_board import POOLS
from tools.dashboards.slo_board import SLO

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring" / "dashboards"
BOARDS = {
    "overview": OVERVIEW,
    "pools": POOLS,
    "handoff": HANDOFF,
    "cache": CACHE,
    "costs": COSTS,
    "slo": SLO,
}
"""The dashboards, by the names of their files."""


def text_of(board: Dashboard) -> str:
    """Return the JSON text of a dashboard's file."""
    return json.dumps(board.to_json(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name, board in BOARDS.items():
        (FOLDER / f"{name}.json").write_text(text_of(board), encoding="utf-8")

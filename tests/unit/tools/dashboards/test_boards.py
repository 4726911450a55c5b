"""Dashboards are what their module says, and ask for series that there are."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.deploy.promql import Checker
from tests.support.deploy.watched import checker_with_rules
from tools.dashboards.boards import BOARDS, FOLDER, text_of
from tools.dashboards.variables import filtered

CHECKER = checker_with_rules()
_SELECTOR = re.compile(r"\bbaton[_:][a-z0-9_:]+({[^}]*})?")
_VARIABLE = re.compile(r"\$([a-z]+)")
_LEGEND = re.compile(r"{{(\w+)}}")


@pytest.mark.parametrize("name", BOARDS)
def test_the_file_is_what_the_module_says(name: str) -> None:
    hint = "run: python -m tools.dashboards.boards"
    assert (FOLDER / f"{name}.json").read_text(encoding="utf-8") == text_of(BOARDS[name]), hint


def test_there_is_no_other_file() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.json" for name in BOARDS}


@pytest.mark.parametrize("name", BOARDS)
def test_every_expression_asks_for_what_there_is(name: str) -> None:
    for target in _targets(json.loads(text_of(BOARDS[name]))):
        labels = _check(CHECKER, target["expr"])
        assert set(_LEGEND.findall(target["legendFormat"])) <= labels, target


@pytest.mark.parametrize("name", BOARDS)
def test_expressions_are_filtered_by_the_variables(name: str) -> None:
    board = json.loads(text_of(BOARDS[name]))
    known = {one["name"] for one in board["templating"]["list"]}
    assert {"datasource", "cluster"} <= known
    used: set[str] = {"datasource", "cluster"}
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            used.update(_VARIABLE.findall(target["expr"]))
            for selector in _SELECTOR.finditer(target["expr"]):
                chosen = 'cluster="$cluster"' in (selector[1] or "")
                assert chosen != panel["title"].endswith(" by cluster"), target
    assert known == used


def test_a_filter_is_added_to_each_series() -> None:
    found = filtered('sum(baton_kv_blocks{state="free"}) / sum(rate(baton_handoffs_total[5m]))')
    workers = 'worker=~"$pool-[0-9]+",worker=~"$worker"'
    assert found == (
        f'sum(baton_kv_blocks{{state="free",cluster="$cluster",{workers}}})'
        ' / sum(rate(baton_handoffs_total{cluster="$cluster"}[5m]))'
    )
    with pytest.raises(KeyError, match="baton_nothing"):
        filtered("sum(baton_nothing)")


@pytest.mark.parametrize("name", BOARDS)
def test_the_layout(name: str) -> None:
    board = json.loads(text_of(BOARDS[name]))
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(x < 24 for x, _ in cells)
        taken |= cells
        assert panel["title"]


def test_dashboards_differ() -> None:
    for kind in ("uid", "title"):
        assert len({getattr(board, kind) for board in BOARDS.values()}) == len(BOARDS)


def _check(checker: Checker, expression: str) -> frozenset[str]:
    return checker.check(expression.replace("$__rate_interval", "5m"))


def _targets(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [target for panel in board["panels"] for target in panel.get("targets", ())]

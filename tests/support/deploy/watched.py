"""What there is to watch: the rules' file, and the checker that knows all series."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from baton.telemetry.page import PAGE_LABELS
from tests.support.deploy.promql import Checker
from tools.reference.metrics import Family, families

MONITORING = Path(__file__).parents[3] / "deploy" / "monitoring"
RULES = MONITORING / "rules.yaml"


def rules() -> Iterator[dict[str, Any]]:
    """Every rule, in the file's order."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from group["rules"]


def _series(family: Family) -> dict[str, frozenset[str]]:
    """The labels of each series of a family, by the name of the series."""
    labels = frozenset(family.labels) | frozenset(PAGE_LABELS)
    if family.kind != "histogram":
        return {family.shown_name: labels}
    return {
        f"{family.name}_bucket": labels | {"le"},
        f"{family.name}_sum": labels,
        f"{family.name}_count": labels,
    }


def checker() -> Checker:
    """Of all series that a cluster exports, and ``up``; without what rules record."""
    series = {name: labels for one in families() for name, labels in _series(one).items()}
    rising = {
        name for one in families() if one.kind in ("counter", "histogram") for name in _series(one)
    }
    return Checker({**series, "up": frozenset()}, frozenset(rising))


def checker_with_rules() -> Checker:
    """Of what rules record, too."""
    found = checker()
    for rule in rules():
        labels = found.check(rule["expr"])
        if "record" in rule:
            found.add(rule["record"], labels)
    return found

"""The variables of the dashboards, and the filters by them that every expression gets."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tools.reference.metrics import families

_RULES = Path(__file__).parents[2] / "deploy" / "monitoring" / "rules.yaml"
_SERIES = re.compile(r"\b(baton[_:][a-z0-9_:]+)(?:{([^}]*)})?")
_GROUPED = re.compile(r"\bby \(([^)]*)\)")
_CLUSTER = 'cluster="$cluster"'
_FILTERS = {
    "class": ('class=~"$class"',),
    # The slots of a pool begin with its name.
    "worker": ('worker=~"$pool-[0-9]+"', 'worker=~"$worker"'),
}
"""Filters of series that have a label, besides that of the cluster."""
_OF_CLUSTER = f"{{{_CLUSTER}}}"
_CHOICES = {
    "pool": (f"label_values(baton_batch_fill_ratio{_OF_CLUSTER}, worker)", "/^(.*)-[0-9]+$/"),
    "class": (f"label_values(baton_requests_total{_OF_CLUSTER}, class)", ""),
    "worker": (
        f'label_values(baton_batch_fill_ratio{{{_CLUSTER},worker=~"$pool-[0-9]+"}}, worker)',
        "",
    ),
}
"""Query and regular expression of each variable that has an ``All``."""


def filtered(expression: str) -> str:
    """Return a PromQL expression with filters by the variables on each of its series.

    Raises KeyError for a series that no process exports and no rule records.
    """

    def add(match: re.Match[str]) -> str:
        labels = _labels()[match[1]]
        own = [match[2]] if match[2] else []
        chosen = [one for label in labels if label in _FILTERS for one in _FILTERS[label]]
        return f"{match[1]}{{{','.join([*own, _CLUSTER, *chosen])}}}"

    return _SERIES.sub(add, expression)


def variables(expressions: list[str]) -> list[dict[str, Any]]:
    """Return the variables of a dashboard with these expressions, as Grafana imports them."""
    cluster = _variable("cluster", "label_values(baton_routable_workers, cluster)")
    used = [name for name in _CHOICES if any(f"${name}" in one for one in expressions)]
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"},
        cluster,
        *(
            # With a value of its own, "All" includes what the query does not list: dead workers.
            _variable(name, *_CHOICES[name]) | {"multi": True, "includeAll": True, "allValue": ".*"}
            for name in used
        ),
    ]


def _variable(name: str, query: str, regex: str = "") -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": name},
        "regex": regex,
        "refresh": 2,
        "sort": 1,
    }


@cache
def _labels() -> dict[str, tuple[str, ...]]:
    """Return the labels of each series that a process exports or a rule records."""
    found: dict[str, tuple[str, ...]] = {}
    for family in families():
        parts = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        found |= {f"{family.shown_name}{part}": family.labels for part in parts}
    for group in yaml.safe_load(_RULES.read_text())["groups"]:
        for rule in group["rules"]:
            if "record" in rule:
                grouped = _GROUPED.search(rule["expr"])
                found[rule["record"]] = tuple(grouped[1].split(", ")) if grouped else ()
    return found

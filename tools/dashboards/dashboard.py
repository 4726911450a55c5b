"""Grafana dashboards as data, with one layout and numbering of panels for all of them.

The JSON is what Grafana 10 and newer import: https://grafana.com/docs/grafana/latest/dashboards/
build-dashboards/view-dashboard-json-model/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tools.dashboards.variables import filtered, variables

_WIDTH = 24
"""Number of columns of Grafana's grid."""
_SCHEMA_VERSION = 39
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_TAG = "baton"

Kind = Literal["timeseries", "stat", "heatmap"]


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression. ``legend`` is a template that names each of its time series by labels,
    such as ``{{class}}``."""

    expression: str
    legend: str = ""
    every_cluster: bool = False
    """Whether the query shows all clusters, not only the chosen one."""

    @property
    def shown(self) -> str:
        """Return the expression with the filters by the dashboard's variables."""
        return self.expression if self.every_cluster else filtered(self.expression)


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph of a dashboard."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    """Grafana's name of the unit of the panel's values: ``s``, ``bytes``, ``percentunit``,
    ``reqps`` …"""
    meaning: str = ""
    """Description that Grafana shows with the panel."""
    kind: Kind = "timeseries"
    stacked: bool = False
    limit: float | None = None
    """A threshold for the panel's values. The panel draws it as a dashed line; the values should
    stay on one side of it."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a dashboard: panels next to each other, of equal width."""

    title: str
    panels: tuple[Panel, ...]
    height: int = 8


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One Grafana dashboard: rows of panels on a page."""

    uid: str
    title: str
    meaning: str
    rows: tuple[Row, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that Grafana imports."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.meaning,
            "tags": [_TAG],
            "schemaVersion": _SCHEMA_VERSION,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser",
            "links": [_link_to_others()],
            "templating": {"list": variables(self._expressions)},
            "panels": _laid_out(self.rows),
        }

    @property
    def _expressions(self) -> list[str]:
        return [query.shown for panel in self.panels for query in panel.queries]

    @property
    def panels(self) -> list[Panel]:
        """Return all panels of the dashboard, row by row."""
        return [panel for row in self.rows for panel in row.panels]


def _laid_out(rows: Sequence[Row]) -> list[dict[str, Any]]:
    placed: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        placed.append(
            {
                "id": len(placed) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": top, "w": _WIDTH, "h": 1},
                "panels": [],
            }
        )
        top += 1
        width = _WIDTH // len(row.panels)
        for number, panel in enumerate(row.panels):
            place = {"x": number * width, "y": top, "w": width, "h": row.height}
            placed.append({"id": len(placed) + 1, "gridPos": place, **_panel(panel)})
        top += row.height
    return placed


def _panel(panel: Panel) -> dict[str, Any]:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.meaning,
        "datasource": _SOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": query.shown,
                "legendFormat": query.legend or "__auto",
                **({"format": "heatmap"} if panel.kind == "heatmap" else {}),
            }
            for number, query in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.limit is not None:
        steps.append({"color": "red", "value": panel.limit})
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if panel.kind == "timeseries":
        defaults["min"] = 0
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 20 if panel.stacked else 0,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "off" if panel.limit is None else "dashed"},
        }
    return defaults


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "timeseries":
        return {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    if panel.kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value"}
    return {"calculate": False, "yAxis": {"unit": panel.unit}}


def _link_to_others() -> dict[str, Any]:
    return {
        "type": "dashboards",
        "title": "Baton",
        "tags": [_TAG],
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
    }


RATE = "[$__rate_interval]"
"""Range selector of a PromQL ``rate``. Grafana replaces it by an interval that suits the graph and
the scrape interval."""


def quantiles(series: str, by: str, *shares: float) -> tuple[Query, ...]:
    """Return queries for quantiles of a histogram, one for each of ``shares``. Each query gives one
    time series for each value of the label ``by``."""
    return tuple(
        Query(
            f"histogram_quantile({share}, sum by ({by}, le) (rate({series}_bucket{RATE})))",
            f"{{{{{by}}}}} p{share * 100:g}",
        )
        for share in shares
    )


def rated(series: str, *by: str, where: str = "") -> Query:
    """Return a query for the rate of a counter, summed over all labels except those in ``by``."""
    found = f"rate({series}{{{where}}}{RATE})" if where else f"rate({series}{RATE})"
    if not by:
        return Query(f"sum({found})", series.removeprefix("baton_").removesuffix("_total"))
    labels = ", ".join(by)
    return Query(f"sum by ({labels}) ({found})", " ".join(f"{{{{{label}}}}}" for label in by))


def summed(series: str, *by: str, where: str = "") -> Query:
    """Return a query for a gauge, summed over all labels except those in ``by``."""
    labels = ", ".join(by)
    shown = f"{series}{{{where}}}" if where else series
    return Query(f"sum by ({labels}) ({shown})", " ".join(f"{{{{{label}}}}}" for label in by))

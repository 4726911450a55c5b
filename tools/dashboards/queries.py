"""The queries that dashboards are made of."""

from __future__ import annotations

from tools.dashboards.dashboard import Query

RATE = "[$__rate_interval]"
"""Grafana takes what suits the picture and the scraping."""


def quantiles(series: str, by: str, *shares: float) -> tuple[Query, ...]:
    """Of a histogram, one line for each share and each value of the label ``by``."""
    return tuple(
        Query(
            f"histogram_quantile({share}, sum by ({by}, le) (rate({series}_bucket{RATE})))",
            f"{{{{{by}}}}} p{share * 100:g}",
        )
        for share in shares
    )


def rated(series: str, *by: str, where: str = "") -> Query:
    """Of a counter, summed to the labels ``by``."""
    found = f"rate({series}{{{where}}}{RATE})" if where else f"rate({series}{RATE})"
    if not by:
        return Query(f"sum({found})", series.removeprefix("baton_").removesuffix("_total"))
    labels = ", ".join(by)
    return Query(f"sum by ({labels}) ({found})", " ".join(f"{{{{{label}}}}}" for label in by))


def summed(series: str, *by: str, where: str = "") -> Query:
    """Of a gauge, summed to the labels ``by``."""
    labels = ", ".join(by)
    shown = f"{series}{{{where}}}" if where else series
    return Query(f"sum by ({labels}) ({shown})", " ".join(f"{{{{{label}}}}}" for label in by))
